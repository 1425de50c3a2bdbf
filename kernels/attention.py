"""Causal attention over a paged KV cache: the pages, writing into them, attending over them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import check, core, reference_attention
from .errors import KernelError
from .reference_attention import KV_BLOCK as KV_BLOCK

MAX_HEAD_DIM = 256
DTYPES = (*check.ACTIVATIONS, torch.int8)
"""What a cache may hold."""

_STORE_KV = core.kernel("store_kv")
_ATTENTION = core.kernel("attention")


@dataclass(frozen=True)
class KVLayer:
    """The pages of one layer: `num_blocks` blocks of KV_BLOCK tokens for `kv_heads` heads of `head_dim` dims.

    `k` and `v` are opaque outside this room. Both are stored the way the tiles want their right-hand operand, 16 lanes
    of `x` values that are summed together (x = 2 for bfloat16, 1 for float32), the same on every rung:
    k[block, head, token / 16, dim / x, token % 16, dim % x] is the operand of Q K^T,
    v[block, head, dim / 16, token / x, dim % 16, token % x] the operand of P V (dims padded with zeros to 16).

    dtype int8 holds codes in the order of bfloat16: value = code * scale, one scale per token and head for keys and one
    for values, scales[block, head, 0 for k or 1 for v, token]. It serves activations of either dtype.
    """

    k: Tensor
    v: Tensor
    num_blocks: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    scales: Tensor | None = None

    @staticmethod
    def nbytes(num_blocks: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes that `empty` with the same arguments takes."""
        k_shape, v_shape = _shapes(num_blocks, kv_heads, head_dim, dtype)
        values = (torch.Size(k_shape).numel() + torch.Size(v_shape).numel()) * dtype.itemsize
        return values + (num_blocks * kv_heads * 2 * KV_BLOCK * 4 if dtype == torch.int8 else 0)

    @staticmethod
    def empty(num_blocks: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> KVLayer:
        """A zeroed layer. head_dim: any multiple of 8 up to 256; dtype: bfloat16, float32 or int8."""
        k_shape, v_shape = _shapes(num_blocks, kv_heads, head_dim, dtype)
        # The values of a block follow its keys: what a sequence reads is in few long runs.
        k_size, v_size = (torch.Size(shape[1:]).numel() for shape in (k_shape, v_shape))
        size = k_size + v_size
        blocks = core.alloc(num_blocks * size * dtype.itemsize).view(dtype).view(num_blocks, size)
        k, v = blocks[:, :k_size].view(k_shape), blocks[:, k_size:].view(v_shape)
        scales = None
        if dtype == torch.int8:
            scales = core.alloc(num_blocks * kv_heads * 2 * KV_BLOCK * 4).view(torch.float32)
            scales = scales.view(num_blocks, kv_heads, 2, KV_BLOCK)
        return KVLayer(k, v, num_blocks, kv_heads, head_dim, dtype, scales)


def _shapes(
    num_blocks: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if dtype not in DTYPES:
        found = str(dtype).removeprefix("torch.")
        raise KernelError(f"KVLayer: dtype: expected float32, bfloat16 or int8, found {found}")
    if head_dim % 8 or not 0 < head_dim <= MAX_HEAD_DIM:
        raise KernelError(f"KVLayer: head_dim: expected a multiple of 8 up to {MAX_HEAD_DIM}, found {head_dim}")
    if num_blocks < 1 or kv_heads < 1:
        raise KernelError(f"KVLayer: expected sizes >= 1, found num_blocks {num_blocks} and kv_heads {kv_heads}")
    k_shape = (num_blocks, kv_heads, KV_BLOCK // 16, head_dim * 16)
    v_shape = (num_blocks, kv_heads, -(-head_dim // 16), KV_BLOCK * 16)
    return k_shape, v_shape


def store_kv(k: Tensor, v: Tensor, cache: KVLayer, slots: Tensor) -> None:
    """Writes the keys and values of t tokens into the cache.

    k, v: [t, kv_heads, head_dim] in the cache's dtype (int8: of float32 or bfloat16, symmetric by the largest of every
    token and head), strided as long as the last dim is contiguous.
    slots: [t] int64, slot = block * KV_BLOCK + offset, each at most once.
    """
    check.tensor("store_kv", "slots", slots, (None,), torch.int64)
    shape = (slots.shape[0], cache.kv_heads, cache.head_dim)
    check.tensor("store_kv", "k", k, shape, _activations(cache))
    check.tensor("store_kv", "v", v, shape, k.dtype)
    if core.isa() == "reference":
        reference_attention.store_kv(k, v, cache, slots)
    else:
        core.launch(_STORE_KV, (k, v, cache.k, cache.v, slots, cache.scales))


def _activations(cache: KVLayer) -> torch.dtype | tuple[torch.dtype, ...]:
    return check.ACTIVATIONS if cache.dtype == torch.int8 else cache.dtype


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
    kv_starts: Tensor | None = None,
) -> Tensor:
    """Attention of a variable-length batch: prefill, prefill with a cached prefix, and decode.

    q: [t, hq, head_dim] in the cache's dtype, or of any activation over int8 (last dim contiguous). Sequence i owns the
    rows query_starts[i] to query_starts[i + 1]; they are the *last* of its seq_lens[i] tokens, all of which are in the
    cache already: store_kv comes first.
    block_tables: [s, b] int32, its pages in order; entries past ceil(seq_len / KV_BLOCK) are not read.
    seq_lens: [s] int32; query_starts: [s + 1] int32, from 0 to t.
    kv_map: [kv_heads, 2] int32, the first query head and the number of query heads of every KV head; a query head that
    no KV head serves gives zeros. scale multiplies the scores.
    causal=False: every row of sequence i sees all of its seq_lens[i] tokens, and there may be any number of rows:
    bidirectional attention, or attention over an encoder part in pages of its own. Over no tokens the result is zero.
    kv_starts: [s] int32, the token of block_tables[i] that is the first of the seq_lens[i] tokens (default 0): what the
    queries see is a source of its own start and length, such as the text after an encoder's part, or that part.
    lse: [t, hq] float32, receives log sum exp of every row's scaled scores (-inf where the row sees nothing), with
    which results over parts of a sequence can be merged.
    Returns [t, hq, head_dim], each row contiguous (`core.empty_rows`). Scores, softmax and sums are fp32; on bfloat16
    the rungs avx512_bf16 and amx round the probabilities before the product with V, as transformers does.
    Memory past seq_lens[i] in the last page may hold anything. A row's bits depend on its own query and its own tokens
    only, whole or in chunks, alone or in a batch, provided that the sequence's values are finite: 0 * inf is NaN.
    """
    check.tensor("attention", "q", q, (None, None, cache.head_dim), _activations(cache))
    check.tensor("attention", "seq_lens", seq_lens, (None,), torch.int32)
    check.tensor("attention", "block_tables", block_tables, (seq_lens.shape[0], None), torch.int32)
    check.tensor("attention", "query_starts", query_starts, (seq_lens.shape[0] + 1,), torch.int32)
    check.tensor("attention", "kv_map", kv_map, (cache.kv_heads, 2), torch.int32)
    if lse is not None:
        check.tensor("attention", "lse", lse, q.shape[:2], torch.float32)
    if kv_starts is not None:
        check.tensor("attention", "kv_starts", kv_starts, (seq_lens.shape[0],), torch.int32)
    if core.isa() == "reference":
        return reference_attention.attention(
            q, cache, block_tables, seq_lens, query_starts, kv_map, scale, causal=causal, lse=lse, kv_starts=kv_starts
        )
    out = core.empty_rows(q.shape, q.dtype)
    tensors = (q, cache.k, cache.v, block_tables, seq_lens, query_starts, kv_map, out, lse, kv_starts, cache.scales)
    core.launch(_ATTENTION, tensors, (int(causal),), (scale,))
    return out


def attention_varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    """Bidirectional attention inside each of several packed sequences, without a cache: vision encoders.

    q: [t, hq, head_dim]; k, v: [t, hk, head_dim], hq a multiple of hk, in q's dtype (last dim contiguous); query head h
    sees KV head h / (hq / hk). cu_seqlens: [s + 1] int32, rising from 0 to t: sequence i has the rows cu_seqlens[i] to
    cu_seqlens[i + 1], all of which see each other. head_dim: any multiple of 8 up to 256.
    Returns [t, hq, head_dim]. Keys and values are packed into pages first; accuracy and bits are those of `attention`.
    """
    check.tensor("attention_varlen", "q", q, (None, None, None), check.ACTIVATIONS)
    check.tensor("attention_varlen", "k", k, (q.shape[0], None, q.shape[2]), q.dtype)
    check.tensor("attention_varlen", "v", v, k.shape, q.dtype)
    tokens, kv_heads, d = k.shape
    check.tensor("attention_varlen", "cu_seqlens", cu_seqlens, (None,), torch.int32)
    if kv_heads == 0 or q.shape[1] % kv_heads:
        raise KernelError(f"attention_varlen: q: expected a multiple of {kv_heads} heads, found {q.shape[1]}")
    edges = cu_seqlens.tolist()
    if edges != sorted(edges) or edges[:1] != [0] or edges[-1] != tokens:
        raise KernelError(f"attention_varlen: cu_seqlens: expected rising edges from 0 to {tokens}, found {edges}")
    if core.isa() == "reference":
        return reference_attention.attention_varlen(q, k, v, edges, scale)
    lengths = cu_seqlens.diff()
    pages = -(-lengths // KV_BLOCK)
    ends = pages.cumsum(0, dtype=torch.int32)
    cache = _pages_in_arena(max(int(pages.sum()), 1), kv_heads, d, q.dtype)
    first_slots = (ends - pages).long() * KV_BLOCK - cu_seqlens[:-1].long()
    store_kv(k, v, cache, torch.arange(tokens) + first_slots.repeat_interleave(lengths.long()))
    tables = (ends - pages)[:, None] + torch.arange(int(pages.amax()) if len(pages) else 0, dtype=torch.int32)
    group = q.shape[1] // kv_heads
    first_heads = torch.arange(kv_heads, dtype=torch.int32) * group
    kv_map = torch.stack([first_heads, torch.full_like(first_heads, group)], dim=1)
    return attention(q, cache, tables, lengths, cu_seqlens, kv_map, scale, causal=False)


def _pages_in_arena(num_blocks: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> KVLayer:
    k_shape, v_shape = _shapes(num_blocks, kv_heads, head_dim, dtype)
    k, v = core.empty(k_shape, dtype), core.empty(v_shape, dtype)
    return KVLayer(k, v, num_blocks, kv_heads, head_dim, dtype)
