"""Long sequences of few heads, whose parts several threads share: exact, with the bits of a single thread."""

import math
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from tilerank.kernels import core
from tilerank.kernels.attention import attention, store_kv
from tilerank.kernels.kv_pages import PAGE_TOKENS, KVPages
from tilerank.kernels.reference.attention import load_kv

pytestmark = pytest.mark.usefixtures("rung")

CACHES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.int8),
    (torch.bfloat16, torch.int8),
]
LENGTHS = [4500, 0, 2048, 2049, 1, 6100, 4096]
HEADS, D = 5, 40  # number of query heads; the last one is padding
KV_MAP = torch.tensor([[0, 4]], dtype=torch.int32)


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Sequences:
    """One KV head and sequences of LENGTHS in pages of random order; maxima of scores come early, late, in between."""

    def __init__(self, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
        random = torch.Generator().manual_seed(8)
        self.dtype = dtype
        self.q = [torch.randn(n, HEADS, D, generator=random).to(dtype) for n in LENGTHS]
        pages = [-(-n // PAGE_TOKENS) for n in LENGTHS]
        self.cache = KVPages.empty(sum(pages), 1, D, cache_dtype)
        order = torch.split(torch.randperm(sum(pages), generator=random, dtype=torch.int32), pages)
        self.tables = torch.stack([torch.nn.functional.pad(own, (0, max(pages) - len(own)), value=-1) for own in order])
        self.k, self.v = [], []
        for own, n in zip(order, LENGTHS, strict=True):
            k, v = torch.randn(2, n, 1, D, generator=random).to(dtype)
            for position in (5, 3000, 4095, 6000):
                k[position : position + 1] *= 4 + position / 1000
            slots = (own.long()[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS)).flatten()[:n]
            store_kv(k, v, self.cache, slots)
            if cache_dtype == torch.int8:
                k, v = (x[:n] for x in load_kv(self.cache, own.long()))
            self.k.append(k.double())
            self.v.append(v.double())

    def attend(self, rows: list[range], *, causal: bool = True, threads: int = 1) -> tuple[list[Tensor], Tensor]:
        """Compute some rows of every sequence, and the log-sum-exp of all."""
        core.start_pool(None, threads, spin=False)
        counts = [len(part) for part in rows]
        q = torch.cat([q[part.start : part.stop] for q, part in zip(self.q, rows, strict=True)])
        lse = torch.full(q.shape[:2], math.nan)
        lengths = [part.stop for part in rows] if causal else LENGTHS
        starts = ints([0, *accumulate(counts)])
        out = attention(q, self.cache, self.tables, ints(lengths), starts, KV_MAP, D**-0.5, causal=causal, lse=lse)
        return list(torch.split(out, counts)), lse

    def exact(self, i: int, row: int, seen: int) -> tuple[Tensor, Tensor]:
        scores = self.q[i][row, :4].double() @ self.k[i][:seen, 0].T * D**-0.5
        return scores.softmax(-1) @ self.v[i][:seen, 0], scores.logsumexp(-1)


@pytest.mark.parametrize(("dtype", "cache_dtype"), CACHES, ids=str)
def test_last_rows_are_exact_and_the_same_however_many_threads_share_them(
    dtype: torch.dtype, cache_dtype: torch.dtype
) -> None:
    sequences = Sequences(dtype, cache_dtype)
    last = [range(max(n - 1, 0), n) for n in LENGTHS]
    found, lse = sequences.attend(last)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    row = 0
    for i, n in enumerate(LENGTHS):
        for out in found[i]:
            exact, exact_lse = sequences.exact(i, n - 1, n)
            torch.testing.assert_close(out[:4].double(), exact, rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(lse[row, :4].double(), exact_lse, rtol=1e-5, atol=1e-5)
            assert not out[4].any()
            row += 1
    for threads in (2, 3, 7):
        again, again_lse = sequences.attend(last, threads=threads)
        assert all(torch.equal(a, b) for a, b in zip(again, found, strict=True))
        assert torch.equal(again_lse, lse)
    # In a batch of one, each sequence is shared by all threads.
    for i in range(len(LENGTHS)):
        alone = [part if j == i else range(LENGTHS[j], LENGTHS[j]) for j, part in enumerate(last)]
        assert torch.equal(sequences.attend(alone, threads=4)[0][i], found[i])


@pytest.mark.parametrize(("dtype", "cache_dtype"), CACHES, ids=str)
@pytest.mark.parametrize("count", [3, 20, 50])
def test_rows_of_a_prompt_have_the_bits_that_they_have_one_by_one(
    dtype: torch.dtype, cache_dtype: torch.dtype, count: int
) -> None:
    sequences = Sequences(dtype, cache_dtype)
    # The rows attend to different numbers of parts: up to 2048 tokens and more, up to 4096 and more.
    rows = [range(max(n - count, 0), n) for n in LENGTHS]
    rows[0] = range(2048 - count // 2, 2048 + count // 2 + 1)
    rows[5] = range(4096 - count // 2, 4096 + count // 2 + 1)
    found, lse = sequences.attend(rows, threads=3)
    assert lse[:, :4].isfinite().all()
    assert all(torch.equal(a, b) for a, b in zip(sequences.attend(rows, threads=1)[0], found, strict=True))
    for offset in {0, count // 2 - 1, count // 2, count - 1}:
        single = [part[offset : offset + 1] for part in rows]
        one_by_one, _ = sequences.attend(single, threads=2)
        for i, (out, whole) in enumerate(zip(one_by_one, found, strict=True)):
            assert torch.equal(out, whole[offset : offset + 1]), f"row {single[i]} of sequence {i}"


@pytest.mark.parametrize(("dtype", "cache_dtype"), CACHES, ids=str)
def test_rows_over_all_tokens_or_none(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    sequences = Sequences(dtype, cache_dtype)
    for i, q in enumerate(sequences.q):
        sequences.q[i] = torch.cat([q, torch.ones(9, HEADS, D, dtype=dtype)])
    rows = [range(9)] * len(LENGTHS)
    found, lse = sequences.attend(rows, causal=False, threads=3)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    for i, (out, of_out) in enumerate(zip(found, torch.split(lse, 9), strict=True)):
        if LENGTHS[i] == 0:
            assert not out.any()
            assert bool((of_out == -math.inf).all())
            continue
        exact, exact_lse = sequences.exact(i, 8, LENGTHS[i])
        torch.testing.assert_close(out[8, :4].double(), exact, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(of_out[8, :4].double(), exact_lse, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(sequences.attend(rows, causal=False)[0], found, strict=True))
