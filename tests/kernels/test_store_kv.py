"""Tokens stored in pages, on every rung: each element where the layout of KVPages puts it, and no other is changed."""

import math

import pytest
import torch

from tilerank.kernels import core
from tilerank.kernels.attention import attention, store_kv
from tilerank.kernels.kv_pages import PAGE_TOKENS, KVPages
from tilerank.kernels.reference.ops import quantise_rows

HEADS, PAGES = 3, 24

RUNS = {
    "whole pages": [*range(64, 128)],
    "from inside a page on": [*range(37, 37 + 75)],
    "few, of odd and even places": [33, 34, 35, 36, 47, 48, 90],
    "three runs": [*range(5, 16), *range(161, 190), *range(60, 62)],
    "backwards": [*range(80, 40, -1)],
    "every other": [*range(0, 190, 2)],
    "one": [77],
    "more than a mebibyte of 128 dims": [*range(37, 37 + 700)],
}


@pytest.mark.parametrize("slots", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("d", [8, 40, 72, 128])
@pytest.mark.parametrize("threads", [1, 3])
def test_every_element_is_where_the_layout_says(
    rung: str, slots: list[int], dtype: torch.dtype, d: int, threads: int
) -> None:
    core.start_pool(None, threads, spin=False)
    random = torch.Generator().manual_seed(d)
    # Rows as slices of a fused projection, with other columns between them.
    rows = torch.randn(len(slots), 2 * HEADS + 1, d, generator=random).to(dtype)
    k, v = rows[:, :HEADS], rows[:, HEADS : 2 * HEADS]
    cache = KVPages.empty(PAGES, HEADS, d, dtype)
    cache.k.fill_(7.0)
    cache.v.fill_(7.0)
    store_kv(k, v, cache, torch.tensor(slots))
    core.start_pool(None, 1, spin=False)

    keys, values = by_slot(cache)
    assert torch.equal(keys[slots], k)
    assert torch.equal(values[slots][..., :d], v)
    assert not values[slots][..., d:].any(), "padded dims take part in products"
    others = torch.ones(PAGES * PAGE_TOKENS, dtype=torch.bool)
    others[slots] = False
    assert bool((keys[others] == 7.0).all())
    assert bool((values[others] == 7.0).all())


def by_slot(cache: KVPages) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the contents of the pages, token by token."""
    x = 1 if cache.dtype == torch.float32 else 2
    d = cache.head_dim
    keys = cache.k.view(PAGES, HEADS, PAGE_TOKENS // 16, d // x, 16, x).permute(0, 2, 4, 1, 3, 5)
    values = cache.v.view(PAGES, HEADS, -(-d // 16), PAGE_TOKENS // x, 16, x).permute(0, 3, 5, 1, 2, 4)
    return keys.reshape(PAGES * PAGE_TOKENS, HEADS, d), values.reshape(PAGES * PAGE_TOKENS, HEADS, -1)


@pytest.mark.parametrize("slots", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("d", [8, 40, 72, 128, 256])
def test_every_code_is_where_the_layout_says(rung: str, slots: list[int], dtype: torch.dtype, d: int) -> None:
    random = torch.Generator().manual_seed(d)
    rows = torch.randn(len(slots), 2 * HEADS + 1, d, generator=random).to(dtype)
    rows[0, 0] = 0
    rows[-1, 1, 3] = math.nan  # makes the whole row NaN
    rows[-1, HEADS, 5] = -math.inf
    k, v = rows[:, :HEADS], rows[:, HEADS : 2 * HEADS]
    cache = KVPages.empty(PAGES, HEADS, d, torch.int8)
    assert cache.scales is not None
    for part in (cache.k, cache.v, cache.scales):
        part.fill_(7)
    store_kv(k, v, cache, torch.tensor(slots))

    scales = cache.scales.permute(2, 0, 3, 1).reshape(2, PAGES * PAGE_TOKENS, HEADS)
    others = torch.ones(PAGES * PAGE_TOKENS, dtype=torch.bool)
    others[slots] = False
    for of_slots, of_part, given in zip(by_slot(cache), scales, (k, v), strict=True):
        codes, steps = quantise_rows(given.float().reshape(-1, d))
        assert torch.equal(of_slots[slots][..., :d].reshape(-1, d), codes)
        assert not of_slots[slots][..., d:].any(), "padded dims take part in products"
        torch.testing.assert_close(of_part[slots].flatten(), steps, rtol=0, atol=0, equal_nan=True)
        assert int(steps.isnan().sum()) == 1
        assert bool((of_slots[others] == 7).all())
        assert bool((of_part[others] == 7).all())


@pytest.mark.parametrize("count", [1, 7])
def test_codes_are_rounded_half_to_even(rung: str, count: int) -> None:
    rows = torch.tensor([127, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5, -127]).expand(count, 1, 8)
    cache = KVPages.empty(1, 1, 8, torch.int8)
    store_kv(rows, rows, cache, torch.arange(count))
    keys = cache.k.view(2, 4, 16, 2).permute(0, 2, 1, 3).reshape(PAGE_TOKENS, 8)
    assert keys[:count].tolist() == count * [[127, 0, 2, 2, 0, -2, -126, -127]]
    assert cache.scales is not None
    assert cache.scales[0, 0, :, :count].tolist() == 2 * [count * [1.0]]


def test_a_cache_of_more_than_2_31_elements(rung: str) -> None:
    """Only the pages that are used take memory."""
    heads, d, used = 8, 128, 3
    pages = (1 << 31) // (2 * heads * d * PAGE_TOKENS) + 5
    random = torch.Generator().manual_seed(0)
    tokens = used * PAGE_TOKENS - 5
    k, v = (torch.randn(tokens, heads, d, generator=random).to(torch.bfloat16) for _ in range(2))
    q = torch.randn(2, heads, d, generator=random).to(torch.bfloat16)
    one_to_one = torch.tensor([[head, 1] for head in range(heads)], dtype=torch.int32)
    found = []
    for size, table in ((used, [0, 1, 2]), (pages, [pages - 1, 0, pages - 4])):
        cache = KVPages.empty(size, heads, d, torch.bfloat16)
        slots = (torch.tensor(table)[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS)).flatten()[:tokens]
        store_kv(k, v, cache, slots)
        tables, lengths, starts = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([table], [tokens], [0, 2]))
        found.append(attention(q, cache, tables, lengths, starts, one_to_one, d**-0.5))
    assert torch.equal(*found)
