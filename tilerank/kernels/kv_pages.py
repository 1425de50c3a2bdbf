"""The pages of the KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import check, core
from .errors import KernelError

PAGE_TOKENS = 32
"""Tokens in a page (csrc/attention/attention_batch.h)."""

MAX_HEAD_DIM = 512

DTYPES = (*check.ACTIVATION_DTYPES, torch.int8)
"""Dtypes of stored keys and values."""


@dataclass(frozen=True)
class KVPages:
    """The pages of one layer's KV cache: `num_pages` pages of PAGE_TOKENS tokens, each with `kv_heads` heads.

    The layout of `k` and `v` is private to the kernels. Both are stored as AMX reads a right-hand operand, 16 columns
    of `x` values that are summed together (x = 2 for bfloat16 and int8, 1 for float32), the same on every rung:
    k[page, head, token / 16, dim / x, token % 16, dim % x] is the operand of Q K^T,
    v[page, head, dim / 16, token / x, dim % 16, token % x] is the operand of P V; its dims are padded with zeros to 16.
    Keys have `head_dim` dims, values have `value_dim`, which differs from it only in `in_arena`.

    With dtype int8 the cache holds codes, value = code * scale. Every token and head has one scale for its key and one
    for its value: scales[page, head, 0 for keys or 1 for values, token]. Activations are of either dtype.
    """

    k: Tensor
    v: Tensor
    num_pages: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    scales: Tensor | None = None

    @property
    def activations(self) -> tuple[torch.dtype, ...]:
        """The dtypes of what is stored into the cache and multiplied with it."""
        return check.ACTIVATION_DTYPES if self.dtype == torch.int8 else (self.dtype,)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors whose rows are the pages, and together hold all that is stored."""
        return [self.k, self.v] if self.scales is None else [self.k, self.v, self.scales]

    @staticmethod
    def nbytes(num_pages: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Return the bytes that `empty` allocates for the same arguments."""
        k_shape, v_shape = _shapes(num_pages, kv_heads, head_dim, head_dim, dtype)
        values = (torch.Size(k_shape).numel() + torch.Size(v_shape).numel()) * dtype.itemsize
        return values + (num_pages * kv_heads * 2 * PAGE_TOKENS * 4 if dtype == torch.int8 else 0)

    @staticmethod
    def empty(num_pages: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> KVPages:
        """Return zeroed pages in memory of their own (`core.alloc`).

        head_dim: a multiple of 8 up to 512; dtype: bfloat16, float32 or int8. Raises KernelError for other values.
        """
        k_shape, v_shape = _shapes(num_pages, kv_heads, head_dim, head_dim, dtype)
        # The values of a page follow its keys in memory, so that a sequence is read in few long runs.
        k_size, v_size = (torch.Size(shape[1:]).numel() for shape in (k_shape, v_shape))
        size = k_size + v_size
        pages = core.alloc(num_pages * size * dtype.itemsize).view(dtype).view(num_pages, size)
        k, v = pages[:, :k_size].view(k_shape), pages[:, k_size:].view(v_shape)
        scales = None
        if dtype == torch.int8:
            scales = core.alloc(num_pages * kv_heads * 2 * PAGE_TOKENS * 4).view(torch.float32)
            scales = scales.view(num_pages, kv_heads, 2, PAGE_TOKENS)
        return KVPages(k, v, num_pages, kv_heads, head_dim, head_dim, dtype, scales)

    @staticmethod
    def in_arena(
        num_pages: int, kv_heads: int, head_dim: int, dtype: torch.dtype, *, value_dim: int | None = None
    ) -> KVPages:
        """Return uninitialised pages of bfloat16 or float32 in the activation arena (`core.empty`).

        value_dim: as `head_dim`, which is the default.
        """
        value_dim = value_dim or head_dim
        k_shape, v_shape = _shapes(num_pages, kv_heads, head_dim, value_dim, dtype)
        k, v = core.empty(k_shape, dtype), core.empty(v_shape, dtype)
        return KVPages(k, v, num_pages, kv_heads, head_dim, value_dim, dtype)


def _shapes(
    num_pages: int, kv_heads: int, head_dim: int, value_dim: int, dtype: torch.dtype
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of k and v. Raises KernelError for sizes or a dtype that the kernels do not support."""
    check.dtype("KVPages", "dtype", dtype, DTYPES)
    for name, dim in (("head_dim", head_dim), ("value_dim", value_dim)):
        if dim % 8 or not 0 < dim <= MAX_HEAD_DIM:
            raise KernelError(f"KVPages: {name}: expected a multiple of 8 up to {MAX_HEAD_DIM}, found {dim}")
    if num_pages < 1 or kv_heads < 1:
        raise KernelError(f"KVPages: expected sizes >= 1, found num_pages {num_pages} and kv_heads {kv_heads}")
    k_shape = (num_pages, kv_heads, PAGE_TOKENS // 16, head_dim * 16)
    v_shape = (num_pages, kv_heads, -(-value_dim // 16), PAGE_TOKENS * 16)
    return k_shape, v_shape
