"""Entries of `bench kernels` for attention over a paged cache: decode, bf16 and int8, and extend after a prefix.

Window attention has the sizes of the layers with a window of gpt-oss and of Gemma 3 (12B), with sinks as gpt-oss has.
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
from tilerank.parallel.cost import Work

from .entry import Entry, cold_copies, replayed
from .formats import WEIGHT_FORMATS

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
DECODE_BATCH = 8

WINDOWS = ((128, 64, 8, 64), (1024, 16, 8, 256))
"""Of layers with a window: its tokens, query heads, KV heads, and head size."""

LATENT_HEADS, LATENT_RANKS = (22, 128), 6
LATENT_DIM, ROPE_DIM, NOPE_DIM, VALUE_DIM = 512, 64, 128, 128
HEAD_FORMATS = ("bfloat16", "int8", "fp8")


def entries(args: argparse.Namespace) -> Iterator[Entry]:
    for cached in args.cached_tokens:
        for dtype in (torch.bfloat16, torch.int8):
            yield _attention("decode attention", DECODE_BATCH, cached - 1, 1, dtype)
            for heads in LATENT_HEADS:
                yield _latent_attention(heads, cached, dtype)
        for sizes in WINDOWS:
            yield _window_attention(cached - 1, *sizes)
    yield from _latent_parts()
    for new in args.new_tokens:
        for prefix in (0, new):
            yield _attention("extend attention", 1, prefix, new, torch.bfloat16)
            yield _expanded_attention(LATENT_HEADS[0], prefix, new)
    for name in HEAD_FORMATS:
        if name in args.formats:
            for n, k in ((LATENT_DIM, NOPE_DIM), (VALUE_DIM, LATENT_DIM)):
                yield _head_linear(LATENT_HEADS[0], n, k, name)


def _attention(kernel: str, batch: int, prefix: int, new: int, dtype: torch.dtype) -> Entry:
    """Attention of `new` tokens of each of `batch` sequences after `prefix` cached ones.

    The bytes of its work are the keys and values of all prefix + new tokens.
    """
    tables, lengths, starts = _sequences(batch, prefix + new, new)
    nbytes = batch * (prefix + new) * KVPages.nbytes(1, KV_HEADS, HEAD_DIM, dtype) // PAGE_TOKENS
    count, slots = cold_copies(nbytes) if new == 1 else 1, _slots(tables)
    caches = [KVPages.empty(tables.numel(), KV_HEADS, HEAD_DIM, dtype) for _ in range(count)]
    for cache in caches:
        store_kv(_bf16(len(slots), KV_HEADS, HEAD_DIM), _bf16(len(slots), KV_HEADS, HEAD_DIM), cache, slots)
    q, group = _bf16(batch * new, HEADS, HEAD_DIM), HEADS // KV_HEADS
    kv_map = torch.tensor([[head * group, group] for head in range(KV_HEADS)], dtype=torch.int32)
    work = Work(nbytes, bf16=4 * batch * HEADS * HEAD_DIM * _pairs(prefix, new))
    calls = [partial(attention, q, cache, tables, lengths, starts, kv_map, HEAD_DIM**-0.5) for cache in caches]
    return Entry(kernel, f"{batch} x {new} after {prefix}", work, replayed(calls), format=_name(dtype))


def _window_attention(prefix: int, window: int, heads: int, kv_heads: int, head_dim: int) -> Entry:
    """Decode attention after `prefix` tokens with a window, whose pages alone are held.

    The bytes of its work are the keys and values of the window.
    """
    seen, (tables, lengths, starts) = min(window, prefix + 1), _sequences(DECODE_BATCH, prefix + 1, 1)
    slid_out = (prefix + 1 - seen) // PAGE_TOKENS
    held = tables.shape[1] - slid_out
    tables = torch.zeros_like(tables)
    tables[:, slid_out:] = torch.arange(DECODE_BATCH * held, dtype=torch.int32).view(DECODE_BATCH, held)
    nbytes = DECODE_BATCH * seen * KVPages.nbytes(1, kv_heads, head_dim, torch.bfloat16) // PAGE_TOKENS
    slots = torch.arange(DECODE_BATCH * held * PAGE_TOKENS)
    caches = [
        KVPages.empty(DECODE_BATCH * held, kv_heads, head_dim, torch.bfloat16) for _ in range(cold_copies(nbytes))
    ]
    for cache in caches:
        store_kv(_bf16(len(slots), kv_heads, head_dim), _bf16(len(slots), kv_heads, head_dim), cache, slots)
    group, sinks = heads // kv_heads, torch.randn(heads)
    kv_map = torch.tensor([[head * group, group] for head in range(kv_heads)], dtype=torch.int32)
    arguments = tables, lengths, starts, kv_map, head_dim**-0.5
    q = _bf16(DECODE_BATCH, heads, head_dim)
    work = Work(nbytes, bf16=4 * DECODE_BATCH * heads * head_dim * seen)
    calls = [partial(attention, q, cache, *arguments, window=window, sinks=sinks) for cache in caches]
    shape = f"{DECODE_BATCH} x {heads} x {head_dim} of {window} after {prefix}"
    return Entry("window attention", shape, work, replayed(calls), format="bfloat16")


def _latent_attention(heads: int, tokens: int, dtype: torch.dtype) -> Entry:
    """Absorbed decode attention of sequences of `tokens` tokens each."""
    tables, lengths, starts = _sequences(DECODE_BATCH, tokens, 1)
    nbytes = DECODE_BATCH * tokens * LatentPages.nbytes(1, LATENT_DIM, ROPE_DIM, dtype) // PAGE_TOKENS
    slots = _slots(tables)
    caches = [LatentPages.empty(tables.numel(), LATENT_DIM, ROPE_DIM, dtype) for _ in range(cold_copies(nbytes))]
    for cache in caches:
        store_latent(_bf16(len(slots), LATENT_DIM), _bf16(len(slots), ROPE_DIM), cache, slots)
    q = _bf16(DECODE_BATCH, heads, LATENT_DIM), _bf16(DECODE_BATCH, heads, ROPE_DIM)
    scale = (NOPE_DIM + ROPE_DIM) ** -0.5
    work = Work(nbytes, bf16=2 * DECODE_BATCH * heads * tokens * (2 * LATENT_DIM + ROPE_DIM))
    calls = [partial(latent_attention, *q, cache, tables, lengths, starts, scale) for cache in caches]
    shape = f"{heads} x {DECODE_BATCH} after {tokens - 1}"
    return Entry("latent attention", shape, work, replayed(calls), format=_name(dtype))


def _latent_parts() -> Iterator[Entry]:
    """The queries of a rank for the others, and weighing its part of all heads' results."""
    held, heads = LATENT_HEADS
    q_latent, q_rope = _bf16(DECODE_BATCH, held, LATENT_DIM), _bf16(DECODE_BATCH, held, ROPE_DIM)
    work = Work(2 * (q_latent.nbytes + q_rope.nbytes))
    joined = replayed([partial(join_queries, q_latent, q_rope, held)])
    yield Entry("join queries", f"{held} x {DECODE_BATCH}", work, joined)
    part, lse = _bf16(DECODE_BATCH, heads, LATENT_DIM), torch.randn(LATENT_RANKS, DECODE_BATCH, heads)
    work, weighed = Work(2 * part.nbytes + lse.nbytes), replayed([partial(weigh_part, part, lse, 0)])
    yield Entry("weigh part", f"{heads} x {DECODE_BATCH} of {LATENT_RANKS}", work, weighed)


