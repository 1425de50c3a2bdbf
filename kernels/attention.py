"""Causal attention over a paged KV cache: the pages, writing into them, attending over them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import check, core, reference
from .errors import KernelError
from .reference import KV_BLOCK as KV_BLOCK

MAX_HEAD_DIM = 256

_STORE_KV = core.kernel("store_kv")
_ATTENTION = core.kernel("attention")


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
        k, v = (
            core.alloc(torch.Size(shape).numel() * dtype.itemsize).view(dtype).view(shape)
            for shape in (k_shape, v_shape)
        )
        return KVLayer(k, v, num_blocks, kv_heads, head_dim, dtype)


def _shapes(
    num_blocks: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if dtype not in check.ACTIVATIONS:
        raise KernelError(f"KVLayer: dtype: expected float32 or bfloat16, found {str(dtype).removeprefix('torch.')}")
    if head_dim % 8 or not 0 < head_dim <= MAX_HEAD_DIM:
        raise KernelError(f"KVLayer: head_dim: expected a multiple of 8 up to {MAX_HEAD_DIM}, found {head_dim}")
    if num_blocks < 1 or kv_heads < 1:
        raise KernelError(f"KVLayer: expected sizes >= 1, found num_blocks {num_blocks} and kv_heads {kv_heads}")
    k_shape = (num_blocks, kv_heads, KV_BLOCK // 16, head_dim * 16)
    v_shape = (num_blocks, kv_heads, -(-head_dim // 16), KV_BLOCK * 16)
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
    if core.isa() == "reference":
        reference.store_kv(k, v, cache, slots)
    else:
        core.launch(_STORE_KV, (k, v, cache.k, cache.v, slots))


def attention(
    q: Tensor,
    cache: KVLayer,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    kv_map: Tensor,
    scale: float,
    *,
    causal: bool = True,
    lse: Tensor | None = None,
) -> Tensor:
    """Attention of a variable-length batch: prefill, prefill with a cached prefix, and decode.

    q: [t, hq, head_dim] in the cache's dtype (last dim contiguous). Sequence i owns the rows query_starts[i] to
    query_starts[i + 1]; they are the *last* of its seq_lens[i] tokens, all of which are in the cache already: store_kv
    comes first.
    block_tables: [s, b] int32, its pages in order; entries past ceil(seq_len / KV_BLOCK) are not read.
    seq_lens: [s] int32; query_starts: [s + 1] int32, from 0 to t.
    kv_map: [kv_heads, 2] int32, the first query head and the number of query heads of every KV head; a query head that
    no KV head serves gives zeros. scale multiplies the scores.
    causal=False: every row of sequence i sees all of its seq_lens[i] tokens, and there may be any number of rows:
    bidirectional attention, or attention over an encoder part in pages of its own. Over no tokens the result is zero.
    lse: [t, hq] float32, receives log sum exp of every row's scaled scores (-inf where the row sees nothing), with
    which results over parts of a sequence can be merged.
    Returns [t, hq, head_dim], contiguous. Scores, softmax and sums are fp32; on bfloat16 the rungs avx512 and amx round
    the probabilities before the product with V, as transformers does.
    Memory past seq_lens[i] in the last page may hold anything. A row's bits depend on its own query and its own tokens
    only, whole or in chunks, alone or in a batch, provided that the sequence's values are finite: 0 * inf is NaN.
    """
    check.tensor("attention", "q", q, (None, None, cache.head_dim), cache.dtype)
    check.tensor("attention", "seq_lens", seq_lens, (None,), torch.int32)
    check.tensor("attention", "block_tables", block_tables, (seq_lens.shape[0], None), torch.int32)
    check.tensor("attention", "query_starts", query_starts, (seq_lens.shape[0] + 1,), torch.int32)
    check.tensor("attention", "kv_map", kv_map, (cache.kv_heads, 2), torch.int32)
    if lse is not None:
        check.tensor("attention", "lse", lse, q.shape[:2], torch.float32)
    if core.isa() == "reference":
        return reference.attention(
            q, cache, block_tables, seq_lens, query_starts, kv_map, scale, causal=causal, lse=lse
        )
    out = core.empty(q.shape, q.dtype)
    tensors = (q, cache.k, cache.v, block_tables, seq_lens, query_starts, kv_map, out, lse)
    core.launch(_ATTENTION, tensors, (int(causal),), (scale,))
    return out
