"""Entries of `bench kernels` for attention over a paged cache: decode, bf16 and int8, and extend after a prefix."""

import argparse
from collections.abc import Iterator
from functools import partial
from math import ceil

import torch

from tilerank.kernels.attention import attention, store_kv
from tilerank.kernels.kv_pages import PAGE_TOKENS, KVPages
from tilerank.parallel.cost import Work

from .entry import Entry, cold_copies, replayed

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
DECODE_BATCH = 8


def entries(args: argparse.Namespace) -> Iterator[Entry]:
    for cached in args.cached_tokens:
        for dtype in (torch.bfloat16, torch.int8):
            yield _attention("decode attention", DECODE_BATCH, cached - 1, 1, dtype)
    for new in args.new_tokens:
        for prefix in (0, new):
            yield _attention("extend attention", 1, prefix, new, torch.bfloat16)


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