def _expanded_attention(heads: int, prefix: int, new: int) -> Entry:
    """Attention of `new` tokens after `prefix` over keys and values expanded from latents, their storing included."""
    head_dim = NOPE_DIM + ROPE_DIM
    kv, rope_key = _bf16(prefix + new, heads, NOPE_DIM + VALUE_DIM), _bf16(prefix + new, ROPE_DIM)
    q, sequences = _bf16(new, heads, head_dim), _sequences(1, prefix + new, new)
    kv_map = torch.tensor([[head, 1] for head in range(heads)], dtype=torch.int32)

    def run() -> torch.Tensor:
        expanded = expanded_pages(kv[..., :NOPE_DIM], kv[..., NOPE_DIM:], rope_key)
        return attention(q, expanded, *sequences, kv_map, head_dim**-0.5)

    operations = 2 * heads * (head_dim + VALUE_DIM) * _pairs(prefix, new)
    work = Work(kv.nbytes + rope_key.nbytes, bf16=operations)
    return Entry("latent extend", f"{heads} x {new} after {prefix}", work, replayed([run]))


def _head_linear(heads: int, n: int, k: int, name: str) -> Entry:
    """The product of one token of every sequence with a matrix for each head."""
    form = WEIGHT_FORMATS[name]
    nbytes = PackedExperts.nbytes(heads, n, k, form)
    weights = [PackedExperts.empty(heads, n, k, form) for _ in range(cold_copies(nbytes))]
    rows = torch.randn(heads * n, k) / (2 * k**0.5)  # n is a multiple of 32, so the heads follow each other
    for weight in weights:
        weight.weight.write(rows)
    x = torch.randn(DECODE_BATCH, heads, k).to(form.activations)
    work = Work(nbytes, **{form.operands: 2 * DECODE_BATCH * heads * n * k})
    calls = replayed([partial(head_linear, x, weight) for weight in weights])
    return Entry("head linear", f"{heads} x {DECODE_BATCH} x {n}x{k}", work, calls, format=name)


def _sequences(batch: int, tokens: int, new: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return page tables, lengths and query starts of sequences of `tokens` tokens each, of which `new` are new."""
    pages = ceil(tokens / PAGE_TOKENS)
    tables = torch.arange(batch * pages, dtype=torch.int32).view(batch, pages)
    lengths = torch.full((batch,), tokens, dtype=torch.int32)
    return tables, lengths, torch.arange(batch + 1, dtype=torch.int32) * new


def _slots(tables: torch.Tensor) -> torch.Tensor:
    """Return the slots of all tokens of the pages of `tables`."""
    return torch.arange(tables.numel() * PAGE_TOKENS)


def _pairs(prefix: int, new: int) -> int:
    """Return the pairs of a query and a key that it sees, of `new` tokens after `prefix`."""
    return new * prefix + new * (new + 1) // 2


def _bf16(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(torch.bfloat16)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
