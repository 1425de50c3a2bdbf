"""Tokens put into pages, on every rung: each element where the layout of KVLayer says, and nothing else touched."""

import pytest
import torch

from tilerank.kernels import core
from tilerank.kernels.attention import KV_BLOCK, KVLayer, store_kv

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
    # Rows as a fused projection leaves them: apart, with other columns between.
    rows = torch.randn(len(slots), 2 * HEADS + 1, d, generator=random).to(dtype)
    k, v = rows[:, :HEADS], rows[:, HEADS : 2 * HEADS]
    cache = KVLayer.empty(PAGES, HEADS, d, dtype)
    cache.k.fill_(7.0)
    cache.v.fill_(7.0)
    store_kv(k, v, cache, torch.tensor(slots))
    core.start_pool(None, 1, spin=False)

    x = 4 // dtype.itemsize
    keys = cache.k.view(PAGES, HEADS, KV_BLOCK // 16, d // x, 16, x).permute(0, 2, 4, 1, 3, 5)
    keys = keys.reshape(PAGES * KV_BLOCK, HEADS, d)
    values = cache.v.view(PAGES, HEADS, -(-d // 16), KV_BLOCK // x, 16, x).permute(0, 3, 5, 1, 2, 4)
    values = values.reshape(PAGES * KV_BLOCK, HEADS, -1)
    assert torch.equal(keys[slots], k)
    assert torch.equal(values[slots][..., :d], v)
    assert not values[slots][..., d:].any(), "padded dims take part in products"
    others = torch.ones(PAGES * KV_BLOCK, dtype=torch.bool)
    others[slots] = False
    assert bool((keys[others] == 7.0).all())
    assert bool((values[others] == 7.0).all())
