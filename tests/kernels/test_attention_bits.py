"""The bits of a row of attention do not depend on how the row is computed."""

import math
from itertools import pairwise

import pytest
import torch
from attention_batch import DTYPES, GQA, MHA, UNEVEN, Batch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tilerank.kernels import core
from tilerank.kernels.attention import attention
from tilerank.kernels.kv_pages import KVPages

pytestmark = pytest.mark.usefixtures("rung")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    length=st.integers(1, 290),
    cuts=st.lists(st.integers(1, 289), max_size=4),
    d=st.sampled_from([8, 40, 64]),
    kv_map=st.sampled_from([MHA, GQA, UNEVEN]),
    seed=st.integers(0, 99),
)
def test_chunked_prefill_and_decode_equal_whole_prefill(
    dtype: torch.dtype, length: int, cuts: list[int], d: int, kv_map: list[tuple[int, int]], seed: int
) -> None:
    whole = Batch([length], kv_map, d, dtype, seed).store_all().whole(0)
    # As a server stores it: keys of a chunk are written just before it; the rest of the cache is NaN.
    batch = Batch([length], kv_map, d, dtype, seed)
    edges = sorted({0, length, *(cut for cut in cuts if cut < length)})
    for start, stop in pairwise(edges):
        batch.store(0, start, stop)
        [found] = batch.attend([(0, start, stop)])
        assert torch.equal(found, whole[start:stop])
    for position in {0, length // 2, length - 1}:
        [found] = batch.attend([(0, position, position + 1)])
        assert torch.equal(found[0], whole[position])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("d", "scale"), [(16, 4.0), (64, -4.0), (64, 0.1)])
def test_bits_do_not_depend_on_rising_maxima(dtype: torch.dtype, scale: float, d: int) -> None:
    batch = Batch([1100], [(0, 3)], d, dtype)
    batch.scale = scale
    for position in (0, 31, 40, 255, 256, 300, 1023, 1024, 1090):
        batch.k[0][position] *= 1 + position / 200
    batch.store_all()
    whole = batch.whole(0)
    assert whole.isfinite().all()
    for edges in ([0, 33, 64, 301, 1100], [0, 7, 1023, 1025, 1100]):
        parts = batch.attend([(0, start, stop) for start, stop in pairwise(edges)])
        assert torch.equal(torch.cat(parts), whole)
    for position in (30, 41, 256, 301, 1024, 1099):
        assert torch.equal(batch.attend([(0, position, position + 1)])[0][0], whole[position])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", [40, 64])
def test_any_number_of_rows_has_the_bits_of_one(dtype: torch.dtype, d: int) -> None:
    batch = Batch([230], [(0, 1)], d, dtype).store_all()
    whole = batch.whole(0)
    # Around the sizes of row blocks, few-row tasks and tasks: first of the vector rungs, then of AMX.
    for rows in (1, 2, 3, 5, 6, 7, 11, 12, 13, 15, 23, 24, 25, 31, 32, 33, 95, 96, 97, 127, 128, 129):
        for stop in (rows, 190, 230):
            if rows <= stop:
                [found] = batch.attend([(0, stop - rows, stop)])
                assert torch.equal(found, whole[stop - rows : stop]), f"{rows} rows up to {stop}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_non_finite_row_does_not_affect_other_rows(dtype: torch.dtype, poison: float) -> None:
    batch = Batch([150], GQA, 40, dtype).store_all()
    whole = batch.whole(0)
    batch.q[0][60, 1] = poison
    found = batch.whole(0)
    assert bool(found[60, 1].isnan().all())
    found[60, 1] = whole[60, 1]
    assert torch.equal(found, whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "kv_map",
    [
        [(head, 1) for head in range(40)],
        [(5 * head, 5) for head in range(27)],
        [(16 * head, 16) for head in range(9)],
        [(33 * head, 33) for head in range(3)],
        [(0, 2), (2, 2), (5, 2), (7, 3), (10, 3), (13, 0), (13, 3)],
    ],
    ids=lambda kv_map: f"{len(kv_map)} heads",
)
def test_decode_of_joined_heads_has_the_bits_of_prefill(dtype: torch.dtype, kv_map: list[tuple[int, int]]) -> None:
    batch = Batch([70, 1, 96, 33], kv_map, 40, dtype).store_all()
    last = [batch.whole(i)[-1:] for i in range(4)]
    for threads in (1, 2, 3, 7):
        core.start_pool(None, threads, spin=False)
        found = batch.attend([(i, n - 1, n) for i, n in enumerate(batch.lengths)])
        assert all(torch.equal(a, b) for a, b in zip(found, last, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_batch_equals_its_sequences_one_by_one(dtype: torch.dtype) -> None:
    batch = Batch([1, 150, 33, 64, 257, 5], UNEVEN, 24, dtype).store_all()
    # decode, prefill with a prefix, no queries, whole prefill, one sequence twice
    parts = [(0, 0, 1), (1, 100, 150), (2, 33, 33), (3, 0, 64), (4, 256, 257), (5, 2, 5), (4, 17, 90)]
    together = batch.attend(parts)
    for part, found in zip(parts, together, strict=True):
        assert torch.equal(found, batch.attend([part])[0])
        assert torch.equal(found, batch.whole(part[0])[part[1] : part[2]])
    core.start_pool(None, 1, spin=False)
    assert all(torch.equal(a, b) for a, b in zip(batch.attend(parts), together, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_do_not_depend_on_the_rest_of_a_page(dtype: torch.dtype) -> None:
    batch = Batch([75], GQA, 40, dtype).store_all()  # the constructor fills the cache with NaN
    found = batch.whole(0)
    clean = KVPages.empty(batch.cache.num_pages, 2, 40, dtype)
    batch.cache, poisoned = clean, batch.cache
    batch.store_all()
    assert torch.equal(batch.whole(0), found)
    assert not torch.equal(poisoned.k, clean.k)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_do_not_depend_on_the_alignment_of_queries(dtype: torch.dtype) -> None:
    batch = Batch([70], [(0, 3), (3, 8)], 24, dtype).store_all()
    expected, aligned = batch.whole(0), batch.q[0]
    for offset in range(1, 5):
        batch.q[0] = torch.zeros(offset + aligned.numel(), dtype=dtype)[offset:].view(aligned.shape).copy_(aligned)
        starts, lengths = torch.tensor([0, 70], dtype=torch.int32), torch.tensor([70], dtype=torch.int32)
        found = attention(batch.q[0], batch.cache, batch.tables, lengths, starts, batch.kv_map, batch.scale)
        assert torch.equal(found, expected)
