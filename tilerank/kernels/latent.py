"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, and DeepSeek-V3, arXiv 2412.19437) over a paged cache.

A token has one latent c and one rotated key r for all heads. Its key in head h is [W_uk[h] c, r], its value W_uv[h] c.

Few rows use the absorbed form, which reads nothing but the cache: with `head_linear`, q_latent[h] = q_nope[h] W_uk[h];
with `latent_attention`, score = q_latent . c + q_rope . r and o_latent = sum of p * c; with `head_linear`,
o[h] = W_uv[h] o_latent[h].

Ranks that all hold the whole cache may share a long context out: each attends to a part of it for the heads of all, and
with `weigh_part` the results add up.

Many rows use the expanded form, with fewer operations a pair of query and token, which pays for computing keys and
values of all tokens from about latent_dim / 3 rows of a sequence on:

    latent, rope_key = load_latent(cache, pages, dtype)      pages: those of the sequences one after the other
    kv = split_heads(linear(latent, kv_b_proj), ...)         views k [n, heads, nope] and v [n, heads, value_dim]
    expanded = expanded_pages(k, v, rope_key)                page i holds the tokens of pages[i]
    out = attention(q, expanded, tables, seq_lens, query_starts, kv_map, scale)
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import check, core
from .contract import Contract
from .errors import KernelError
from .kv_pages import PAGE_TOKENS, KVPages
from .latent_pages import LatentPages
from .packed_experts import PackedExperts
from .reference import latent as reference
from .weight import round_up
from .weight_formats import LAYOUTS

_STORE_LATENT = Contract(
    "store_latent: latent[t, cache.latent_dim]:cache.activations rope_key[t, cache.rope_dim]:latent cache.data "
    "cache.scales? slots[t]:i64",
    reference.store_latent,
)


def store_latent(latent: Tensor, rope_key: Tensor, cache: LatentPages, slots: Tensor) -> None:
    """Write the latents and rotated keys of t tokens into the cache.

    latent: [t, latent_dim], rope_key: [t, rope_dim], in the cache's dtype, strided, with a contiguous last dimension.
    Over an int8 cache they are float32 or bfloat16 and are quantised symmetrically, each row of both with a scale of
    its own (max |x| / 127).
    slots: [t] int64, slot = page * PAGE_TOKENS + offset, no slot twice.
    Raises KernelError for an argument of another shape or dtype, or a slot outside the cache.
    """
    _STORE_LATENT.run(latent, rope_key, cache, slots)


_LOAD_LATENT = Contract(
    "load_latent: cache.data cache.scales? pages[n]:i32 dtype:cache.activations "
    f"-> apart latent[{PAGE_TOKENS} * n, cache.latent_dim]:dtype rope_key[{PAGE_TOKENS} * n, cache.rope_dim]:dtype",
    reference.load_latent,
)


