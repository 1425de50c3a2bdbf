"""Entries of `bench kernels` for attention over a paged cache: decode, bf16 and int8, and extend after a prefix.

Latent attention has the sizes of DeepSeek-V3: absorbed decode with the heads of one of six ranks and with all, its
products of single heads, what contexts over six ranks need around it, and expanded extend.
"""

import argparse
from collections.abc import Iterator
from functools import partial
from math import ceil

import torch

from tilerank.kernels.attention import attention, store_kv
from tilerank.kernels.kv_pages import PAGE_TOKENS, KVPages
from tilerank.kernels.latent import (
    expanded_pages,
    head_linear,
    join_queries,
    latent_attention,
    store_latent,
    weigh_part,
)
from tilerank.kernels.latent_pages import LatentPages
from tilerank.kernels.packed_experts import PackedExperts
from tilerank.kernels.weight import Format
from tilerank.parallel.cost import Work, operand_type

from .entry import Entry, cold_copies, replayed
from .formats import WEIGHT_FORMATS

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
DECODE_BATCH = 8

LATENT_HEADS, LATENT_RANKS = (22, 128), 6
LATENT_DIM, ROPE_DIM, NOPE_DIM, VALUE_DIM = 512, 64, 128, 128
HEAD_FORMATS = ("bfloat16", "int8", "fp8")


def entries(args: argparse.Namespace) -> Iterator[Entry]:
    for cached in args.cached_tokens:
        for dtype in (torch.bfloat16, torch.int8):
            yield _attention("decode attention", DECODE_BATCH, cached - 1, 1, dtype)
            for heads in LATENT_HEADS:
                yield _latent_attention(heads, cached, dtype)
    yield from _latent_parts()
    for new in args.new_tokens:
        for prefix in (0, new):
            yield _attention("extend attention", 1, prefix, new, torch.bfloat16)
            yield _expanded_attention(LATENT_HEADS[0], prefix, new)
    for name in HEAD_FORMATS:
        if name in args.formats:
            for n, k in ((LATENT_DIM, NOPE_DIM), (VALUE_DIM, LATENT_DIM)):
                yield _head_linear(LATENT_HEADS[0], n, k, name, WEIGHT_FORMATS[name])


def _attention(kernel: str, batch: int, prefix: int, new: int, dtype: torch.dtype) -> Entry:
    """Attention of `new` tokens of each of `batch` sequences after `prefix` cached ones.

    The bytes of its work are the keys and values of all prefix + new tokens.
    """
    tokens = prefix + new
    pages = ceil(tokens / PAGE_TOKENS)
    nbytes = batch * tokens * KVPages.nbytes(1, KV_HEADS, HEAD_DIM, dtype) // PAGE_TOKENS
    count = cold_copies(nbytes) if new == 1 else 1
    caches = [KVPages.empty(batch * pages, KV_HEADS, HEAD_DIM, dtype) for _ in range(count)]
    slots = torch.arange(batch * pages * PAGE_TOKENS)
    for cache in caches:
        k, v = (torch.randn(len(slots), KV_HEADS, HEAD_DIM).to(torch.bfloat16) for _ in range(2))
        store_kv(k, v, cache, slots)
    q = torch.randn(batch * new, HEADS, HEAD_DIM).to(torch.bfloat16)
    tables = torch.arange(batch * pages, dtype=torch.int32).view(batch, pages)
    lengths = torch.full((batch,), tokens, dtype=torch.int32)
    starts = torch.arange(batch + 1, dtype=torch.int32) * new
    group = HEADS // KV_HEADS
    kv_map = torch.tensor([[head * group, group] for head in range(KV_HEADS)], dtype=torch.int32)
    pairs = new * prefix + new * (new + 1) // 2
    return Entry(
        kernel,
        f"{batch} x {new} after {prefix}",
        str(dtype).removeprefix("torch."),
        Work(nbytes, bf16=4 * batch * HEADS * HEAD_DIM * pairs),
        replayed([partial(attention, q, cache, tables, lengths, starts, kv_map, HEAD_DIM**-0.5) for cache in caches]),
    )


