"""Attention over the latent cache, against float64, and the products of single heads."""

import math
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tilerank.kernels import core
from tilerank.kernels.errors import KernelError
from tilerank.kernels.graph import Graph
from tilerank.kernels.kv_pages import PAGE_TOKENS
from tilerank.kernels.latent import join_queries, latent_attention, load_latent, store_latent, weigh_part
from tilerank.kernels.latent_pages import LatentPages

pytestmark = pytest.mark.usefixtures("rung")

CACHES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.int8),
    (torch.bfloat16, torch.int8),
]
Part = tuple[int, int, int]


def ints(*values: int | list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Sequences:
    """Sequences of the given lengths in pages of random order, between pages of NaN."""

    def __init__(
        self,
        lengths: list[int],
        dtype: torch.dtype,
        cache_dtype: torch.dtype,
        heads: int = 5,
        dims: tuple[int, int] = (64, 16),
    ) -> None:
        random = torch.Generator().manual_seed(sum(lengths) + heads)
        self.lengths, self.dtype, self.heads, self.dims = lengths, dtype, heads, dims
        self.scale = 0.7 / math.sqrt(sum(dims))
        self.q = [torch.randn(n, heads, sum(dims) + 8, generator=random).to(dtype) for n in lengths]
        pages = [-(-n // PAGE_TOKENS) for n in lengths]
        self.cache = LatentPages.empty(sum(pages) + 2, *dims, cache_dtype)
        if self.cache.scales is None:
            self.cache.data.fill_(math.nan)
        else:
            self.cache.scales.fill_(math.nan)
        order = torch.split(torch.randperm(sum(pages) + 2, generator=random, dtype=torch.int32), [*pages, 2])
        # Entries past the end of a sequence must not be read, so they are out of range.
        self.tables = torch.full((len(lengths), max(pages) + 1), 10**6, dtype=torch.int32)
        self.keys: list[Tensor] = []
        for table, own, n in zip(self.tables, order, lengths, strict=False):
            table[: len(own)] = own
            latent, rope_key = (torch.randn(n, d, generator=random).to(dtype) for d in dims)
            latent[n // 2 : n // 2 + 1] *= 4  # a late maximum
            slots = (own.long()[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS)).flatten()[:n]
            store_latent(latent, rope_key, self.cache, slots)
            if cache_dtype == torch.int8:
                latent, rope_key = load_latent(self.cache, own, torch.float32)
            self.keys.append(torch.cat([latent, rope_key], dim=1)[:n].double())

    def attend(self, parts: list[Part], *, causal: bool = True, lse: Tensor | None = None) -> list[Tensor]:
        """Compute rows start..stop of sequence i for every part (i, start, stop), in one call."""
        q = torch.cat([self.q[i][start:stop] for i, start, stop in parts])
        lengths = [stop if causal else self.lengths[i] for i, _, stop in parts]
        out = latent_attention(
            q[..., : self.dims[0]],
            q[..., self.dims[0] : sum(self.dims)],
            self.cache,
            self.tables[[i for i, _, _ in parts]],
            ints(*lengths),
            ints(0, *accumulate(stop - start for _, start, stop in parts)),
            self.scale,
            causal=causal,
            lse=lse,
        )
        assert out.dtype == self.dtype
        return list(torch.split(out, [stop - start for _, start, stop in parts]))

    def attend_to_part(self, part: int, parts: int, lse: Tensor) -> Tensor:
        """Compute the last row of every sequence over a part of its pages: the first part of short ones is empty."""
        edges = [
            [-(-n // PAGE_TOKENS) * edge // parts * PAGE_TOKENS for edge in (part, part + 1)] for n in self.lengths
        ]
        q = torch.cat([q[-1:] for q in self.q])
        return latent_attention(
            q[..., : self.dims[0]],
            q[..., self.dims[0] : sum(self.dims)],
            self.cache,
            self.tables,
            ints(*(min(end, n) - first for (first, end), n in zip(edges, self.lengths, strict=True))),
            torch.arange(len(q) + 1, dtype=torch.int32),
            self.scale,
            causal=False,
            lse=lse,
            kv_starts=ints(*(first for first, _ in edges)),
        )

    def whole(self, i: int) -> Tensor:
        return self.attend([(i, 0, self.lengths[i])])[0]

    def exact(self, i: int, *, causal: bool = True, first: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Return the attention of sequence i, from row `first` on, in float64, the tolerance of a rung, and the
        log-sum-exp."""
        keys, n = self.keys[i], self.lengths[i]
        values = keys[:, : self.dims[0]]
        q = self.q[i][first:, :, : sum(self.dims)].double().transpose(0, 1)
        scores = q @ keys.T * self.scale
        if causal:
            scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1)[first:], -math.inf)
        p = scores.softmax(-1)
        out = p @ values
        # fp32: rounding errors of sums grow like the square root of their length; a score is an exponent, so its error
        # is relative. bf16: probabilities and the result are rounded once each.
        size = (q.abs() @ keys.abs().T).amax(-1, keepdim=True) * self.scale
        eps = torch.finfo(torch.float32).eps * (math.sqrt(sum(self.dims)) * (1 + size) + math.sqrt(n) + 8)
        half_ulp = torch.finfo(self.dtype).eps / 2
        of_p = half_ulp if self.dtype == torch.bfloat16 else 0.0
        bound = (eps + of_p) * (p @ values.abs()) + half_ulp * out.abs()
        return out.transpose(0, 1), bound.transpose(0, 1) * 1.01, scores.logsumexp(-1).T


def assert_exact(found: Tensor, sequences: Sequences, i: int, *, causal: bool = True) -> None:
    exact, bound, _ = sequences.exact(i, causal=causal)
    excess = (found.double() - exact).abs() - bound
    assert bool((excess <= 0).all()), f"exceeds the bound by up to {excess.max():g}"


@pytest.mark.parametrize(("dtype", "cache_dtype"), CACHES, ids=str)
@pytest.mark.parametrize("dims", [(32, 8), (64, 64), (96, 24), (128, 16), (512, 64)])
def test_sizes(dtype: torch.dtype, cache_dtype: torch.dtype, dims: tuple[int, int]) -> None:
    sequences = Sequences([45], dtype, cache_dtype, dims=dims)
    assert_exact(sequences.whole(0), sequences, 0)


@pytest.mark.parametrize(("dtype", "cache_dtype"), CACHES, ids=str)
@pytest.mark.parametrize("heads", [1, 2, 16, 22, 128])
def test_numbers_of_heads(dtype: torch.dtype, cache_dtype: torch.dtype, heads: int) -> None:
    sequences = Sequences([37], dtype, cache_dtype, heads, (32, 16))
    assert_exact(sequences.whole(0), sequences, 0)


@pytest.mark.parametrize(("dtype", "cache_dtype"), CACHES, ids=str)
@pytest.mark.parametrize("length", [1, 31, 32, 33, 128, 129, 255, 257, 600])
def test_lengths_around_pages_chunks_and_parts(dtype: torch.dtype, cache_dtype: torch.dtype, length: int) -> None:
    sequences = Sequences([length], dtype, cache_dtype, 2, (32, 8))
    assert_exact(sequences.whole(0), sequences, 0)


@pytest.mark.parametrize(("dtype", "cache_dtype"), CACHES, ids=str)
def test_rows_have_the_same_bits_in_every_batch(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    """Decode, chunks of a prompt and whole prompts, on any number of threads."""
    sequences = Sequences([1, 150, 64, 900], dtype, cache_dtype, 7, (64, 16))
    whole = [sequences.whole(i) for i in range(4)]
    decode = [(i, n - 1, n) for i, n in enumerate(sequences.lengths)]
    chunks = [(3, start, stop) for start, stop in pairwise([0, 7, 33, 256, 300, 513, 899])]
    for threads in (1, 2, 7):
        core.start_pool(None, threads, spin=False)
        for parts in (decode, chunks, [*chunks[::-1], *decode, (1, 20, 20), (2, 0, 64)], [(3, 898, 900)]):
            for (i, start, stop), found in zip(parts, sequences.attend(parts), strict=True):
                assert torch.equal(found, whole[i][start:stop]), f"rows {start} to {stop} of {i}, {threads} threads"


@pytest.mark.parametrize(("dtype", "cache_dtype"), CACHES, ids=str)
def test_any_number_of_rows_has_the_bits_of_one(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    sequences = Sequences([180], dtype, cache_dtype, 1, (32, 8))
    whole = sequences.whole(0)
    for rows in (1, 2, 3, 5, 11, 12, 13, 15, 16, 17, 31, 32, 33, 127, 128, 129):
        [found] = sequences.attend([(0, 180 - rows, 180)])
        assert torch.equal(found, whole[180 - rows :]), f"{rows} rows"


@pytest.mark.parametrize(("dtype", "cache_dtype"), CACHES, ids=str)
def test_parts_of_a_sequence_merge_by_their_log_sum_exp(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    """As ranks that each hold some of the pages merge their results."""
    sequences = Sequences([320], dtype, cache_dtype, 3, (64, 16))
    q = sequences.q[0][-1:]
    lse, parts = torch.full((3, 1, 3), math.nan), []
    for (first, last), of_part in zip(((0, 4), (4, 9), (9, 10)), lse, strict=True):
        table = sequences.tables[:, first:last]
        length = ints((last - first) * PAGE_TOKENS)
        out = latent_attention(
            q[..., :64],
            q[..., 64:80],
            sequences.cache,
            table,
            length,
            ints(0, 1),
            sequences.scale,
            causal=False,
            lse=of_part,
        )
        parts.append(out.double())
    exact, _, exact_lse = sequences.exact(0)
    torch.testing.assert_close(lse.logsumexp(0).double(), exact_lse[-1:], rtol=1e-5, atol=1e-5)
    merged = sum(weight[..., None] * part for weight, part in zip(lse.softmax(0), parts, strict=True))
    tolerance = 1e-2 if dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(merged, exact[-1:], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "cache_dtype"), CACHES, ids=str)
def test_without_a_causal_mask_every_row_attends_to_all_tokens(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    sequences = Sequences([90, 1], dtype, cache_dtype)
    lse = torch.full((21, 5), math.nan)
    found = sequences.attend([(0, 30, 50), (1, 0, 1)], causal=False, lse=lse)
    for i, part in enumerate(found):
        rows = slice(30, 50) if i == 0 else slice(0, 1)
        exact, bound, exact_lse = sequences.exact(i, causal=False)
        assert bool(((part.double() - exact[rows]).abs() <= bound[rows]).all())
        torch.testing.assert_close(lse[:20] if i == 0 else lse[20:], exact_lse[rows].float(), rtol=1e-5, atol=1e-5)
    q = sequences.q[0]
    nothing = latent_attention(
        q[:3, :, :64],
        q[:3, :, 64:80],
        sequences.cache,
        sequences.tables[:1],
        ints(0),
        ints(0, 3),
        1.0,
        causal=False,
        lse=lse[:3],
    )
    assert not nothing.any()
    assert bool((lse[:3] == -math.inf).all())


@pytest.mark.parametrize(("dtype", "cache_dtype"), CACHES, ids=str)
@pytest.mark.parametrize("parts", [2, 3])
def test_weighed_parts_add_up(dtype: torch.dtype, cache_dtype: torch.dtype, parts: int) -> None:
    """Queries of several ranks, gathered, over parts of contexts, of which some are empty."""
    sequences = Sequences([1, 32, 40, 129, 700], dtype, cache_dtype, 18, (64, 16))
    q = torch.cat([q[-1:] for q in sequences.q])
    joined = join_queries(q[:, :11, :64], q[:, :11, 64:80], 12)
    assert joined.shape == (5, 12, 80) and joined.is_contiguous()
    assert torch.equal(joined[:, :11], q[:, :11, :80])
    lse = torch.empty(parts, 5, 18)
    found = [sequences.attend_to_part(part, parts, lse[part]) for part in range(parts)]
    weighed = [weigh_part(part, lse, i) for i, part in enumerate(found)]
    assert all(part.is_contiguous() and part.dtype == dtype for part in weighed)
    assert torch.equal(weigh_part(found[1][3:4, 5:9], lse[:, 3:4, 5:9].contiguous(), 1), weighed[1][3:4, 5:9])
    for i in range(5):
        exact, bound, wanted_lse = sequences.exact(i, first=sequences.lengths[i] - 1)
        merged = sum(part[i].double() for part in weighed)
        # In bf16 a part is rounded before and after it is weighed.
        rounding = torch.finfo(dtype).eps * sum(part[i].double().abs() for part in weighed)
        assert bool(((merged - exact[-1]).abs() <= 2 * bound[-1] + rounding).all()), i
        torch.testing.assert_close(lse[:, i].logsumexp(0).double(), wanted_lse[-1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_non_finite_row_does_not_affect_other_rows(dtype: torch.dtype) -> None:
    sequences = Sequences([70], dtype, dtype)
    whole = sequences.whole(0)
    sequences.q[0][60, 1] = math.nan
    found = sequences.whole(0)
    assert bool(found[60, 1].isnan().all())
    found[60, 1] = whole[60, 1]
    assert torch.equal(found, whole)


def test_a_step_is_recorded(rung: str) -> None:
    if rung == "reference":
        pytest.skip("it has no launches to record")
    sequences = Sequences([70], torch.bfloat16, torch.bfloat16)
    whole = sequences.whole(0)
    arguments = (sequences.cache, sequences.tables, ints(70), ints(0, 70), sequences.scale)
    q = sequences.q[0]
    graph = Graph(lambda: latent_attention(q[..., :64], q[..., 64:80], *arguments))
    assert torch.equal(graph.run(), whole)


def call(**changes: Tensor) -> Tensor:
    """A valid call of two sequences (3 new of 40 tokens, 1 of 1), with one argument replaced."""
    arguments: dict[str, Any] = {
        "q_latent": torch.zeros(4, 6, 32),
        "q_rope": torch.zeros(4, 6, 8),
        "page_tables": ints([0, 1], [2, 99]),
        "seq_lens": ints(40, 1),
        "query_starts": ints(0, 3, 4),
    }
    arguments.update(changes)
    return latent_attention(cache=LatentPages.empty(3, 32, 8, torch.float32), scale=1.0, **arguments)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"q_latent": torch.zeros(4, 6, 40)}, "q_latent: expected shape [any, any, 32], found [4, 6, 40]"),
        ({"q_latent": torch.zeros(4, 32)}, "q_latent: expected shape [any, any, 32], found [4, 32]"),
        ({"q_rope": torch.zeros(4, 5, 8)}, "q_rope: expected shape [4, 6, 8], found [4, 5, 8]"),
        ({"q_rope": torch.zeros(4, 6, 8).bfloat16()}, "q_rope: expected dtype float32, found bfloat16"),
        ({"query_starts": ints(0, 3, 5)}, "query_starts: expected 0 to 4, found 0 to 5"),
        ({"query_starts": ints(0, 2, 4)}, "query_starts: expected 0 to 1 queries of sequence 1, found 2"),
        ({"seq_lens": ints(40, -1)}, "seq_lens: expected at least 0 tokens of sequence 1, found -1"),
        ({"kv_starts": ints(0, 16)}, "kv_starts: expected a multiple of 32 for sequence 1, found 16"),
        ({"lse": torch.zeros(4, 5)}, "lse: expected shape [4, 6], found [4, 5]"),
        ({"page_tables": ints([0], [2])}, "page_tables: expected 2 pages for sequence 0, found 1"),
        ({"page_tables": ints([0, 3], [2, 99])}, "page_tables: expected pages in [0, 3) for sequence 0, found 3"),
        ({"page_tables": ints([0, -1], [2, 99])}, "page_tables: expected pages in [0, 3) for sequence 0, found -1"),
    ],
)
def test_a_wrong_argument_is_named(changes: dict[str, Tensor], sentence: str) -> None:
    assert call().shape == (4, 6, 32)
    with pytest.raises(KernelError) as error:
        call(**changes)
    assert str(error.value) == f"latent_attention: {sentence}"
