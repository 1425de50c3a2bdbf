"""Attention over sources with a start and a length of their own, over int8 caches, and over packed sequences."""

import math
from collections.abc import Sequence
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from tilerank.kernels import core
from tilerank.kernels.attention import attention, store_kv
from tilerank.kernels.errors import KernelError
from tilerank.kernels.kv_pages import PAGE_TOKENS, KVPages
from tilerank.kernels.packed_sequences import PackedSequences, attention_varlen
from tilerank.kernels.reference.attention import load_kv

pytestmark = pytest.mark.usefixtures("rung")

DTYPES = [torch.float32, torch.bfloat16]
UNEVEN = [(1, 3), (4, 1), (6, 2)]  # heads 0 and 5 are padding
HEADS = 8


def ints(values: Sequence[int | list[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def exact_rows(q: Tensor, k: Tensor, v: Tensor, kv_map: list[tuple[int, int]], scale: float, causal: bool) -> Tensor:
    """Return attention of rows q over keys k in float64; if causal, the rows are the last tokens."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    if not len(k):
        return out
    hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q) + 1) if causal else None
    for kv_head, (first, count) in enumerate(kv_map):
        for head in range(first, first + count):
            scores = q[:, head].double() @ k[:, kv_head].double().T * scale
            if hidden is not None:
                scores = scores.masked_fill(hidden, -math.inf)
            out[:, head] = scores.softmax(-1) @ v[:, kv_head].double()
    return out


class Sources:
    """Requests whose cached tokens are encoder tokens, then text, in pages of random order."""

    def __init__(self, parts: list[tuple[int, int]], d: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
        random = torch.Generator().manual_seed(11)
        self.parts, self.d, self.dtype, self.scale, self.random = parts, d, dtype, 1 / math.sqrt(d), random
        lengths = [encoder + text for encoder, text in parts]
        self.k, self.v = ([torch.randn(n, 3, d, generator=random).to(dtype) for n in lengths] for _ in range(2))
        pages = [-(-n // PAGE_TOKENS) for n in lengths]
        self.cache = KVPages.empty(sum(pages) + 1, 3, d, cache_dtype)
        if self.cache.scales is not None:
            self.cache.scales.fill_(math.nan)
        else:
            self.cache.k.fill_(math.nan)
            self.cache.v.fill_(math.nan)
        free = torch.randperm(sum(pages) + 1, generator=random).tolist()
        self.tables = torch.full((len(parts), max(pages, default=0) + 1), 10**6, dtype=torch.int32)
        for i, count in enumerate(pages):
            for j in range(count):
                self.tables[i, j] = free.pop()

    def store(self, i: int, start: int, stop: int) -> None:
        positions = torch.arange(start, stop)
        slots = self.tables[i].long()[positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS
        store_kv(self.k[i][start:stop], self.v[i][start:stop], self.cache, slots)

    def attend(self, q: list[Tensor], starts: list[int], lengths: list[int], causal: bool) -> list[Tensor]:
        counts = [len(rows) for rows in q]
        edges = ints([0, *accumulate(counts)])
        kv_map = torch.tensor(UNEVEN, dtype=torch.int32)
        out = attention(
            torch.cat(q),
            self.cache,
            self.tables,
            ints(lengths),
            edges,
            kv_map,
            self.scale,
            causal=causal,
            kv_starts=ints(starts),
        )
        return list(torch.split(out, counts))


def mixed_parts() -> list[tuple[int, int]]:
    random = torch.Generator().manual_seed(3)
    encoder, text = (torch.randint(0, high, (120,), generator=random).tolist() for high in (70, 90))
    return [(0, 1), (0, 40), (31, 5), (32, 64), (33, 300), (300, 33), (7, 1), (64, 1), *zip(encoder, text, strict=True)]


@pytest.mark.parametrize("cache_dtype", ["activations", "int8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_128_requests_attend_to_their_text_or_encoder_tokens(dtype: torch.dtype, cache_dtype: str) -> None:
    sources = Sources(mixed_parts(), 40, dtype, torch.int8 if cache_dtype == "int8" else dtype)
    keys, values = [], []
    for i, (encoder, text) in enumerate(sources.parts):
        sources.store(i, 0, encoder)
        if encoder % 2:  # queries may attend to encoder tokens before there is text
            continue
        sources.store(i, encoder, encoder + text)
    encoders, texts = ([part[j] for part in sources.parts] for j in (0, 1))
    for i, length in enumerate(encoders):
        stored = stored_tokens(sources, i, length)
        keys.append(stored[0])
        values.append(stored[1])
    tolerance = 2e-2 if dtype == torch.bfloat16 else 3e-6
    q = [torch.randn(1 + i % 3, HEADS, 40, generator=sources.random).to(dtype) for i in range(128)]
    found = sources.attend(q, [0] * 128, encoders, causal=False)
    for i in range(128):
        expected = exact_rows(q[i], keys[i], values[i], UNEVEN, sources.scale, causal=False)
        torch.testing.assert_close(found[i].double(), expected, rtol=tolerance, atol=tolerance)
        if encoders[i] == 0:
            assert not found[i].any()
    for i, (encoder, text) in enumerate(sources.parts):
        if encoder % 2:
            sources.store(i, encoder, encoder + text)
    q = [torch.randn(min(1 + i % 40, n), HEADS, 40, generator=sources.random).to(dtype) for i, n in enumerate(texts)]
    found = sources.attend(q, encoders, texts, causal=True)
    for i, (encoder, text) in enumerate(sources.parts):
        k, v = stored_tokens(sources, i, encoder + text)
        expected = exact_rows(q[i], k[encoder:], v[encoder:], UNEVEN, sources.scale, causal=True)
        torch.testing.assert_close(found[i].double(), expected, rtol=tolerance, atol=tolerance)
    # The bits of a request depend neither on other requests nor on the number of its rows in a call.
    for i in (4, 5, 20):
        lengths = [n if j == i else 0 for j, n in enumerate(texts)]
        rows = [part if j == i else part[:0] for j, part in enumerate(q)]
        assert torch.equal(sources.attend(rows, encoders, lengths, causal=True)[i], found[i])
        rows = [part[-1:] if j == i else part[:0] for j, part in enumerate(q)]
        assert torch.equal(sources.attend(rows, encoders, lengths, causal=True)[i], found[i][-1:])


def stored_tokens(sources: Sources, i: int, length: int) -> tuple[Tensor, Tensor]:
    """Return the first tokens as the cache holds them: as given, or dequantised."""
    if sources.cache.dtype != torch.int8:
        return sources.k[i][:length], sources.v[i][:length]
    k, v = load_kv(sources.cache, sources.tables[i, : -(-length // PAGE_TOKENS)].long())
    return k[:length], v[:length]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", [8, 24, 64])
def test_codes_are_the_same_on_every_rung_and_within_half_a_step(dtype: torch.dtype, d: int) -> None:
    sources = Sources([(0, 70)], d, dtype, torch.int8)
    sources.k[0][3] = 0
    sources.store(0, 0, 70)
    rung_codes = sources.cache
    core.force_isa("reference")
    again = Sources([(0, 70)], d, dtype, torch.int8)
    again.k[0][3] = 0
    again.store(0, 0, 70)
    assert again.cache.scales is not None
    assert rung_codes.scales is not None
    assert torch.equal(rung_codes.scales.nan_to_num(7), again.cache.scales.nan_to_num(7))
    assert torch.equal(rung_codes.k, again.cache.k)
    assert torch.equal(rung_codes.v, again.cache.v)
    k, _ = stored_tokens(sources, 0, 70)
    step = sources.k[0].float().abs().amax(-1, keepdim=True) / 127
    assert bool(((k - sources.k[0].float()).abs() <= step * 0.5001).all())


def test_int8_pages_take_a_byte_and_their_scales() -> None:
    layer = KVPages.empty(5, 3, 64, torch.int8)
    assert KVPages.nbytes(5, 3, 64, torch.int8) == 2 * 5 * 3 * PAGE_TOKENS * (64 + 4)
    assert layer.scales is not None
    assert layer.k.nbytes + layer.v.nbytes + layer.scales.nbytes == KVPages.nbytes(5, 3, 64, torch.int8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", [64, 72, 80, 96, 128, 192, 256])
def test_packed_sequences_attend_to_themselves_only(dtype: torch.dtype, d: int) -> None:
    lengths = [1, 70, 0, 33, 130]
    q, k, v = torch.randn(3, sum(lengths), 3, d, generator=torch.Generator().manual_seed(2)).to(dtype)
    cu_seqlens = ints([0, *accumulate(lengths)])
    found = attention_varlen(q, k, v, cu_seqlens, d**-0.5)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 3e-6
    own = [(0, 1), (1, 1), (2, 1)]
    for part_q, part_k, part_v, part in zip(*(x.split(lengths) for x in (q, k, v, found)), strict=True):
        expected = exact_rows(part_q, part_k, part_v, own, d**-0.5, causal=False)
        torch.testing.assert_close(part.double(), expected, rtol=tolerance, atol=tolerance)
    alone = attention_varlen(q[71:104], k[71:104], v[71:104], ints([0, 33]), d**-0.5)
    assert torch.equal(alone, found[71:104])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", [64, 72, 80])
def test_packed_sequences_attend_a_few_rows_at_a_time(dtype: torch.dtype, d: int) -> None:
    lengths = [1, 70, 0, 33, 130]
    q, k, v = torch.randn(3, sum(lengths), 3, d, generator=torch.Generator().manual_seed(5)).to(dtype)
    cu_seqlens = ints([0, *accumulate(lengths)])
    whole = attention_varlen(q, k, v, cu_seqlens, d**-0.5)
    sequences = PackedSequences(cu_seqlens)
    pages = sequences.pages(3, d, dtype)
    for rows in (slice(0, 90), slice(90, 234)):
        store_kv(k[rows], v[rows], pages, sequences.slots[rows])
    own = ints([[0, 1], [1, 1], [2, 1]])
    for size in (1, 31, 32, 71, 234):
        parts = [sequences.attend(q[i : i + size], i, pages, own, d**-0.5) for i in range(0, 234, size)]
        torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=0 if core.isa() != "reference" else 1e-6)


def test_grouped_heads_of_views_of_a_fused_projection() -> None:
    fused = torch.randn(50, 12, 80, generator=torch.Generator().manual_seed(4)).bfloat16()
    q, k, v = torch.split(fused, [6, 3, 3], dim=1)
    found = attention_varlen(q, k, v, ints([0, 20, 50]), 0.1)
    expected = exact_rows(q[20:], k[20:], v[20:], [(0, 2), (2, 2), (4, 2)], 0.1, causal=False)
    torch.testing.assert_close(found[20:].double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("edges", "heads", "sentence"),
    [
        ([0, 3], 2, "cu_seqlens: expected values up to 4, found 3"),
        ([0, 3, 2, 4], 2, "cu_seqlens: expected ascending values from 0, found [0, 3, 2, 4]"),
        ([0, 4], 3, "q: expected a multiple of 2 heads, found 3"),
    ],
)
def test_wrong_packing_is_named(edges: list[int], heads: int, sentence: str) -> None:
    k = torch.zeros(4, 2, 64)
    with pytest.raises(KernelError) as error:
        attention_varlen(torch.zeros(4, heads, 64), k, k, ints(edges), 1.0)
    assert str(error.value) == f"attention_varlen: {sentence}"


def test_a_wrong_number_of_heads_is_named() -> None:
    q = torch.zeros(4, 2, 64)
    with pytest.raises(KernelError, match=r"^attention_varlen: k: expected shape \[4, any, 64\], found \[4, 64\]$"):
        attention_varlen(q, q[:, 0], q[:, 0], ints([0, 4]), 1.0)


def test_a_wrong_start_is_named() -> None:
    sources = Sources([(10, 40)], 16, torch.float32, torch.float32)
    q = [torch.zeros(1, HEADS, 16)]
    with pytest.raises(
        KernelError, match=r"^attention: kv_starts: expected at least 0 tokens before sequence 0, found -1$"
    ):
        sources.attend(q, [-1], [40], causal=True)
    with pytest.raises(KernelError, match=r"^attention: page_tables: expected 4 pages for sequence 0, found 3$"):
        sources.attend(q, [60], [40], causal=True)
