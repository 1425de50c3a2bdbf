"""What layers keep between steps: four kinds of cache as declarations, and the allocation of paged KV.

A kind says how many bytes it takes, so that a plan can count them before anything is allocated.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tilerank.kernels.attention import KV_BLOCK, KVLayer
from tilerank.loader.config import ModelConfig

from .errors import EngineError


@dataclass(frozen=True)
class PagedKV:
    """Keys and values of every token, in pages of KV_BLOCK tokens. Counts are this rank's."""

    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def nbytes(self, tokens: int) -> int:
        return num_blocks(tokens) * KVLayer.nbytes(1, self.kv_heads, self.head_dim, self.dtype)


@dataclass(frozen=True)
class PagedLatent:
    """Multi-head latent attention (DeepSeek-V3): one compressed vector a token and its rotated part, for all heads."""

    latent_dim: int
    rope_dim: int
    dtype: torch.dtype

    def nbytes(self, tokens: int) -> int:
        return num_blocks(tokens) * KV_BLOCK * (self.latent_dim + self.rope_dim) * self.dtype.itemsize


@dataclass(frozen=True)
class EncoderKV:
    """Keys and values of what an encoder saw, for cross-attention: written once a request, of any length, also none."""

    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def nbytes(self, tokens: int) -> int:
        """For `tokens` encoder tokens of all requests."""
        return num_blocks(tokens) * KVLayer.nbytes(1, self.kv_heads, self.head_dim, self.dtype)


@dataclass(frozen=True)
class RecurrentState:
    """A gated delta net (Qwen3.5): the last inputs of the convolution and one fp32 matrix a value head, per request."""

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

CacheSpec = PagedKV | PagedLatent | EncoderKV | RecurrentState


def expected_tokens(config: ModelConfig) -> int:
    """Tokens that a step is expected to read unless told otherwise: one full context, within reason."""
    return min(EXPECTED_TOKENS, config.max_position_embeddings)


def bytes_per_token(specs: Sequence[CacheSpec]) -> int:
    """Of the caches that grow with every token."""
    return sum(spec.nbytes(KV_BLOCK) for spec in specs if isinstance(spec, PagedKV | PagedLatent)) // KV_BLOCK


def num_blocks(tokens: int) -> int:
    """Pages that `tokens` tokens of one sequence take."""
    return -(-tokens // KV_BLOCK)


def allocate(specs: Sequence[CacheSpec], tokens: int) -> list[KVLayer]:
    """The caches of all layers, with pages for `tokens` tokens. EngineError for a kind that has no allocator."""
    for layer, spec in enumerate(specs):
        if not isinstance(spec, PagedKV):
            raise EngineError(f"layer {layer} declares a {type(spec).__name__} cache, which cannot be allocated yet")
    blocks = num_blocks(tokens)
    return [
        KVLayer.empty(blocks, spec.kv_heads, spec.head_dim, spec.dtype) for spec in specs if isinstance(spec, PagedKV)
    ]
