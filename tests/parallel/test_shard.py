"""How dimensions are cut: the published figures, hand-made cases, and properties over TP 1..8."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilerank.parallel.errors import ShardError
from tilerank.parallel.shard import Cut, Span, Strategy, cut_even_padded, cut_heads, cut_uneven

sizes = st.integers(1, 3000)
ranks = st.integers(1, 8)
units = st.sampled_from([1, 2, 16, 32, 64, 128])


def lengths(cut: Cut) -> list[int]:
    return [span.real for span in cut.spans]


def covered(spans: Sequence[Span], total: int) -> None:
    """Assert that the spans hold every item once, in order."""
    assert [item for span in spans for item in range(span.start, span.stop)] == list(range(total))


# Slowest rank relative to a perfect split: (q heads, KV heads, head size, hidden size), TP -> padding, then the best
# cut at 0, 8 k and 64 k cached tokens. Hidden sizes are those of the public checkpoints.
LLAMA, QWEN30, QWEN235, QWEN9, QWEN35 = (
    (32, 8, 128, 4096),
    (32, 4, 128, 2048),
    (64, 4, 128, 4096),
    (16, 4, 256, 4096),
    (16, 2, 256, 2048),
)
FIGURES = [
    (LLAMA, 3, 1.12, (1.05, 1.12, 1.12)),
    (LLAMA, 6, 1.50, (1.20, 1.29, 1.43)),
    (QWEN30, 3, 1.50, (1.08, 1.21, 1.41)),
    (QWEN30, 6, 1.50, (1.17, 1.38, 1.50)),
    (QWEN235, 6, 1.50, (1.06, 1.18, 1.50)),
    (QWEN9, 3, 1.50, (1.20, 1.29, 1.43)),
    (QWEN35, 3, 1.50, (1.17, 1.38, 1.50)),
    (QWEN35, 6, 3.00, (1.33, 1.85, 2.63)),
]


@pytest.mark.parametrize(("model", "tp", "padding", "best"), FIGURES)
def test_published_figures(
    model: tuple[int, int, int, int], tp: int, padding: float, best: tuple[float, float, float]
) -> None:
    for tokens, figure in zip((0, 8 * 1024, 64 * 1024), best, strict=True):
        auto = cut_heads(*model, tp, cached_tokens=tokens)
        pad = cut_heads(*model, tp, strategy="pad", cached_tokens=tokens)
        assert 1 + auto.waste == pytest.approx(figure, abs=0.0051)
        assert 1 + pad.waste == pytest.approx(padding, abs=0.0051)
        assert auto.other_waste is not None and auto.waste <= auto.other_waste


def test_ties_go_to_padding() -> None:
    tied = cut_heads(*LLAMA, 3, cached_tokens=8 * 1024)
    assert (tied.strategy, tied.waste) == ("pad", tied.other_waste)
    assert cut_heads(*LLAMA, 4).strategy == "pad"


def test_padded_heads_by_hand() -> None:
    cut = cut_heads(8, 2, 32, 128, 3, strategy="pad")
    assert cut.kv == (Span(0, 1, 1), Span(1, 2, 1), Span(2, 2, 1))
    assert cut.q == (Span(0, 4, 4), Span(4, 8, 4), Span(8, 8, 4))
    assert cut.kv_map == (((0, 4),), ((0, 4),), ((0, 4),))
    assert cut.waste == 0.5


def test_split_heads_by_hand() -> None:
    """8 query heads on 2 KV heads over 3 ranks: the middle rank holds both KV heads, all read 4 heads."""
    cut = cut_heads(8, 2, 32, 128, 3)
    assert cut.strategy == "split"
    assert cut.q == (Span(0, 3, 3), Span(3, 5, 2), Span(5, 8, 3))
    assert cut.kv == (Span(0, 1, 1), Span(0, 2, 2), Span(1, 2, 1))
    assert cut.kv_map == (((0, 3),), ((0, 1), (1, 1)), ((0, 3),))
    assert cut.waste == pytest.approx(4 / (10 / 3) - 1)
    assert cut.other_waste == pytest.approx(5 / (10 / 3) - 1)


def test_kv_heads_are_doubled_only_where_it_helps() -> None:
    """16 query heads on 4 KV heads over 3 ranks: 5-6-5 would be even. A rank with 4 + 1 and two with 6 + 2 are as fast
    as any cut that holds more KV heads twice."""
    cut = cut_heads(16, 4, 256, 4096, 3)
    assert sorted(span.real for span in cut.q) == [4, 6, 6]
    assert sum(span.real for span in cut.kv) == 5


def test_border_kv_head_lives_on_both_sides() -> None:
    cut = cut_heads(12, 3, 64, 768, 2, strategy="split")
    assert cut.q == (Span(0, 6, 6), Span(6, 12, 6))
    assert cut.kv == (Span(0, 2, 2), Span(1, 3, 2))
    assert cut.kv_map == (((0, 4), (4, 2)), ((0, 2), (2, 4)))


def test_absurd_head_counts_take_no_time() -> None:
    """A hostile config may have any number of heads."""
    cut = cut_heads(1 << 14, 1, 64, 1 << 16, 7, cached_tokens=10**15)
    assert cut.waste == pytest.approx(6, abs=1e-4)  # there is only the cache of one KV head, and all ranks read it
    assert max(span.real for span in cut_heads(1 << 14, 1, 64, 1 << 16, 7).q) == 2341


def test_padding_to_a_larger_multiple() -> None:
    cut = cut_heads(32, 4, 64, 2048, 3, strategy="pad", head_multiple=6)
    assert [span.size for span in cut.kv] == [2, 2, 2]
    assert [span.size for span in cut.q] == [16, 16, 16]
    assert cut_heads(32, 4, 64, 2048, 3, head_multiple=6).strategy == "pad"


@pytest.mark.parametrize(
    ("arguments", "keywords", "message"),
    [
        ((32, 4, 64, 2048, 3), {"strategy": "split", "head_multiple": 6}, "each rank needs a multiple of 2 heads"),
        ((32, 4, 64, 2048, 3), {"head_multiple": 4}, "multiple of 4, which is no multiple of 3 ranks"),
        ((7, 2, 64, 2048, 3), {}, "7 query heads cannot share 2 KV heads equally"),
        ((8, 2, 64, 2048, 0), {}, "over 0 ranks"),
    ],
)
def test_what_cannot_be_cut(arguments: tuple[int, int, int, int, int], keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ShardError, match=message):
        cut_heads(*arguments, **keywords)


def test_more_ranks_than_query_heads() -> None:
    """4 query heads on 2 KV heads over 6 ranks: one each and two idle ranks; padding would give every rank two."""
    split = cut_heads(4, 2, 32, 128, 6)
    assert split.strategy == "split"
    assert [span.real for span in split.q] == [1, 1, 1, 1, 0, 0]
    assert split.kv == (Span(0, 1, 1), Span(0, 1, 1), Span(1, 2, 1), Span(1, 2, 1), Span(2, 2, 1), Span(2, 2, 1))
    assert split.kv_map == (((0, 1),),) * 6
    assert split.waste == pytest.approx(2 / (6 / 6) - 1)
    pad = cut_heads(4, 2, 32, 128, 6, strategy="pad")
    assert [span.real for span in pad.q] == [2, 2, 0, 0, 0, 0]
    assert [span.size for span in pad.q] == [2] * 6
    assert split.other_waste == pad.waste == pytest.approx(3 / (6 / 6) - 1)


heads = st.tuples(st.integers(1, 8), st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 16]))


@given(heads=heads, tp=ranks, strategy=st.sampled_from(["auto", "pad", "split"]), tokens=st.integers(0, 10**6))
def test_heads(heads: tuple[int, int], tp: int, strategy: Strategy, tokens: int) -> None:
    kv_heads, group = heads
    q_heads = kv_heads * group
    cut = cut_heads(q_heads, kv_heads, 64, 1024, tp, strategy=strategy, cached_tokens=tokens)
    assert strategy in ("auto", cut.strategy)
    covered(cut.q, q_heads)
    assert sum(span.real == 0 for span in cut.q) == max(0, tp - q_heads) or cut.strategy == "pad"
    held = {head for span in cut.kv for head in range(span.start, span.stop)}
    assert held == set(range(kv_heads))
    for q, kv, kv_map in zip(cut.q, cut.kv, cut.kv_map, strict=True):
        assert len(kv_map) == kv.size
        # The map serves every local query head once, and a real one by its true KV head.
        served = [(first + i, kv.start + local) for local, (first, n) in enumerate(kv_map) for i in range(n)]
        assert [head for head, _ in served] == list(range(q.size))
        assert all(kv_head == (q.start + head) // group for head, kv_head in served if head < q.real)
        if cut.strategy == "split":
            assert q.size >= 1
            assert (q.real, kv.real) in [(q.size, kv.size), (0, 0)]
    if cut.strategy == "pad":
        padded_q, padded_kv = sum(span.size for span in cut.q), sum(span.size for span in cut.kv)
        assert padded_q == padded_kv * group
        assert len({(q.size, kv.size) for q, kv in zip(cut.q, cut.kv, strict=True)}) == 1
        assert padded_kv - kv_heads < tp
    assert cut.waste >= -1e-9
    assert cut.other_waste is not None
    if strategy == "auto":
        assert cut.waste <= cut.other_waste


@given(heads=st.tuples(st.integers(1, 4), st.integers(1, 4)), tp=st.integers(1, 5), tokens=st.integers(0, 5000))
def test_split_is_optimal(heads: tuple[int, int], tp: int, tokens: int) -> None:
    """Compared with all possible boundaries, first by the slowest rank, then by the sum over ranks."""
    kv_heads, group = heads
    q_heads = kv_heads * group
    if tp > q_heads:
        return
    head_dim, hidden = 64, 512

    def cost(start: int, stop: int) -> int:
        kv = len({head // group for head in range(start, stop)})
        return 2 * (stop - start + kv) * head_dim * hidden * 2 + 2 * kv * head_dim * tokens * 2

    slowest, least = min(
        (max(cost(a, b) for a, b in ranges), sum(cost(a, b) for a, b in ranges))
        for inner in itertools.combinations(range(1, q_heads), tp - 1)
        for ranges in [list(itertools.pairwise((0, *inner, q_heads)))]
    )
    cut = cut_heads(q_heads, kv_heads, head_dim, hidden, tp, strategy="split", cached_tokens=tokens)
    total = 2 * (q_heads + kv_heads) * head_dim * hidden * 2 + 2 * kv_heads * head_dim * tokens * 2
    costs = [cost(span.start, span.stop) for span in cut.q]
    assert (max(costs), sum(costs)) == (slowest, least)
    assert cut.waste == pytest.approx(slowest * tp / total - 1)


@given(total=sizes, tp=ranks, unit=units)
def test_even_padded(total: int, tp: int, unit: int) -> None:
    cut = cut_even_padded(total, tp, unit)
    covered(cut.spans, total)
    assert len({span.size for span in cut.spans}) == 1
    size = cut.spans[0].size
    assert size % unit == 0
    assert (size - unit) * tp < total <= size * tp
    assert all(span.real <= span.size for span in cut.spans)
    assert cut.waste == pytest.approx(size * tp / total - 1)


@given(total=sizes, tp=ranks, unit=units)
def test_uneven(total: int, tp: int, unit: int) -> None:
    cut = cut_uneven(total, tp, unit)
    covered(cut.spans, total)
    assert all(span.start % unit == 0 for span in cut.spans if span.real)
    counts = [-(-span.real // unit) for span in cut.spans]
    assert sum(counts) == cut.units
    assert max(counts) - min(counts) <= 1
    assert all(span.size == span.real for span in cut.spans)


@pytest.mark.parametrize(
    ("total", "tp", "unit", "expected"),
    [
        (352, 6, 32, [64, 64, 64, 64, 64, 32]),
        (352, 5, 32, [96, 64, 64, 64, 64]),
        (352, 8, 32, [64, 64, 64, 32, 32, 32, 32, 32]),
        (350, 3, 32, [128, 128, 94]),
        (80, 6, 32, [32, 32, 16, 0, 0, 0]),
        (2048, 3, 16, [688, 688, 672]),
        (14336, 6, 32, [2400, 2400, 2400, 2400, 2368, 2368]),
    ],
)
def test_uneven_by_hand(total: int, tp: int, unit: int, expected: list[int]) -> None:
    assert lengths(cut_uneven(total, tp, unit)) == expected


def test_waste() -> None:
    assert cut_uneven(352, 6, 32).waste == pytest.approx(64 / (352 / 6) - 1)
    assert cut_even_padded(352, 6, 32).waste == pytest.approx(64 * 6 / 352 - 1)
    assert cut_uneven(352, 11, 32).waste == 0


@pytest.mark.parametrize("arguments", [(0, 3, 1), (8, 0, 1), (8, 3, 0)])
def test_sizes_below_one(arguments: tuple[int, int, int]) -> None:
    for cut in (cut_even_padded, cut_uneven):
        with pytest.raises(ShardError, match="all three must be at least 1"):
            cut(*arguments)