def load_latent(cache: LatentPages, pages: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the latents [n * PAGE_TOKENS, latent_dim] and the rotated keys [n * PAGE_TOKENS, rope_dim] of n pages.

    pages: [n] int32, numbers of pages, in the order of the result. dtype: the cache's, or float32 or bfloat16 over an
    int8 cache. Rows of slots that were never written hold anything.
    Raises KernelError for an argument of another shape or dtype, or a page outside the cache.
    """
    latent, rope_key = _LOAD_LATENT.run(cache, pages, dtype)
    return latent, rope_key


_LATENT_ATTENTION = Contract(
    "latent_attention: q_latent[t, heads, cache.latent_dim]:cache.activations "
    "q_rope[t, heads, cache.rope_dim]:q_latent cache.data cache.scales? page_tables[s, _]:i32 seq_lens[s]:i32 "
    "query_starts[s + 1]:i32 scale:float causal:bool lse[t, heads]?:f32 kv_starts[s]?:i32 "
    "-> apart out[t, heads, cache.latent_dim]:q_latent",
    reference.latent_attention,
)


def latent_attention(
    q_latent: Tensor,
    q_rope: Tensor,
    cache: LatentPages,
    page_tables: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    scale: float,
    *,
    causal: bool = True,
    lse: Tensor | None = None,
    kv_starts: Tensor | None = None,
) -> Tensor:
    """Return the attention of all heads over the latents of a variable-length batch, the absorbed form.

    out[row, head] = sum over tokens of p * c, p = softmax((q_latent . c + q_rope . r) * scale).

    q_latent: [t, heads, latent_dim], q_rope: [t, heads, rope_dim], in the cache's dtype, or any activation dtype over
    int8, strided, with a contiguous last dimension. Sequence i has the rows query_starts[i] to query_starts[i + 1],
    which are the *last* of its seq_lens[i] tokens. `store_latent` has already written all of them.
    page_tables: [s, b] int32, the pages of each sequence in order; entries past ceil(seq_len / PAGE_TOKENS) are unused.
    seq_lens: [s] int32; query_starts: [s + 1] int32, from 0 to t. scale: factor of the scores.
    causal=False: every row of sequence i attends to all seq_lens[i] tokens, such as a part of a longer sequence, and
    the number of rows is unrestricted. The output over no tokens is zero.
    kv_starts: [s] int32, multiples of PAGE_TOKENS, the token of page_tables[i] at which the seq_lens[i] tokens begin
    (default 0).
    lse: [t, heads] float32, receives the log-sum-exp of every row's scaled scores (-inf for a row that attends to
    nothing). It allows merging results over parts of a sequence (`weigh_part`).
    Returns [t, heads, latent_dim] with contiguous rows (`core.empty_rows`). Scores, softmax and sums are fp32; with
    bfloat16 the rungs avx512_bf16 and amx round the probabilities before the product.
    A row's bits depend only on its own query and its own sequence, for any chunking and any batch.
    Raises KernelError for an argument of another shape or dtype, or page tables and lengths that do not fit the cache.
    """
    return _LATENT_ATTENTION(
        q_latent, q_rope, cache, page_tables, seq_lens, query_starts, scale, causal, lse, kv_starts
    )


_JOIN_QUERIES = Contract(
    "join_queries: q_latent[t, h, latent]:f32|bf16 q_rope[t, h, rope]:q_latent heads:size "
    "-> out[t, heads, latent + rope]:q_latent",
    reference.join_queries,
)


def join_queries(q_latent: Tensor, q_rope: Tensor, heads: int) -> Tensor:
    """Return queries [t, heads, latent_dim + rope_dim], contiguous, for the ranks to gather.

    q_latent: [t, h, latent_dim], q_rope: [t, h, rope_dim] for h up to `heads`, float32 or bfloat16, strided, with a
    contiguous last dimension. Heads from h on hold anything.
    Raises KernelError for an argument of another shape or dtype.
    """
    _JOIN_QUERIES.check(q_latent, q_rope)
    if q_latent.shape[1] > heads:
        raise KernelError(f"join_queries: q_latent: expected up to {heads} heads, found {q_latent.shape[1]}")
    return _JOIN_QUERIES(q_latent, q_rope, heads)


_WEIGH_PART = Contract(
    "weigh_part: part[t, heads, d]:f32|bf16 lse[parts, t, heads]:f32 rank:int -> out[t, heads, d]:part",
    reference.weigh_part,
)


def weigh_part(part: Tensor, lse: Tensor, rank: int) -> Tensor:
    """Return the contribution of part `rank` of a context to the attention over all parts, [t, heads, dim] contiguous.

    out[row, head] = part[row, head] * exp(lse[rank]) / sum over parts of exp(lse), so that the contributions of all
    parts add up to the attention (flash-decoding, pytorch.org/blog/flash-decoding).
    part: [t, heads, dim], the attention over the part, float32 or bfloat16, strided, with a contiguous last dimension.
    lse: [parts, t, heads] float32, contiguous, the log-sum-exp of the scores of every part, of which one at least is
    finite. Computed in fp32, rounded once.
    Raises KernelError for an argument of another shape or dtype.
    """
    _WEIGH_PART.check(part, lse)
    if not 0 <= rank < lse.shape[0]:
        raise KernelError(f"weigh_part: rank: expected 0 to {lse.shape[0] - 1}, found {rank}")
    return _WEIGH_PART(part, lse, rank)


_HEAD_LINEAR = {
    layout: Contract(
        "head_linear: x[m, heads, w.k]:w.format.activations w:weight heads:size x_scales[heads, w.k]?:f32 n:size "
        "scratch_bytes:int bytes:size -> apart out[m, heads, n]:x working[bytes]?:u8",
        layout=layout,
    )
    for layout in LAYOUTS
}


def head_linear(x: Tensor, weight: PackedExperts, x_scales: Tensor | None = None) -> Tensor:
    """Multiply every head of x with a matrix of its own: out[t, h] = x[t, h] @ weight[h].T, as [t, heads, n].

    x: [t, heads, k], dtype `weight.weight.format.activations`, strided, with a contiguous last dimension.
    weight: one part of [n, k] for every head, as `PackedExperts.empty(heads, n, k, format)`; heads are its experts.
    x_scales: [heads, k] float32, factors of a bfloat16 x; the products are rounded to bfloat16. An int8 checkpoint has
    one scale for every row of kv_b_proj, which is an output of W_uv but an input of W_uk.
    Returns [t, heads, n] in x.dtype with contiguous rows (`core.empty_rows`). All arithmetic is fp32, rounded once.
    Int8 weights quantise every x[t, h] symmetrically, as `linear` does.
    Raises KernelError for an argument of another shape or dtype.
    """
    packed = weight.weight
    contract, arguments = _HEAD_LINEAR[packed.format.layout], (x, packed, weight.experts, x_scales, weight.n)
    contract.check(*arguments)
    if weight.parts != 1:
        raise KernelError(f"head_linear: weight: expected 1 part, found {weight.parts}")
    if x_scales is not None:
        check.tensor("head_linear", "x", x, x.shape, torch.bfloat16)
    if core.isa() == "reference" or packed.is_plain:
        return reference.head_linear(x, weight, x_scales)
    # Every thread runs the linear kernel for itself, with working memory in whole cache lines.
    scratch = round_up(packed.scratch(x.shape[0]), 64)
    scaled = 0 if x_scales is None else round_up(x.shape[0] * x.shape[2] * 2, 64)
    return contract(*arguments, scratch, core.num_threads() * (scratch + scaled))


_EXPANDED_PAGES = Contract(
    "expanded_pages: k[n, heads, nope]:f32|bf16 v[n, heads, value_dim]:k rope_key[n, rope]:k cache.k cache.v"
)


def expanded_pages(k: Tensor, v: Tensor, rope_key: Tensor) -> KVPages:
    """Return the keys [k, rope_key] and the values v of n tokens as pages for `attention`, in the arena.

    Token i is at slot i. k: [n, heads, nope], v: [n, heads, value_dim], rope_key: [n, rope_dim], shared by all heads;
    float32 or bfloat16, strided, with a contiguous last dimension. nope, rope_dim and value_dim: multiples of 8,
    nope + rope_dim and value_dim up to 512.
    Raises KernelError for an argument of another shape or dtype.
    """
    _EXPANDED_PAGES.check(k, v, rope_key)
    if core.isa() == "reference":
        return reference.expanded_pages(k, v, rope_key)
    tokens, heads, nope = k.shape
    pages, head_dim = max(-(-tokens // PAGE_TOKENS), 1), nope + rope_key.shape[1]
    cache = KVPages.in_arena(pages, heads, head_dim, k.dtype, value_dim=v.shape[2])
    _EXPANDED_PAGES.run(k, v, rope_key, cache)
    return cache
