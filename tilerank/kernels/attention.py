"""Attention over a paged KV cache: writing tokens into its pages, attending over them."""

from __future__ import annotations

from torch import Tensor

from .contract import Contract
from .errors import KernelError
from .kv_pages import KVPages
from .reference import attention as reference

_STORE_KV = Contract(
    "store_kv: k[t, cache.kv_heads, cache.head_dim]:cache.activations v[t, cache.kv_heads, cache.value_dim]:k cache.k "
    "cache.v cache.scales? slots[t]:i64",
    reference.store_kv,
)


def store_kv(k: Tensor, v: Tensor, cache: KVPages, slots: Tensor) -> None:
    """Write the keys and values of t tokens into the cache.

    k: [t, kv_heads, head_dim], v: [t, kv_heads, value_dim], in the cache's dtype, strided, with a contiguous last
    dimension. Over an int8 cache they are float32 or bfloat16 and are quantised symmetrically, with one scale per token
    and head (max |x| / 127).
    slots: [t] int64, slot = page * PAGE_TOKENS + offset, no slot twice.
    Raises KernelError for an argument of another shape or dtype, or a slot outside the cache.
    """
    _STORE_KV.run(k, v, cache, slots)


_ATTENTION = Contract(
    "attention: q[t, hq, cache.head_dim]:cache.activations cache.k cache.v cache.scales? page_tables[s, _]:i32 "
    "seq_lens[s]:i32 query_starts[s + 1]:i32 kv_map[cache.kv_heads, 2]:i32 scale:float causal:bool lse[t, hq]?:f32 "
    "kv_starts[s]?:i32 window:int sinks[hq]?:f32 softcap:float visible[t]?:i32 -> apart out[t, hq, cache.value_dim]:q",
    reference.attention,
)


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
    window: int = 0,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    visible: Tensor | None = None,
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
    lse: [t, hq] float32, receives the log-sum-exp of every row's scaled scores and its sink (-inf for a row that
    attends to nothing). It allows merging results over parts of a sequence.
    window: W > 0: the row at position p attends to the positions p - W + 1 to p. Pages before the window of the
    sequence's first row are not read, and their numbers may be anything.
    sinks: [hq] float32, a logit of each query head beside its scores, without a value. It is neither scaled nor capped.
    softcap: c > 0: scores become c * tanh(score / c), after the scale.
    visible: [t] int32, the end of the tokens of its sequence that every row attends to (default: its position + 1). At
    least position + 1, at most seq_lens[i], and not less than that of the row before. With it, the rows of a picture
    attend to all of it.
    Returns [t, hq, value_dim] with contiguous rows (`core.empty_rows`). Scores, softmax and sums are fp32; with
    bfloat16 the rungs avx512_bf16 and amx round the probabilities before the product with V, as transformers does.
    Slots past seq_lens[i] in the last page may hold anything. A row's bits depend only on its own query and its own
    sequence, for any chunking and any batch, if the values of the sequence are finite (0 * inf is NaN).
    Raises KernelError for an argument of another shape or dtype, page tables and lengths that do not fit the cache, or
    a window, sinks or visible tokens without a causal mask.
    """
    if window < 0:
        raise KernelError(f"attention: window: expected at least 0 tokens, found {window}")
    if not softcap >= 0:
        raise KernelError(f"attention: softcap: expected a cap >= 0, found {softcap}")
    if not causal and (window or sinks is not None or visible is not None):
        raise KernelError("attention: causal: expected True beside a window, sinks or visible tokens, found False")
    return _ATTENTION(
        q,
        cache,
        page_tables,
        seq_lens,
        query_starts,
        kv_map,
        scale,
        causal,
        lse,
        kv_starts,
        window,
        sinks,
        softcap,
        visible,
    )
