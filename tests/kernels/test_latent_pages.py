"""Rows of the latent cache, and attention over keys and values expanded from them."""

import math

import pytest
import torch
from torch import Tensor

from tilerank.kernels import core
from tilerank.kernels.attention import attention
from tilerank.kernels.errors import KernelError
from tilerank.kernels.kv_pages import PAGE_TOKENS
from tilerank.kernels.latent import expanded_pages, load_latent, store_latent
from tilerank.kernels.latent_pages import LatentPages

pytestmark = pytest.mark.usefixtures("rung")

DTYPES = [torch.float32, torch.bfloat16]
SIZES = [(32, 8), (96, 24), (128, 16), (512, 64)]


def ints(*values: int | list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def rows(n: int, dims: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return rows in wider ones, of magnitudes that differ from row to row."""
    wide = torch.randn(n, dims + 8, generator=torch.Generator().manual_seed(seed)) * (1 + torch.arange(n))[:, None]
    return wide.to(dtype)[:, 8:]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("latent_dim", "rope_dim"), SIZES)
def test_rows_are_loaded_as_they_were_stored(dtype: torch.dtype, latent_dim: int, rope_dim: int) -> None:
    cache = LatentPages.empty(4, latent_dim, rope_dim, dtype)
    cache.data.fill_(math.nan)
    slots = torch.tensor([127, 3, 64, 65, 66, 0, 40])
    latent, rope_key = rows(7, latent_dim, dtype), rows(7, rope_dim, dtype, 1)
    store_latent(latent, rope_key, cache, slots)
    found, found_rope = load_latent(cache, ints(3, 0, 2, 1, 0), dtype)
    assert found.shape == (5 * PAGE_TOKENS, latent_dim)
    assert found_rope.shape == (5 * PAGE_TOKENS, rope_dim)
    # Slots of page 3 come first, then those of pages 0, 2, 1 and 0 again.
    at = torch.tensor([31, 35, 64, 65, 66, 32, 104])
    assert torch.equal(found[at], latent)
    assert torch.equal(found_rope[at], rope_key)
    assert torch.equal(found[128 + 3], latent[1])
    assert int(found[:128].isnan().all(1).sum()) == 128 - 7
    assert not cache.data[3, 31].isnan().any()  # the padding of a row is written as well


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("latent_dim", "rope_dim"), SIZES)
def test_int8_rows_have_two_scales(dtype: torch.dtype, latent_dim: int, rope_dim: int) -> None:
    cache = LatentPages.empty(2, latent_dim, rope_dim, torch.int8)
    latent, rope_key = rows(5, latent_dim, dtype), rows(5, rope_dim, dtype, 1) * 16
    latent[2] = 0
    store_latent(latent, rope_key, cache, torch.arange(30, 35))
    assert cache.scales is not None
    found = load_latent(cache, ints(0, 1), torch.float32)
    for part, given in enumerate((latent.double(), rope_key.double())):
        scales = cache.scales[:, part].flatten()[30:35].double()
        largest = given.abs().amax(1)
        torch.testing.assert_close(scales[largest > 0], largest[largest > 0] / 127, rtol=1e-6, atol=0)
        error = (found[part][30:35].double() - given).abs()
        assert bool((error <= scales[:, None] * 0.5001).all())
    assert not found[0][32].any()
    rounded = load_latent(cache, ints(0, 1), torch.bfloat16)
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(rounded, found, strict=True))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8], ids=str)
def test_rows_written_on_one_rung_serve_every_other(dtype: torch.dtype) -> None:
    caches = [LatentPages.empty(2, 96, 24, dtype) for _ in range(2)]
    given = torch.bfloat16 if dtype == torch.int8 else dtype
    for cache in caches:
        store_latent(rows(40, 96, given), rows(40, 24, given, 1), cache, torch.arange(40))
        core.force_isa("reference")
    assert torch.equal(caches[0].data, caches[1].data)
    if dtype == torch.int8:
        assert caches[0].scales is not None
        assert caches[1].scales is not None
        assert torch.equal(caches[0].scales, caches[1].scales)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8], ids=str)
@pytest.mark.parametrize(("latent_dim", "rope_dim", "width"), [(32, 8, 64), (128, 16, 160), (512, 64, 576)])
def test_nbytes_of_latent_pages(dtype: torch.dtype, latent_dim: int, rope_dim: int, width: int) -> None:
    cache = LatentPages.empty(5, latent_dim, rope_dim, dtype)
    size = LatentPages.nbytes(5, latent_dim, rope_dim, dtype)
    assert size == 5 * PAGE_TOKENS * (width + 8 if dtype == torch.int8 else width * dtype.itemsize)
    assert size == cache.data.nbytes + (0 if cache.scales is None else cache.scales.nbytes)
    assert not cache.data.any()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((1, 40, 8, torch.float32), "latent_dim: expected a multiple of 32 up to 512, found 40"),
        ((1, 544, 8, torch.float32), "latent_dim: expected a multiple of 32 up to 512, found 544"),
        ((1, 32, 72, torch.float32), "rope_dim: expected a multiple of 8 up to 64, found 72"),
        ((1, 32, 8, torch.float16), "dtype: expected float32, bfloat16 or int8, found float16"),
        ((0, 32, 8, torch.float32), "num_pages: expected at least 1, found 0"),
    ],
)
def test_wrong_sizes_of_latent_pages_are_refused(arguments: tuple[int, int, int, torch.dtype], sentence: str) -> None:
    for make in (LatentPages.empty, LatentPages.nbytes):
        with pytest.raises(KernelError) as error:
            make(*arguments)
        assert str(error.value) == f"LatentPages: {sentence}"


def test_wrong_arguments_are_named_and_nothing_is_written() -> None:
    cache = LatentPages.empty(3, 32, 8, torch.float32)
    latent, rope_key = torch.ones(40, 32), torch.ones(40, 8)
    slots = torch.arange(40)
    for wrong in (-1, 96, 2**40):
        slots[-1] = wrong
        with pytest.raises(KernelError, match=rf"^store_latent: slots: expected values in \[0, 96\), found {wrong}$"):
            store_latent(latent, rope_key, cache, slots)
    assert not cache.data.any()
    with pytest.raises(KernelError, match=r"^store_latent: rope_key: expected shape \[40, 8\], found \[40, 32\]$"):
        store_latent(latent, latent, cache, slots)
    with pytest.raises(KernelError, match=r"^store_latent: rope_key: expected dtype float32, found bfloat16$"):
        store_latent(latent, rope_key.bfloat16(), cache, slots)
    for page in (-1, 3):
        with pytest.raises(KernelError, match=rf"^load_latent: pages: expected values in \[0, 3\), found {page}$"):
            load_latent(cache, ints(0, page), torch.float32)
    with pytest.raises(KernelError, match=r"^load_latent: dtype: expected float32, found bfloat16$"):
        load_latent(cache, ints(0), torch.bfloat16)
    with pytest.raises(KernelError, match=r"^expanded_pages: rope_key: expected shape \[40, any\], found \[39, 8\]$"):
        expanded_pages(torch.zeros(40, 2, 8), torch.zeros(40, 2, 8), rope_key[:39])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("nope", "rope_dim", "value_dim"),
    [(128, 64, 128), (32, 16, 32), (8, 16, 40), (40, 8, 8), (8, 8, 256), (200, 56, 16)],
)
def test_expanded_attention(dtype: torch.dtype, nope: int, rope_dim: int, value_dim: int) -> None:
    """Two sequences of 37 and 140 tokens, of which the last 20 and 135 are queries."""
    random = torch.Generator().manual_seed(nope)
    heads, lengths, queries = 3, [37, 140], [20, 135]
    starts = [0, 64]  # the first slot of each sequence
    scale = 0.7 / math.sqrt(nope + rope_dim)
    fused = torch.randn(64 + 160, heads, nope + value_dim, generator=random).to(dtype)
    rope_key = torch.randn(64 + 160, rope_dim, generator=random).to(dtype)
    fused[37:64] = math.nan
    rope_key[64 + 140 :] = math.nan
    k, v = fused[..., :nope], fused[..., nope:]
    q = torch.randn(sum(queries), heads, nope + rope_dim, generator=random).to(dtype)
    kv_map = ints([0, 1], [1, 1], [2, 1])
    lse = torch.zeros(sum(queries), heads)

    def attend(rows: list[int], lse: Tensor | None = None) -> Tensor:
        """Attend with the first so many of the queries of both."""
        cache = expanded_pages(k, v, rope_key)
        assert (cache.num_pages, cache.kv_heads, cache.head_dim, cache.value_dim) == (7, 3, nope + rope_dim, value_dim)
        chosen = torch.cat([part[:n] for part, n in zip(torch.split(q, queries), rows, strict=True)])
        seen = [length - of + n for length, of, n in zip(lengths, queries, rows, strict=True)]
        tables = ints([0, 1, -1, -1, -1], [2, 3, 4, 5, 6])
        return attention(chosen, cache, tables, ints(*seen), ints(0, rows[0], sum(rows)), kv_map, scale, lse=lse)

    found = attend(queries, lse)
    assert found.shape == (sum(queries), heads, value_dim)
    half_ulp = torch.finfo(dtype).eps / 2
    for length, count, first, part, of_rows, rows_of in zip(
        lengths, queries, starts, *(torch.split(x, queries) for x in (found, lse, q)), strict=True
    ):
        keys = torch.cat([k, rope_key[:, None].expand(-1, heads, -1)], dim=2)[first : first + length].double()
        values = v[first : first + length].double()
        scores = torch.einsum("rhd,thd->hrt", rows_of.double(), keys) * scale
        scores.masked_fill_(torch.ones(count, length, dtype=torch.bool).triu(length - count + 1), -math.inf)
        exact = torch.einsum("hrt,thd->rhd", scores.softmax(-1), values)
        size = torch.einsum("hrt,thd->rhd", scores.softmax(-1), values.abs())
        # bf16: probabilities and the result are rounded once each; fp32: sums of at most 256 and 140 products.
        bound = (half_ulp if dtype == torch.bfloat16 else 4e-6) * (size + exact.abs()) * 1.05
        assert bool(((part.double() - exact).abs() <= bound).all())
        torch.testing.assert_close(of_rows.double(), scores.logsumexp(-1).T, rtol=1e-5, atol=1e-5)
    for few in ([1, 1], [5, 0], [3, 70]):
        again = attend(few)
        assert torch.equal(again[: few[0]], found[: few[0]])
        assert torch.equal(again[few[0] :], found[queries[0] : queries[0] + few[1]])


@pytest.mark.parametrize("tokens", [1, 3, 33])
def test_few_tokens_of_many_rows_are_stored_alike(tokens: int) -> None:
    """Rows of neighbouring tokens are stored together, single ones alone."""
    k, v = torch.randn(2, 33, 2, 24, generator=torch.Generator().manual_seed(3)).bfloat16()
    rope_key = torch.randn(33, 8, generator=torch.Generator().manual_seed(4)).bfloat16()
    q = torch.randn(1, 2, 32, generator=torch.Generator().manual_seed(5)).bfloat16()
    kv_map, table = ints([0, 1], [1, 1]), ints([0, 1])
    found = [
        attention(q, expanded_pages(k[:n], v[:n], rope_key[:n]), table, ints(tokens), ints(0, 1), kv_map, 0.1)
        for n in (tokens, 33)
    ]
    assert torch.equal(*found)
