"""What layers keep between steps: four kinds of cache as declarations, and the allocation of paged KV.

Each kind computes its bytes, so that a plan can add them up before anything is allocated.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tilerank.kernels.kv_pages import PAGE_TOKENS, KVPages

from .errors import EngineError


@dataclass(frozen=True)
class PagedKV:
    """Keys and values of every token, in pages of PAGE_TOKENS tokens. kv_heads: those of this rank."""

    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def nbytes(self, tokens: int) -> int:
        return num_pages(tokens) * KVPages.nbytes(1, self.kv_heads, self.head_dim, self.dtype)


@dataclass(frozen=True)
class PagedLatent:
    """Multi-head latent attention (DeepSeek-V3): per token one latent vector and one rotated key for all heads."""

    latent_dim: int
    rope_dim: int
    dtype: torch.dtype

    def nbytes(self, tokens: int) -> int:
        return num_pages(tokens) * PAGE_TOKENS * (self.latent_dim + self.rope_dim) * self.dtype.itemsize


@dataclass(frozen=True)
class EncoderKV:
    """Keys and values of an encoder's output, for cross-attention: written once per request, of any length."""

    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def nbytes(self, tokens: int) -> int:
        """Return the bytes for `tokens` encoder tokens, of all requests together."""
        return num_pages(tokens) * KVPages.nbytes(1, self.kv_heads, self.head_dim, self.dtype)


@dataclass(frozen=True)
class RecurrentState:
    """A gated delta net (Qwen3.5): per request the last inputs of the convolution and one fp32 matrix a value head."""

    conv_channels: int
    conv_width: int
    value_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    def nbytes(self, requests: int) -> int:
        conv = (self.conv_width - 1) * self.conv_channels * self.dtype.itemsize
        state = self.value_heads * self.key_dim * self.value_dim * torch.float32.itemsize
        return requests * (conv + state)


EXPECTED_TOKENS = 32768
"""The most cached tokens that the cost of a cut assumes by default."""

CacheSpec = PagedKV | PagedLatent | EncoderKV | RecurrentState


def expected_tokens(context_length: int) -> int:
    """Return how many tokens a step is expected to read by default: one full context, at most EXPECTED_TOKENS."""
    return min(EXPECTED_TOKENS, context_length)


def bytes_per_token(specs: Sequence[CacheSpec]) -> int:
    """Return the bytes that one more token takes in all caches that grow with the tokens."""
    return sum(spec.nbytes(PAGE_TOKENS) for spec in specs if isinstance(spec, PagedKV | PagedLatent)) // PAGE_TOKENS


def num_pages(tokens: int) -> int:
    """Return the number of pages that `tokens` tokens of one sequence take."""
    return -(-tokens // PAGE_TOKENS)


def allocate(specs: Sequence[CacheSpec], tokens: int) -> list[KVPages]:
    """Allocate the caches of all layers, with pages for `tokens` tokens. EngineError for a kind that has none."""
    for layer, spec in enumerate(specs):
        if not isinstance(spec, PagedKV):
            raise EngineError(f"layer {layer} declares a {type(spec).__name__} cache, which cannot be allocated yet")
    blocks = num_pages(tokens)
    return [
        KVPages.empty(blocks, spec.kv_heads, spec.head_dim, spec.dtype) for spec in specs if isinstance(spec, PagedKV)
    ]
