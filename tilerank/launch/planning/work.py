"""The least that a model reads and computes for some tokens: the numerators of every share of a peak."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tilerank.loader.quantization_config import DEFAULT_ACTIVATION_BITS
from tilerank.parallel.cost import Cost, Work

from ..goodput.simulation import StepLoad

if TYPE_CHECKING:
    import torch

    from tilerank.loader.card import ModelCard
    from tilerank.loader.quantization_config import ActivationBits, Quantization
    from tilerank.runtime.step.cache import CacheSpec
    from tilerank.runtime.step.model import Model


@dataclass(frozen=True)
class ModelWork:
    """The cost of a whole model, without padding for ranks.

    body: of every token, up to its keys and values of the last layer. end: the rest of the last layer and the head,
    for tokens whose logits are used: the last one of a prompt and every one after it. cached: bytes of the keys and
    values of one token in all layers. state: bytes of the states of one sequence in all layers, which a step reads and
    writes. picture: encoding the picture of a prompt, if prompts have one. source: bytes of the keys and values of a
    token of an encoding in all layers of cross-attention. source_tokens: those that a sequence sees. windowed: bytes of
    the keys and values of one token in layers with a window of `window` tokens, which `cached` does not contain.
    """

    body: Cost
    end: Cost
    cached: int
    state: int = 0
    picture: Work = field(default_factory=Work)
    source: int = 0
    source_tokens: int = 0
    windowed: int = 0
    window: int = 0

    @property
    def weights(self) -> int:
        """Bytes that every step reads: all weights except experts and the embedding table, which is looked up."""
        return self.body.read + self.end.read

    def prefill(self, batch: int, tokens: int) -> Work:
        """`batch` prompts of `tokens` tokens each, up to the logits of their last tokens.

        Weights are read once, those of the encoder once for each picture.
        """
        pairs = tokens * (tokens + 1) // 2
        body = self.body.work(batch * tokens, batch * pairs)
        cached = (self.cached + self.windowed) * tokens + 2 * self.state + self.source * self.source_tokens
        moving = Work(self.weights + cached * batch)
        return moving + body + self.end.work(batch, batch * tokens) + self.picture * batch

    def decode(self, batch: int, context: float) -> Work:
        """One step of `batch` sequences that hold `context` tokens each, the new one included."""
        return self.step(StepLoad.decode(batch, context))

    def step(self, load: StepLoad) -> Work:
        """A step that computes `load`. In layers with a window, a sequence reads a window at most."""
        in_window = min(load.contexts, self.window * load.sequences)
        cached = self.cached * load.contexts + self.windowed * in_window
        of_sequence = 2 * self.state + self.source * self.source_tokens
        moving = Work(self.weights + cached + of_sequence * load.sequences)
        return moving + self.body.work(load.rows, load.pairs) + self.end.work(load.logits, load.logit_pairs)


def model_work(
    card: ModelCard,
    dtype: torch.dtype,
    quantization: Quantization | None = None,
    kv_dtype: torch.dtype | None = None,
    activation_bits: ActivationBits = DEFAULT_ACTIVATION_BITS,
) -> ModelWork:
    """Return the cost of our own model on one rank; nothing is allocated."""
    from tilerank.loader.weight_formats import weight_formats
    from tilerank.parallel.sharding import Sharding
    from tilerank.runtime.rank.registry import build_model

    formats = weight_formats(card.quantization, dtype, quantization, activation_bits)
    return work_of(build_model(card, Sharding(0, 1, dtype, None, formats=formats, kv_dtype=kv_dtype)))


def work_of(model: Model) -> ModelWork:
    """Return the cost of a rank's part of a model, which need not be allocated."""
    from tilerank.kernels.kv_pages import PAGE_TOKENS
    from tilerank.runtime.step.cache import (
        bytes_per_source_page,
        bytes_per_state,
        bytes_per_token,
        bytes_per_window_token,
        read_specs,
        window_of,
    )

    specs = read_specs(model.cache_specs())
    body = model.cost_without_logits()
    readers = model.context_part.ranks if model.context_part else 1
    return ModelWork(
        body,
        model.cost() - body,
        bytes_per_token(specs) // readers,
        bytes_per_state(specs),
        source=bytes_per_source_page(specs) // PAGE_TOKENS,
        windowed=bytes_per_window_token(specs),
        window=window_of(specs),
    )


def cached_bytes(specs: Sequence[CacheSpec]) -> Callable[[int], int]:
    """Return a function from the tokens of a sequence to the bytes that the caches of a rank have of them, without
    sources."""
    from tilerank.runtime.step.cache import bytes_per_state, bytes_per_token, bytes_per_window_token, window_of

    of_token, windowed, state = bytes_per_token(specs), bytes_per_window_token(specs), bytes_per_state(specs)
    window = window_of(specs)
    return lambda tokens: of_token * tokens + windowed * min(tokens, window) + state


def predictor_cost(
    card: ModelCard,
    dtype: torch.dtype,
    quantization: Quantization | None,
    activation_bits: ActivationBits = DEFAULT_ACTIVATION_BITS,
) -> Cost:
    """Return the cost of the code predictor of a model that speaks, without padding for ranks; frames are tokens."""
    from tilerank.loader.weight_formats import weight_formats
    from tilerank.parallel.sharding import Sharding
    from tilerank.runtime.rank.registry import build_model

    formats = weight_formats(card.quantization, dtype, quantization, activation_bits)
    speaker = build_model(card, Sharding(0, 1, dtype, None, formats=formats)).speaker
    assert speaker is not None
    return speaker.predictor.cost()


def encoder_work(card: ModelCard, dtype: torch.dtype, grid: tuple[int, int, int]) -> dict[str, Work]:
    """Return the work of the vision tower for one medium, without padding for ranks, by parts: "linear layers", with
    norms, and "attention".

    grid: as in prompt.py: Medium. Linear layers read their weights once; attention reads and writes its operands.
    """
    from tilerank.parallel.sharding import Sharding
    from tilerank.runtime.rank.registry import build_model

    encoder = build_model(card, Sharding(0, 1, dtype, None)).encoder
    assert encoder is not None
    products = attention = Work()
    for layer, rows, pairs in encoder.parts(grid):
        cost = layer.cost()
        products += Work(cost.read) + cost.token * rows
        # Four operations a pair for each column of the queries; queries, keys, values and outputs have as many.
        attention += Work(cost.pair.flops * rows * dtype.itemsize) + cost.pair * pairs
    return {"linear layers": products, "attention": attention}
