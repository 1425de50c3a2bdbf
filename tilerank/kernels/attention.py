"""Attention over a paged KV cache: writing tokens into its pages, attending over them."""

from __future__ import annotations

import torch
from torch import Tensor

from . import check, core
from .kv_pages import KVPages
from .reference import attention as reference

_STORE_KV = core.kernel("store_kv")
_ATTENTION = core.kernel("attention")


def store_kv(k: Tensor, v: Tensor, cache: KVPages, slots: Tensor) -> None:
    """Write the keys and values of t tokens into the cache.

    k: [t, kv_heads, head_dim], v: [t, kv_heads, value_dim], in the cache's dtype, strided, with a contiguous last
    dimension. Over an int8 cache they are float32 or bfloat16 and are quantised symmetrically, with one scale per token
    and head (max |x| / 127).
    slots: [t] int64, slot = page * PAGE_TOKENS + offset, no slot twice.
    Raises KernelError for an argument of another shape or dtype, or a slot outside the cache.
    """
    check.tensor("store_kv", "slots", slots, (None,), torch.int64)
    shape = (slots.shape[0], cache.kv_heads)
    check.tensor("store_kv", "k", k, (*shape, cache.head_dim), _activations(cache))
    check.tensor("store_kv", "v", v, (*shape, cache.value_dim), k.dtype)
    if core.isa() == "reference":
        reference.store_kv(k, v, cache, slots)
    else:
        core.launch(_STORE_KV, (k, v, cache.k, cache.v, slots, cache.scales))


def _activations(cache: KVPages) -> tuple[torch.dtype, ...]:
    """Return the dtypes of what is stored into the cache and multiplied with it."""
    return check.ACTIVATION_DTYPES if cache.dtype == torch.int8 else (cache.dtype,)


def attention(
    q: Tensor,
    cache: KVPages,
    page_tables: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    kv_map: Tensor,
    scale: float,
    *,
    causal: bool = True,
    lse: Tensor | None = None,
    kv_starts: Tensor | None = None,
) -> Tensor:
    """Return the attention of a variable-length batch: prefill, prefill after a cached prefix, and decode.

    q: [t, hq, head_dim] in the cache's dtype, or any activation dtype over int8 (last dimension contiguous). Sequence i
    has the rows query_starts[i] to query_starts[i + 1], which are the *last* of its seq_lens[i] tokens. `store_kv` has
    already written the keys and values of all of them.
    page_tables: [s, b] int32, the pages of each sequence in order; entries past ceil(seq_len / PAGE_TOKENS) are unused.
    seq_lens: [s] int32; query_starts: [s + 1] int32, from 0 to t.
    kv_map: [kv_heads, 2] int32, the first query head and the number of query heads of every KV head, in ascending
    order and without overlap. The output of a query head without a KV head is zero. scale: factor of the scores.
    causal=False: every row of sequence i attends to all seq_lens[i] tokens, and the number of rows is unrestricted.
    This serves bidirectional attention, and cross-attention over encoder tokens in pages of their own. The output over
    no tokens is zero.
    kv_starts: [s] int32, the token of page_tables[i] at which the seq_lens[i] tokens begin (default 0). The queries
    then attend to a range of the pages, such as an encoder's tokens or the text behind them.
    lse: [t, hq] float32, receives the log-sum-exp of every row's scaled scores (-inf for a row that attends to
    nothing). It allows merging results over parts of a sequence.
    Returns [t, hq, value_dim] with contiguous rows (`core.empty_rows`). Scores, softmax and sums are fp32; with
    bfloat16 the rungs avx512_bf16 and amx round the probabilities before the product with V, as transformers does.
    Slots past seq_lens[i] in the last page may hold anything. A row's bits depend only on its own query and its own
    sequence, for any chunking and any batch, if the values of the sequence are finite (0 * inf is NaN).
    Raises KernelError for an argument of another shape or dtype, or page tables and lengths that do not fit the cache.
    """
    check.tensor("attention", "q", q, (None, None, cache.head_dim), _activations(cache))
    check.tensor("attention", "seq_lens", seq_lens, (None,), torch.int32)
    check.tensor("attention", "page_tables", page_tables, (seq_lens.shape[0], None), torch.int32)
    check.tensor("attention", "query_starts", query_starts, (seq_lens.shape[0] + 1,), torch.int32)
    check.tensor("attention", "kv_map", kv_map, (cache.kv_heads, 2), torch.int32)
    if lse is not None:
        check.tensor("attention", "lse", lse, q.shape[:2], torch.float32)
    if kv_starts is not None:
        check.tensor("attention", "kv_starts", kv_starts, (seq_lens.shape[0],), torch.int32)
    if core.isa() == "reference":
        return reference.attention(
            q, cache, page_tables, seq_lens, query_starts, kv_map, scale, causal=causal, lse=lse, kv_starts=kv_starts
        )
    out = core.empty_rows((*q.shape[:2], cache.value_dim), q.dtype)
    tensors = (q, cache.k, cache.v, page_tables, seq_lens, query_starts, kv_map, out, lse, kv_starts, cache.scales)
    core.launch(_ATTENTION, tensors, (int(causal),), (scale,))
    return out
