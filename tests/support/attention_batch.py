"""Sequences in a paged cache, and their attention in float64."""

import math
from itertools import accumulate

import torch
from torch import Tensor

from tilerank.kernels.attention import attention, store_kv
from tilerank.kernels.kv_pages import PAGE_TOKENS, KVPages

MHA = [(0, 1), (1, 1)]
GQA = [(0, 3), (3, 3)]
UNEVEN = [(1, 3), (4, 1), (6, 2)]  # heads 0 and 5 are padding

DTYPES = [torch.float32, torch.bfloat16]


class Batch:
    """Sequences with keys, values and queries, stored in a cache of NaN in pages of random order.

    window, sinks, softcap: as of `attention`. ends: for each sequence and row the end of the tokens that it attends to,
    or None for its position + 1.
    """

    window = 0
    sinks: Tensor | None = None
    softcap = 0.0
    ends: list[list[int]] | None = None

    def __init__(self, lengths: list[int], kv_map: list[tuple[int, int]], d: int, dtype: torch.dtype, seed: int = 0):
        self.random = torch.Generator().manual_seed(seed)
        self.lengths, self.d, self.dtype, self.scale = lengths, d, dtype, 0.7 / math.sqrt(d)
        self.kv_map = torch.tensor(kv_map, dtype=torch.int32)
        self.q_heads = max(first + count for first, count in kv_map) + 1
        self.q, self.k, self.v = (
            [torch.randn(n, heads, d, generator=self.random).to(dtype) for n in lengths]
            for heads in (self.q_heads, len(kv_map), len(kv_map))
        )
        pages = [-(-n // PAGE_TOKENS) for n in lengths]
        self.cache = KVPages.empty(sum(pages) + 2, len(kv_map), d, dtype)
        self.cache.k.fill_(math.nan)
        self.cache.v.fill_(math.nan)
        free = torch.randperm(sum(pages) + 2, generator=self.random).tolist()
        # Entries past the end of a sequence must not be read, so they are out of range.
        self.tables = torch.full((len(lengths), max(pages, default=0) + 1), 10**6, dtype=torch.int32)
        for table, count in zip(self.tables, pages, strict=True):
            for i in range(count):
                table[i] = free.pop()

    def store(self, i: int, start: int = 0, stop: int | None = None) -> None:
        """Store tokens start..stop of sequence i in the cache."""
        position = torch.arange(self.lengths[i])[start:stop]
        slots = self.tables[i].long()[position // PAGE_TOKENS] * PAGE_TOKENS + position % PAGE_TOKENS
        store_kv(self.k[i][start:stop], self.v[i][start:stop], self.cache, slots)

    def store_all(self) -> "Batch":
        for i in range(len(self.lengths)):
            self.store(i)
        return self

    def attend(self, parts: list[tuple[int, int, int]]) -> list[Tensor]:
        """Compute rows start..stop of sequence i for every part (i, start, stop), in one call."""
        rows = [self.q[i][start:stop] for i, start, stop in parts]
        ends = None
        if self.ends is not None:
            ends = torch.tensor(
                [end for i, start, stop in parts for end in self.ends[i][start:stop]], dtype=torch.int32
            )
        out = attention(
            torch.cat(rows) if rows else torch.zeros(0, self.q_heads, self.d, dtype=self.dtype),
            self.cache,
            self.tables[[i for i, _, _ in parts]],
            torch.tensor([stop for _, _, stop in parts], dtype=torch.int32),
            torch.tensor([0, *accumulate(stop - start for _, start, stop in parts)], dtype=torch.int32),
            self.kv_map,
            self.scale,
            window=self.window,
            sinks=self.sinks,
            softcap=self.softcap,
            visible=ends,
        )
        assert out.dtype == self.dtype
        return list(torch.split(out, [stop - start for _, start, stop in parts]))

    def whole(self, i: int) -> Tensor:
        return self.attend([(i, 0, self.lengths[i])])[0]

    def exact(self, i: int) -> tuple[Tensor, Tensor]:
        """Return attention of all rows of sequence i in float64, and the tolerance of a rung by element."""
        n = self.lengths[i]
        out, bound = torch.zeros(2, n, self.q_heads, self.d, dtype=torch.float64)
        position, ends = torch.arange(n), range(1, n + 1) if self.ends is None else self.ends[i]
        hidden = position >= torch.tensor(ends)[:, None]
        if self.window:
            hidden |= position <= position[:, None] - self.window
        for kv_head, (first, count) in enumerate(self.kv_map.tolist()):
            k, v = self.k[i][:, kv_head].double(), self.v[i][:, kv_head].double()
            for head in range(first, first + count):
                q = self.q[i][:, head].double()
                scores = q @ k.T * self.scale
                if self.softcap:
                    scores = self.softcap * torch.tanh(scores / self.softcap)
                scores = scores.masked_fill(hidden, -math.inf)
                if self.sinks is not None:
                    scores = torch.cat([scores, self.sinks[head].double().expand(n, 1)], dim=-1)
                p = scores.softmax(-1)[:, :n]
                out[:, head] = p @ v
                # fp32: a score is a sum of d products, whose rounding error grows like sqrt(d) times its magnitude. It
                # is an exponent, so the error of p is relative. The weighted sum adds sqrt(n) more.
                size = (q.abs() @ k.abs().T).amax(-1, keepdim=True) * abs(self.scale)
                eps = torch.finfo(torch.float32).eps * (math.sqrt(self.d) * (1 + size) + math.sqrt(n) + 4)
                half_ulp = torch.finfo(self.dtype).eps / 2
                # bf16: probabilities and the result are rounded once each.
                of_p = half_ulp if self.dtype == torch.bfloat16 else 0.0
                bound[:, head] = (eps + of_p) * (p @ v.abs()) + half_ulp * out[:, head].abs()
        return out, bound * 1.01


def assert_exact(found: Tensor, batch: Batch, i: int) -> None:
    exact, bound = batch.exact(i)
    excess = (found.double() - exact).abs() - bound
    assert bool((excess <= 0).all()), f"exceeds the bound by up to {excess.max():g}"
