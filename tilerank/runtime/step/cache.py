"""The caches of layers: their kinds as declarations, and their allocation.

Each kind names the budget that it counts against and computes its bytes, so that a plan can add them up before anything
is allocated.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import torch

from tilerank.kernels.kv_pages import PAGE_TOKENS, KVPages
from tilerank.kernels.latent_pages import LatentPages
from tilerank.kernels.state_slots import StateSlots
from tilerank.parallel.shard import HeadCut, Span

from ..protocol.errors import EngineError

Cache = KVPages | LatentPages | StateSlots
"""The cache of one layer."""


class Budget(Enum):
    """The unit by which the size of a cache grows."""

    TOKENS = "cached tokens"
    WINDOW_TOKENS = "cached tokens of layers with a window"
    SOURCE_TOKENS = "encoder tokens"
    STATES = "states"
    SHARED = "caches of other layers"


@dataclass(frozen=True)
class HeadPlace:
    """Where the heads that a rank caches are among the `total` heads of its layer; those that would follow are zero.

    first: the number of its first head. own: of the first one that no rank before it has as well.
    """

    first: int
    own: int
    total: int

    @staticmethod
    def of(cut: HeadCut, rank: int) -> "HeadPlace":
        first = cut.kv[rank].start
        own = max(first, cut.kv[rank - 1].stop) if rank else first
        return HeadPlace(first, own, cut.kv[-1].stop)

    @staticmethod
    def apart(span: Span, total: int) -> "HeadPlace":
        """Return the place of heads that no other rank has."""
        return HeadPlace(span.start, span.start, total)


@dataclass(frozen=True)
class PagedKV:
    """Keys and values of tokens, in pages of PAGE_TOKENS tokens.

    kv_heads: those of this rank. window: a token attends to so many tokens, itself included, and those before them need
    not be kept; 0 for a layer that attends to all. place: of the heads; None for all heads of the layer.
    """

    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    window: int = 0
    place: HeadPlace | None = None

    @property
    def budget(self) -> Budget:
        return Budget.WINDOW_TOKENS if self.window else Budget.TOKENS

    def nbytes(self, tokens: int) -> int:
        return num_pages(tokens) * KVPages.nbytes(1, self.kv_heads, self.head_dim, self.dtype)

    def allocate(self, tokens: int) -> KVPages:
        return KVPages.empty(num_pages(tokens), self.kv_heads, self.head_dim, self.dtype)


@dataclass(frozen=True)
class SharedKV:
    """The keys and values of an earlier layer, which the layer reads and does not write.

    layer: the number of that layer. kept: what it keeps.
    """

    layer: int
    kept: PagedKV
    budget: ClassVar = Budget.SHARED

    def nbytes(self, tokens: int) -> int:
        return 0


@dataclass(frozen=True)
class PagedLatent:
    """Multi-head latent attention (DeepSeek-V3): per token one latent vector and one rotated key for all heads."""

    latent_dim: int
    rope_dim: int
    dtype: torch.dtype
    budget: ClassVar = Budget.TOKENS

    def nbytes(self, tokens: int) -> int:
        return num_pages(tokens) * LatentPages.nbytes(1, self.latent_dim, self.rope_dim, self.dtype)

    def allocate(self, tokens: int) -> LatentPages:
        return LatentPages.empty(num_pages(tokens), self.latent_dim, self.rope_dim, self.dtype)


@dataclass(frozen=True)
class EncoderKV:
    """Keys and values of encodings, for cross-attention: written once a source (prompt.py), of any length. kv_heads,
    place: as in PagedKV."""

    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    place: HeadPlace | None = None
    budget: ClassVar = Budget.SOURCE_TOKENS

    def nbytes(self, tokens: int) -> int:
        """Return the bytes for `tokens` encoder tokens, of all requests together."""
        return num_pages(tokens) * KVPages.nbytes(1, self.kv_heads, self.head_dim, self.dtype)

    def allocate(self, tokens: int) -> KVPages:
        return KVPages.empty(num_pages(tokens), self.kv_heads, self.head_dim, self.dtype)


@dataclass(frozen=True)
class RecurrentState:
    """A gated delta net (Qwen3.5): per request the last inputs of the convolution and one fp32 matrix a value head.

    conv_channels, value_heads: those of this rank. drafts: Sharding.state_drafts; beside the states there is
    room for what they need to take in so many drafts. keys, values: the places of the key heads and of the value heads;
    None for all heads of the layer.
    """

    conv_channels: int
    conv_width: int
    value_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    drafts: int = 0
    keys: HeadPlace | None = None
    values: HeadPlace | None = None
    budget: ClassVar = Budget.STATES

    def nbytes(self, states: int) -> int:
        return StateSlots.nbytes(states, *self._shape, self.drafts)

    def allocate(self, states: int) -> StateSlots:
        return StateSlots.empty(states, *self._shape, self.drafts)

    @property
    def key_heads(self) -> int:
        """Those of this rank."""
        return (self.conv_channels - self.value_heads * self.value_dim) // (2 * self.key_dim)

    @property
    def step_bytes(self) -> int:
        """The bytes that a step reads, and writes, for each sequence."""
        return StateSlots.nbytes(1, *self._shape, drafts=0)

    @property
    def _shape(self) -> tuple[int, int, int, int, int, torch.dtype]:
        return self.conv_width, self.conv_channels, self.value_heads, self.key_dim, self.value_dim, self.dtype


EXPECTED_TOKENS = 32768
"""The most cached tokens that the cost of a cut assumes by default."""

CacheSpec = PagedKV | SharedKV | PagedLatent | EncoderKV | RecurrentState


def expected_tokens(context_length: int) -> int:
    """Return how many tokens a step is expected to read by default: one full context, at most EXPECTED_TOKENS."""
    return min(EXPECTED_TOKENS, context_length)


def read_specs(specs: Sequence[CacheSpec]) -> list[CacheSpec]:
    """Return what each layer reads: in place of a shared cache what its layer keeps."""
    return [spec.kept if isinstance(spec, SharedKV) else spec for spec in specs]


def bytes_per_token(specs: Sequence[CacheSpec]) -> int:
    """Return the bytes that one more token takes in all caches that grow with the tokens, which those of layers with a
    window do not."""
    return sum(spec.nbytes(PAGE_TOKENS) for spec in specs if spec.budget is Budget.TOKENS) // PAGE_TOKENS


def bytes_per_window_token(specs: Sequence[CacheSpec]) -> int:
    """Return the bytes of one token in all layers with a window."""
    return sum(spec.nbytes(PAGE_TOKENS) for spec in specs if spec.budget is Budget.WINDOW_TOKENS) // PAGE_TOKENS


def window_of(specs: Sequence[CacheSpec]) -> int:
    """Return the window of the layers that have one, 0 if none has. Raises EngineError for windows of several sizes."""
    windows = sorted({spec.window for spec in specs if isinstance(spec, PagedKV) and spec.window})
    if len(windows) > 1:
        raise EngineError(f"layers with windows: expected one size, found {', '.join(map(str, windows))} tokens")
    return windows[0] if windows else 0


def has_states(specs: Sequence[CacheSpec]) -> bool:
    """Return whether a layer keeps states of sequences. Every rank of a model returns the same."""
    return any(spec.budget is Budget.STATES for spec in specs)


def bytes_per_state(specs: Sequence[CacheSpec]) -> int:
    """Return the bytes of one slot for states in all layers."""
    return sum(spec.nbytes(1) for spec in specs if spec.budget is Budget.STATES)


def state_bytes_of_step(specs: Sequence[CacheSpec]) -> int:
    """Return the bytes of states that a step reads, and writes, for each sequence in all layers."""
    return sum(spec.step_bytes for spec in specs if isinstance(spec, RecurrentState))


def bytes_per_source_page(specs: Sequence[CacheSpec]) -> int:
    """Return the bytes of PAGE_TOKENS encoder tokens in all layers; 0 without layers of cross-attention."""
    return sum(spec.nbytes(PAGE_TOKENS) for spec in specs if spec.budget is Budget.SOURCE_TOKENS)


def has_sources(specs: Sequence[CacheSpec]) -> bool:
    """Return whether a layer attends to encodings. Every rank of a model returns the same."""
    return any(spec.budget is Budget.SOURCE_TOKENS for spec in specs)


def num_pages(tokens: int) -> int:
    """Return the number of pages that `tokens` tokens of one sequence take."""
    return -(-tokens // PAGE_TOKENS)


def allocate(
    specs: Sequence[CacheSpec], tokens: int, states: int = 0, source_tokens: int = 0, window_tokens: int = 0
) -> list[Cache]:
    """Allocate the caches of all layers: pages for `tokens` tokens, or for `window_tokens` in layers with a window,
    pages for `source_tokens` tokens of encodings, and `states` slots for states."""
    sizes = {
        Budget.TOKENS: tokens,
        Budget.WINDOW_TOKENS: window_tokens,
        Budget.STATES: states,
        Budget.SOURCE_TOKENS: source_tokens,
    }
    caches = list[Cache]()
    for spec in specs:
        caches.append(caches[spec.layer] if isinstance(spec, SharedKV) else spec.allocate(sizes[spec.budget]))
    return caches


def copy_states(caches: Sequence[Cache], copies: Sequence[tuple[int, int]]) -> None:
    """Copy the slots of all layers with states, (from, to) in this order."""
    for source, target in copies:
        for cache in caches:
            if isinstance(cache, StateSlots):
                cache.copy(source, target)
