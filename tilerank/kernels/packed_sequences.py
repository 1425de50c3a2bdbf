"""Attention within sequences that are packed into rows, such as the patches of each frame of a video."""

import torch
from torch import Tensor

from . import check
from .attention import attention, store_kv
from .errors import KernelError
from .kv_pages import PAGE_TOKENS, KVPages


def attention_varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    """Return bidirectional attention within each of several packed sequences, without a cache, for vision encoders.

    q: [t, hq, head_dim]; k, v: [t, hk, head_dim] in q's dtype (last dimension contiguous). hq is a multiple of hk, and
    query head h uses KV head h / (hq / hk). head_dim: a multiple of 8 up to 512.
    cu_seqlens: [s + 1] int32, ascending from 0 to t; sequence i is the rows cu_seqlens[i] to cu_seqlens[i + 1].
    Returns [t, hq, head_dim]. Keys and values are first packed into pages; accuracy and bits are those of `attention`.
    Raises KernelError for an argument of another shape or dtype.
    """
    check.tensor("attention_varlen", "q", q, (None, None, None), check.ACTIVATION_DTYPES)
    check.tensor("attention_varlen", "k", k, (q.shape[0], None, q.shape[2]), q.dtype)
    check.tensor("attention_varlen", "v", v, k.shape, q.dtype)
    tokens, kv_heads, d = k.shape
    check.tensor("attention_varlen", "cu_seqlens", cu_seqlens, (None,), torch.int32)
    if kv_heads == 0 or q.shape[1] % kv_heads:
        raise KernelError(f"attention_varlen: q: expected a multiple of {kv_heads} heads, found {q.shape[1]}")
    sequences = PackedSequences(cu_seqlens)
    if sequences.rows != tokens:
        raise KernelError(f"attention_varlen: cu_seqlens: expected values up to {tokens}, found {sequences.rows}")
    pages = sequences.pages(kv_heads, d, q.dtype)
    store_kv(k, v, pages, sequences.slots)
    group = q.shape[1] // kv_heads
    kv_map = torch.tensor([[head * group, group] for head in range(kv_heads)], dtype=torch.int32)
    return sequences.attend(q, 0, pages, kv_map, scale)


class PackedSequences:
    """Tables of packed sequences, for `attention_varlen` in parts: by layers that share the tables, a few rows at a
    time.

    cu_seqlens: as in `attention_varlen`. rows: of all sequences together. slots: [rows] int64, where `store_kv` writes
    the keys and values of each row into `pages`. The pages of a sequence are its own.
    """

    def __init__(self, cu_seqlens: Tensor) -> None:
        """Raises KernelError for values that do not ascend from 0."""
        check.tensor("attention_varlen", "cu_seqlens", cu_seqlens, (None,), torch.int32)
        edges = cu_seqlens.tolist()
        if edges != sorted(edges) or edges[:1] != [0]:
            raise KernelError(f"attention_varlen: cu_seqlens: expected ascending values from 0, found {edges}")
        self.rows: int = edges[-1]
        self._edges, self._lengths = cu_seqlens, cu_seqlens.diff()
        counts = -(-self._lengths // PAGE_TOKENS)
        ends = counts.cumsum(0, dtype=torch.int32)
        self._num_pages = max(int(counts.sum()), 1)
        most = int(counts.amax()) if len(counts) else 0
        self._tables = (ends - counts)[:, None] + torch.arange(most, dtype=torch.int32)
        first_slots = (ends - counts).long() * PAGE_TOKENS - cu_seqlens[:-1].long()
        self.slots = torch.arange(self.rows) + first_slots.repeat_interleave(self._lengths.long())

    def pages(self, kv_heads: int, head_dim: int, dtype: torch.dtype) -> KVPages:
        """Return uninitialised pages for the keys and values of all rows."""
        return KVPages.in_arena(self._num_pages, kv_heads, head_dim, dtype)

    def attend(self, q: Tensor, first: int, pages: KVPages, kv_map: Tensor, scale: float) -> Tensor:
        """Return the attention [n, hq, head_dim] of n rows, each to all rows of its sequence.

        q: [n, hq, head_dim], the queries of the rows from `first` on. pages: `store_kv` has written all rows to them.
        kv_map, scale, errors and bits: as in `attention`.
        """
        starts = self._edges.clamp(first, first + q.shape[0]) - first
        return attention(q, pages, self._tables, self._lengths, starts, kv_map, scale, causal=False)