def _latent_attention(heads: int, tokens: int, dtype: torch.dtype) -> Entry:
    """Absorbed decode attention of sequences of `tokens` tokens each."""
    pages = ceil(tokens / PAGE_TOKENS)
    nbytes = DECODE_BATCH * tokens * LatentPages.nbytes(1, LATENT_DIM, ROPE_DIM, dtype) // PAGE_TOKENS
    caches = [LatentPages.empty(DECODE_BATCH * pages, LATENT_DIM, ROPE_DIM, dtype) for _ in range(cold_copies(nbytes))]
    slots = torch.arange(DECODE_BATCH * pages * PAGE_TOKENS)
    for cache in caches:
        latent, rope_key = (torch.randn(len(slots), dim).to(torch.bfloat16) for dim in (LATENT_DIM, ROPE_DIM))
        store_latent(latent, rope_key, cache, slots)
    q_latent, q_rope = (torch.randn(DECODE_BATCH, heads, dim).to(torch.bfloat16) for dim in (LATENT_DIM, ROPE_DIM))
    tables = torch.arange(DECODE_BATCH * pages, dtype=torch.int32).view(DECODE_BATCH, pages)
    lengths = torch.full((DECODE_BATCH,), tokens, dtype=torch.int32)
    starts = torch.arange(DECODE_BATCH + 1, dtype=torch.int32)
    scale = (NOPE_DIM + ROPE_DIM) ** -0.5
    return Entry(
        "latent attention",
        f"{heads} x {DECODE_BATCH} after {tokens - 1}",
        str(dtype).removeprefix("torch."),
        Work(nbytes, bf16=2 * DECODE_BATCH * heads * tokens * (2 * LATENT_DIM + ROPE_DIM)),
        replayed([partial(latent_attention, q_latent, q_rope, c, tables, lengths, starts, scale) for c in caches]),
    )


def _latent_parts() -> Iterator[Entry]:
    """The queries of a rank for the others, and weighing its part of all heads' results."""
    held, heads = LATENT_HEADS
    q_latent, q_rope = (torch.randn(DECODE_BATCH, held, dim).to(torch.bfloat16) for dim in (LATENT_DIM, ROPE_DIM))
    yield Entry(
        "join queries",
        f"{held} x {DECODE_BATCH}",
        "bfloat16",
        Work(2 * (q_latent.nbytes + q_rope.nbytes)),
        replayed([partial(join_queries, q_latent, q_rope, held)]),
    )
    part = torch.randn(DECODE_BATCH, heads, LATENT_DIM).to(torch.bfloat16)
    lse = torch.randn(LATENT_RANKS, DECODE_BATCH, heads)
    yield Entry(
        "weigh part",
        f"{heads} x {DECODE_BATCH} of {LATENT_RANKS}",
        "bfloat16",
        Work(2 * part.nbytes + lse.nbytes),
        replayed([partial(weigh_part, part, lse, 0)]),
    )


def _expanded_attention(heads: int, prefix: int, new: int) -> Entry:
    """Attention of `new` tokens after `prefix` over keys and values expanded from latents, their storing included."""
    tokens, head_dim = prefix + new, NOPE_DIM + ROPE_DIM
    kv = torch.randn(tokens, heads, NOPE_DIM + VALUE_DIM).to(torch.bfloat16)
    rope_key = torch.randn(tokens, ROPE_DIM).to(torch.bfloat16)
    q = torch.randn(new, heads, head_dim).to(torch.bfloat16)
    tables = torch.arange(ceil(tokens / PAGE_TOKENS), dtype=torch.int32)[None]
    lengths, starts = torch.tensor([tokens], dtype=torch.int32), torch.tensor([0, new], dtype=torch.int32)
    kv_map = torch.tensor([[head, 1] for head in range(heads)], dtype=torch.int32)

    def run() -> torch.Tensor:
        expanded = expanded_pages(kv[..., :NOPE_DIM], kv[..., NOPE_DIM:], rope_key)
        return attention(q, expanded, tables, lengths, starts, kv_map, head_dim**-0.5)

    pairs = new * prefix + new * (new + 1) // 2
    return Entry(
        "latent extend",
        f"{heads} x {new} after {prefix}",
        "bfloat16",
        Work(kv.nbytes + rope_key.nbytes, bf16=2 * heads * (head_dim + VALUE_DIM) * pairs),
        replayed([run]),
    )


def _head_linear(heads: int, n: int, k: int, name: str, form: Format) -> Entry:
    """The product of one token of every sequence with a matrix for each head."""
    nbytes = PackedExperts.nbytes(heads, n, k, form)
    weights = [PackedExperts.empty(heads, n, k, form) for _ in range(cold_copies(nbytes))]
    rows = torch.randn(heads * n, k) / (2 * k**0.5)  # n is a multiple of 32, so the heads follow each other
    for weight in weights:
        weight.weight.write(rows)
    x = torch.randn(DECODE_BATCH, heads, k).to(form.activations)
    return Entry(
        "head linear",
        f"{heads} x {DECODE_BATCH} x {n}x{k}",
        name,
        Work(nbytes, **{operand_type(form): 2 * DECODE_BATCH * heads * n * k}),
        replayed([partial(head_linear, x, weight) for weight in weights]),
    )
