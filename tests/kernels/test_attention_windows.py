"""Attention with a window, sinks, soft caps and rows that attend to later tokens: against float64, and its bits."""

import math
from itertools import pairwise

import pytest
import torch
from attention_batch import DTYPES, GQA, UNEVEN, Batch, assert_exact
from torch import Tensor

from tilerank.kernels import core
from tilerank.kernels.attention import attention, store_kv
from tilerank.kernels.errors import KernelError
from tilerank.kernels.kv_pages import PAGE_TOKENS, KVPages
from tilerank.kernels.reference.attention import load_kv

pytestmark = pytest.mark.usefixtures("rung")


def forget_slid_out_pages(batch: Batch, i: int, position: int) -> None:
    """Overwrite what lies before the window of this row: page numbers, and the pages themselves with NaN."""
    count = max(0, position + 1 - batch.window) // PAGE_TOKENS
    pages = batch.tables[i, :count].long()
    batch.cache.k[pages], batch.cache.v[pages] = math.nan, math.nan
    batch.tables[i, :count] = 10**6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [1, 2, 31, 32, 33, 128])
def test_windows_around_pages_lengths_and_chunks(dtype: torch.dtype, window: int) -> None:
    lengths = [max(window - 1, 1), window, window + 1, 2 * window + 3]
    batch = Batch(lengths, UNEVEN, 24, dtype)
    batch.window, batch.sinks = window, torch.randn(batch.q_heads, generator=batch.random)
    batch.store_all()
    whole = batch.attend([(i, 0, n) for i, n in enumerate(lengths)])
    for i, n in enumerate(lengths):
        assert_exact(whole[i], batch, i)
        edges = sorted({0, n // 3, n // 3 + 1, max(0, n - window // 2 - 1), n})
        parts = batch.attend([(i, start, stop) for start, stop in pairwise(edges)])
        assert torch.equal(torch.cat(parts), whole[i])
    # Decode across the window; what slid out is gone.
    for position in (window - 1, window, window + 1, 2 * window + 2):
        forget_slid_out_pages(batch, 3, position)
        [found] = batch.attend([(3, position, position + 1)])
        assert torch.equal(found[0], whole[3][position])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [300, 2**31 - 1])
def test_a_window_larger_than_the_context_has_the_bits_of_none(dtype: torch.dtype, window: int) -> None:
    batch = Batch([300, 40], GQA, 40, dtype).store_all()
    parts = [(0, 0, 170), (0, 170, 300), (1, 39, 40)]
    expected = batch.attend(parts)
    batch.window = window
    assert all(torch.equal(a, b) for a, b in zip(batch.attend(parts), expected, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [1, 2, 8])
def test_decode_of_joined_heads_with_a_window_has_the_bits_of_prefill(dtype: torch.dtype, heads: int) -> None:
    lengths = [70, 1, 256, 301, 48]
    batch = Batch(lengths, [(heads * head, heads) for head in range(4)], 64, dtype)
    batch.window, batch.sinks = 70, torch.linspace(-2, 9, batch.q_heads)
    batch.store_all()
    whole = [batch.whole(i) for i in range(len(lengths))]
    for i in range(len(lengths)):
        assert_exact(whole[i], batch, i)
        forget_slid_out_pages(batch, i, lengths[i] - 1)
    for threads in (1, 2, 7):
        core.start_pool(None, threads, spin=False)
        found = batch.attend([(i, n - 1, n) for i, n in enumerate(lengths)])
        assert all(torch.equal(a[0], b[-1]) for a, b in zip(found, whole, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [0.1, -2.0])
def test_sinks_and_soft_caps_of_full_attention(dtype: torch.dtype, scale: float) -> None:
    batch = Batch([75, 130], UNEVEN, 64, dtype)
    batch.scale, batch.softcap = scale, 5.0
    batch.sinks = torch.tensor([0.5, -1, 3, 20, -80, 0.1, 6, 2, 1])
    batch.store_all()
    lse = torch.zeros(130, batch.q_heads)
    arguments = batch.q[1], batch.cache, batch.tables[1:], ints(130), ints(0, 130), batch.kv_map, scale
    found = attention(*arguments, lse=lse, sinks=batch.sinks, softcap=5.0)
    assert_exact(found, batch, 1)
    assert_exact(batch.whole(0), batch, 0)
    scores = 5 * torch.tanh(batch.q[1][-1, 1].double() @ batch.k[1][:, 0].double().T * scale / 5)
    expected = torch.cat([scores, batch.sinks[1:2].double()]).logsumexp(0)
    torch.testing.assert_close(lse[-1, 1].double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(batch.attend([(1, 60, 61)])[0][0], found[60])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [0, 33, 100])
def test_pictures_are_seen_by_all_their_tokens(dtype: torch.dtype, window: int) -> None:
    n, pictures = 290, [range(3, 40), range(64, 160), range(161, 162), range(200, 230)]
    batch = Batch([n, 45], GQA, 40, dtype)
    batch.window, batch.sinks = window, torch.ones(batch.q_heads)
    ends = list(range(1, n + 1))
    for picture in pictures:
        ends[picture.start : picture.stop] = [picture.stop] * len(picture)
    batch.ends = [ends, ends[:3] + [40] * 37 + ends[40:45]]
    batch.store_all()
    whole = batch.attend([(0, 0, n), (1, 0, 45)])
    for i in (0, 1):
        assert_exact(whole[i], batch, i)
    for edges in ([0, 1, 40, 162, n], [0, 63, 160, 170, 235, n]):
        parts = batch.attend([(0, start, stop) for start, stop in pairwise(edges)])
        assert torch.equal(torch.cat(parts), whole[0])
    for position in (0, 1, 45, 170, n - 1):
        [found] = batch.attend([(0, position, position + 1)])
        assert torch.equal(found[0], whole[0][position])


CACHES = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.int8)]


@pytest.mark.parametrize(("dtype", "cache_dtype"), CACHES, ids=str)
@pytest.mark.parametrize("window", [90, 2100])
def test_windows_across_the_parts_of_a_long_sequence(dtype: torch.dtype, cache_dtype: torch.dtype, window: int) -> None:
    length, heads, d = 4300, 4, 24
    random = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(length, n, d, generator=random).to(dtype) for n in (heads, 1, 1))
    for position in (5, 1990, 2047, 2050, 4097):
        k[position] *= 3 + position / 1000
    cache = KVPages.empty(-(-length // PAGE_TOKENS), 1, d, cache_dtype)
    store_kv(k, v, cache, torch.arange(length))
    keys, values = (x[:length, 0].double() for x in load_kv(cache, torch.arange(cache.num_pages)))
    sinks = torch.tensor([2.0, 0.0, -3.0, 8.0])

    def rows(start: int, stop: int, threads: int = 1) -> Tensor:
        core.start_pool(None, threads, spin=False)
        table = torch.arange(cache.num_pages, dtype=torch.int32)[None].clone()
        table[:, : max(0, start + 1 - window) // PAGE_TOKENS] = -1
        arguments = q[start:stop], cache, table, ints(stop), ints(0, stop - start), ints([0, heads]), 0.2
        return attention(*arguments, window=window, sinks=sinks)

    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    for start, stop in ((2030, 2180), (4090, 4110), (4170, 4300)):
        found = rows(start, stop)
        for threads in (2, 5):
            assert torch.equal(rows(start, stop, threads), found)
        for row in (start, 2047, 2048, 2137, 2138, 4100, stop - 1):
            if start <= row < stop:
                assert torch.equal(rows(row, row + 1, threads=3)[0], found[row - start]), f"row {row}"
                seen = slice(max(0, row + 1 - window), row + 1)
                scores = torch.cat([q[row].double() @ keys[seen].T * 0.2, sinks[:, None].double()], dim=1)
                exact = scores.softmax(-1)[:, :-1] @ values[seen]
                torch.testing.assert_close(found[row - start].double(), exact, rtol=tolerance, atol=tolerance)


def ints(*values: int | list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"window": -1}, "window: expected at least 0 tokens, found -1"),
        ({"softcap": -1.0}, "softcap: expected a cap >= 0, found -1.0"),
        ({"softcap": math.nan}, "softcap: expected a cap >= 0, found nan"),
        (
            {"window": 5, "causal": False},
            "causal: expected True beside a window, sinks or visible tokens, found False",
        ),
        ({"sinks": torch.zeros(6)}, "sinks: expected shape [7], found [6]"),
        ({"visible": ints(38, 39)}, "visible: expected shape [3], found [2]"),
        ({"visible": ints(37, 39, 40)}, "visible: expected 38 to 40 for row 0, found 37"),
        ({"visible": ints(40, 39, 40)}, "visible: expected 40 to 40 for row 1, found 39"),
        ({"visible": ints(38, 39, 41)}, "visible: expected 40 to 40 for row 2, found 41"),
    ],
)
def test_a_wrong_argument_is_named(options: dict[str, object], sentence: str) -> None:
    batch = Batch([40], GQA, 16, torch.float32).store_all()
    with pytest.raises(KernelError) as error:
        attention(batch.q[0][:3], batch.cache, batch.tables, ints(40), ints(0, 3), batch.kv_map, 1.0, **options)  # type: ignore[arg-type]
    assert str(error.value) == f"attention: {sentence}"
