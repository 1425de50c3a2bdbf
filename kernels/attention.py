"""Causal attention over a paged KV cache: the pages, writing into them, attending over them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import check, reference
from .errors import KernelError
from .reference import KV_BLOCK as KV_BLOCK

MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class KVLayer:
    """The pages of one layer: `num_blocks` blocks of KV_BLOCK tokens for `kv_heads` heads of `head_dim` dims.

    `k` and `v` are opaque outside this room. Both are stored the way the tiles want their right-hand operand, 16 lanes
    of `x` values that are summed together (x = 2 for bfloat16, 1 for float32), the same on every rung:
    k[block, head, token / 16, dim / x, token % 16, dim % x] is the operand of Q K^T,
    v[block, head, dim / 16, token / x, dim % 16, token % x] the operand of P V (dims padded with zeros to 16).
    """

    k: Tensor
    v: Tensor
    num_blocks: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @staticmethod
    def nbytes(num_blocks: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes that `empty` with the same arguments takes."""
        k_shape, v_shape = _shapes(num_blocks, kv_heads, head_dim, dtype)
        return (torch.Size(k_shape).numel() + torch.Size(v_shape).numel()) * dtype.itemsize

    @staticmethod
    def empty(num_blocks: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> KVLayer:
        """A zeroed layer. head_dim: any multiple of 8 up to 256; dtype: bfloat16 or float32."""
        k_shape, v_shape = _shapes(num_blocks, kv_heads, head_dim, dtype)
        k, v = torch.zeros(k_shape, dtype=dtype), torch.zeros(v_shape, dtype=dtype)
        return KVLayer(k, v, num_blocks, kv_heads, head_dim, dtype)


def _shapes(
    num_blocks: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if dtype not in check.ACTIVATIONS:
        raise KernelError(f"KVLayer: dtype: expected float32 or bfloat16, found {str(dtype).removeprefix('torch.')}")
    if head_dim % 8 or not 0 < head_dim <= MAX_HEAD_DIM:
        raise KernelError(f"KVLayer: head_dim: expected a multiple of 8 up to {MAX_HEAD_DIM}, found {head_dim}")
    if num_blocks < 0 or kv_heads < 0:
        raise KernelError(f"KVLayer: expected sizes >= 0, found num_blocks {num_blocks} and kv_heads {kv_heads}")
    x = 4 // dtype.itemsize
    k_shape = (num_blocks, kv_heads, KV_BLOCK // 16, head_dim // x, 16, x)
    v_shape = (num_blocks, kv_heads, -(-head_dim // 16), KV_BLOCK // x, 16, x)
    return k_shape, v_shape


def store_kv(k: Tensor, v: Tensor, cache: KVLayer, slots: Tensor) -> None:
    """Writes the keys and values of t tokens into the cache.

    k, v: [t, kv_heads, head_dim] in the cache's dtype, strided as long as the last dim is contiguous.
    slots: [t] int64, slot = block * KV_BLOCK + offset, each at most once.
    """
    shape = (slots.shape[0], cache.kv_heads, cache.head_dim)
    check.tensor("store_kv", "slots", slots, (None,), torch.int64)
    check.tensor("store_kv", "k", k, shape, cache.dtype)
    check.tensor("store_kv", "v", v, shape, cache.dtype)
    reference.store_kv(k, v, cache, slots)


def attention(
    q: Tensor,
    cache: KVLayer,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    kv_map: Tensor,
    scale: float,
) -> Tensor:
    """Causal attention of a variable-length batch: prefill, prefill with a cached prefix, and decode.

    q: [t, hq, head_dim] in the cache's dtype (last dim contiguous). Sequence i owns the rows query_starts[i] to
    query_starts[i + 1]; they are the *last* of its seq_lens[i] tokens, all of which are in the cache already (store_kv
    first). block_tables: [s, b] int32, the pages of every sequence in order; entries past ceil(seq_len / KV_BLOCK) are
    not read. seq_lens: [s] int32; query_starts: [s + 1] int32, from 0 to t.
    kv_map: [kv_heads, 2] int32: first query head and number of query heads of every KV head; a query head that no KV
    head serves gives zeros. scale multiplies the scores.
    Returns [t, hq, head_dim], contiguous. Scores, softmax and sums are fp32; bfloat16 rungs round the probabilities
    before the product with V, as transformers does. Memory past seq_lens[i] in the last page may hold anything.
    A row's bits depend on its own query and keys only: the same whole or in chunks, alone or in a batch.
    """
    check.tensor("attention", "q", q, (None, None, cache.head_dim), cache.dtype)
    check.tensor("attention", "seq_lens", seq_lens, (None,), torch.int32)
    check.tensor("attention", "block_tables", block_tables, (seq_lens.shape[0], None), torch.int32)
    check.tensor("attention", "query_starts", query_starts, (seq_lens.shape[0] + 1,), torch.int32)
    check.tensor("attention", "kv_map", kv_map, (cache.kv_heads, 2), torch.int32)
    _check_batch(q, cache, block_tables, seq_lens, query_starts, kv_map)
    return reference.attention(q, cache, block_tables, seq_lens, query_starts, kv_map, scale)


def _check_batch(
    q: Tensor, cache: KVLayer, block_tables: Tensor, seq_lens: Tensor, query_starts: Tensor, kv_map: Tensor
) -> None:
    """The values behind the shapes: everything that would make a kernel read or write out of bounds."""
    starts, lengths = query_starts.tolist(), seq_lens.tolist()
    if starts[0] != 0 or starts[-1] != q.shape[0]:
        raise KernelError(f"attention: query_starts: expected 0 to {q.shape[0]}, found {starts[0]} to {starts[-1]}")
    for i, length in enumerate(lengths):
        queries = starts[i + 1] - starts[i]
        if not 0 <= queries <= length:
            raise KernelError(
                f"attention: query_starts: expected 0 to {length} queries of sequence {i}, found {queries}"
            )
        pages = -(-length // KV_BLOCK)
        if pages > block_tables.shape[1]:
            raise KernelError(
                f"attention: block_tables: expected {pages} pages for sequence {i} of {length} tokens, "
                f"found {block_tables.shape[1]}"
            )
        for page in block_tables[i, :pages].tolist():
            if not 0 <= page < cache.num_blocks:
                raise KernelError(
                    f"attention: block_tables: expected pages in [0, {cache.num_blocks}) for sequence {i}, found {page}"
                )
    for head, (first, count) in enumerate(kv_map.tolist()):
        if first < 0 or count < 0 or first + count > q.shape[1]:
            raise KernelError(
                f"attention: kv_map: expected query heads within [0, {q.shape[1]}) for KV head {head}, "
                f"found {count} from {first}"
            )
