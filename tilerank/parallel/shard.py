"""How one dimension of a model is cut over T ranks: pure arithmetic, no torch, no files.

T is any number from 1 up. A dimension is cut in whole *units* (a head, a tile of 32 columns, a quantisation block).
If the number of units is not a multiple of T, there are two ways: pad with zeros, so that all ranks have equal shapes,
or give some ranks more units than others. Nothing is replicated because it does not divide, with one exception: a KV
head whose query heads lie on two ranks, where the cost rule of `cut_heads` decides.
"""

import heapq
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, partial
from itertools import pairwise
from typing import Literal

from .errors import ShardError

Strategy = Literal["auto", "pad", "split"]

TILE = 32
"""Columns of a bf16 AMX tile row: the unit in which widths and vocabularies are cut."""


@dataclass(frozen=True)
class Span:
    """One rank's part of a dimension: the real range [start, stop), and `size`, its length with zero padding."""

    start: int
    stop: int
    size: int

    @property
    def real(self) -> int:
        return self.stop - self.start

    def scaled(self, factor: int) -> "Span":
        """Return the same range in smaller items: heads become rows if `factor` is the head size."""
        return Span(self.start * factor, self.stop * factor, self.size * factor)


@dataclass(frozen=True)
class Cut:
    """A dimension of `total` items cut over `len(spans)` ranks on edges of `unit` items."""

    total: int
    unit: int
    spans: tuple[Span, ...]

    @property
    def units(self) -> int:
        return -(-self.total // self.unit)

    @property
    def waste(self) -> float:
        """Return the largest part divided by total / ranks, minus 1: with 0.5 all ranks wait for 50 % more work."""
        return max(span.size for span in self.spans) * len(self.spans) / self.total - 1


def cut_even_padded(total: int, tp: int, unit: int = 1) -> Cut:
    """Cut into equal sizes: `total` is padded to a multiple of `tp * unit`, with the padding at the end."""
    _check(total, tp, unit)
    size = -(-total // (tp * unit)) * unit
    edges = [min(rank * size, total) for rank in range(tp + 1)]
    return Cut(total, unit, tuple(Span(a, b, size) for a, b in pairwise(edges)))


def cut_uneven(total: int, tp: int, unit: int = 1) -> Cut:
    """Cut into whole units as evenly as possible, without padding; only the last unit may be partial.

    The first ranks get the larger parts. If there are fewer units than ranks, the last ranks get an empty span.
    """
    _check(total, tp, unit)
    share, extra = divmod(-(-total // unit), tp)
    edges = [min((share * rank + min(rank, extra)) * unit, total) for rank in range(tp + 1)]
    return Cut(total, unit, tuple(Span(a, b, b - a) for a, b in pairwise(edges)))


def _check(total: int, tp: int, unit: int) -> None:
    if total < 1 or tp < 1 or unit < 1:
        raise ShardError(f"cannot cut {total} items in units of {unit} over {tp} ranks: all three must be at least 1")


@dataclass(frozen=True)
class HeadCut:
    """How the heads of an attention layer are cut. Spans count heads; padding follows the real heads.

    kv_map[rank]: one pair for each local KV head, its first local query head and how many it serves. waste: the cost of
    the slowest rank divided by that of a perfect split, minus 1, by the rule of `cut_heads`. other_waste: the waste of
    the strategy that was not chosen; None where that strategy is impossible.
    """

    q: tuple[Span, ...]
    kv: tuple[Span, ...]
    kv_map: tuple[tuple[tuple[int, int], ...], ...]
    head_dim: int
    strategy: Literal["pad", "split"]
    waste: float
    other_waste: float | None


@cache
def cut_heads(
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    hidden: int,
    tp: int,
    *,
    strategy: Strategy = "auto",
    cached_tokens: int = 0,
    head_multiple: int | None = None,
    bytes_per_weight: Fraction | int = 2,
    bytes_per_kv: Fraction | int = 2,
) -> HeadCut:
    """Cut `q_heads` query and `kv_heads` KV heads over `tp` ranks, by the cheaper of two strategies.

    pad: KV heads are padded with zero heads to a multiple of `tp` (or of `head_multiple`, a multiple of `tp`, where
    quantisation blocks span heads), and query heads with them, group by group, so that every query head keeps its KV
    head. split: every rank gets a contiguous range of query heads and the KV heads that this range uses; if there are
    more ranks than query heads, the last ranks get a zero head.

    The cost of a rank is the bytes that it reads in one decode step with `cached_tokens` tokens in the cache:
        2 * head_dim * hidden * bytes_per_weight * (q + kv) + 2 * head_dim * cached_tokens * bytes_per_kv * kv
    for q query heads (q and o projections) and kv KV heads (k and v projections, cached keys and values). The strategy
    with the cheaper slowest rank is chosen; a tie goes to padding. Raises ShardError if the strategy that was asked for
    is impossible.
    """
    _check(q_heads, tp, 1)
    if kv_heads < 1 or q_heads % kv_heads:
        raise ShardError(f"{q_heads} query heads cannot share {kv_heads} KV heads equally")
    multiple = tp if head_multiple is None else head_multiple
    if multiple < 1 or multiple % tp:
        raise ShardError(f"heads are padded to a multiple of {multiple}, which is no multiple of {tp} ranks")

    weight_bytes = round(2 * head_dim * hidden * bytes_per_weight)
    cache_bytes = round(2 * head_dim * cached_tokens * bytes_per_kv)

    def cost(q: int, kv: int) -> int:
        return weight_bytes * (q + kv) + cache_bytes * kv

    perfect = cost(q_heads, kv_heads) / tp
    cuts = {"pad": _pad_heads(q_heads, kv_heads, multiple, tp)}
    if multiple == tp:
        cuts["split"] = _split_heads(q_heads, kv_heads, tp, cost)
    elif strategy == "split":
        raise ShardError(
            f"{q_heads} query heads cannot be split over {tp} ranks: quantisation blocks span heads, "
            f"so each rank needs a multiple of {multiple // tp} heads"
        )

    slowest = {name: max(cost(a.size, b.size) for a, b in zip(q, kv, strict=True)) for name, (q, kv) in cuts.items()}
    chosen: Literal["pad", "split"]
    if strategy == "auto":
        chosen = "split" if "split" in cuts and slowest["split"] < slowest["pad"] else "pad"
    else:
        chosen = strategy
    other = "pad" if chosen == "split" else "split"
    q, kv = cuts[chosen]
    return HeadCut(
        q=q,
        kv=kv,
        kv_map=tuple(_kv_map(a, b, q_heads // kv_heads) for a, b in zip(q, kv, strict=True)),
        head_dim=head_dim,
        strategy=chosen,
        waste=slowest[chosen] / perfect - 1,
        other_waste=slowest[other] / perfect - 1 if other in slowest else None,
    )


_Spans = tuple[tuple[Span, ...], tuple[Span, ...]]


def _pad_heads(q_heads: int, kv_heads: int, multiple: int, tp: int) -> _Spans:
    kv = cut_even_padded(kv_heads, tp, multiple // tp).spans
    return tuple(span.scaled(q_heads // kv_heads) for span in kv), kv


def _split_heads(q_heads: int, kv_heads: int, tp: int, cost: Callable[[int, int], int]) -> _Spans:
    group = q_heads // kv_heads

    def touched(start: int, stop: int) -> Span:
        first, last = start // group, -(-stop // group)
        return Span(first, last, last - first)

    def range_cost(start: int, stop: int) -> int:
        return cost(stop - start, touched(start, stop).size)

    parts = min(tp, q_heads)
    slowest = _least_maximum(q_heads, parts, range_cost)
    edges = _fewest_touched(q_heads, parts, group, lambda start, stop: range_cost(start, stop) <= slowest)
    q, kv = [Span(a, b, b - a) for a, b in pairwise(edges)], [touched(a, b) for a, b in pairwise(edges)]
    idle = tp - parts
    return (*q, *[Span(q_heads, q_heads, 1)] * idle), (*kv, *[Span(kv_heads, kv_heads, 1)] * idle)


def _least_maximum(items: int, parts: int, cost: Callable[[int, int], int]) -> int:
    """Return the smallest possible maximum of `cost(start, stop)` over `parts` consecutive ranges of `items`.

    Bisects the maximum; a limit is feasible if `parts` ranges, each as long as the limit allows, reach the end. No
    range may cost less than a range inside it.
    """

    def is_enough(limit: int) -> bool:
        start = 0
        for _ in range(parts):
            stops = range(start + 1, items + 1)
            start += bisect_right(stops, limit, key=partial(cost, start))
        return start == items

    low, high = 0, cost(0, items)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle + 1, high)
    return low


def _fewest_touched(items: int, parts: int, group: int, fits: Callable[[int, int], bool]) -> list[int]:
    """Return edges of `parts` consecutive ranges that all fit and together touch the fewest groups of `group` items.

    Dynamic programme over (ranges, items) used. Candidate starts are kept in a heap. A range that does not fit does not
    fit with a later stop either, so its start is removed for good.
    """
    rows: list[dict[int, tuple[int, int]]] = [{0: (0, 0)}]  # stop -> (groups touched so far, start of the last range)
    for _ in range(parts):
        before, row, starts = rows[-1], {}, list[tuple[int, int]]()
        for stop in range(1, items + 1):
            if stop - 1 in before:
                heapq.heappush(starts, (before[stop - 1][0] - (stop - 1) // group, stop - 1))
            while starts and not fits(starts[0][1], stop):
                heapq.heappop(starts)
            if starts:
                row[stop] = (starts[0][0] + -(-stop // group), starts[0][1])
        rows.append(row)
    edges = [items]
    for row in reversed(rows[1:]):
        edges.append(row[edges[-1]][1])
    return edges[::-1]


def _kv_map(q: Span, kv: Span, group: int) -> tuple[tuple[int, int], ...]:
    """Return (first local query head, count) for each local KV head; counts only query heads that this rank holds."""
    pairs = []
    for local in range(kv.size):
        first = max((kv.start + local) * group, q.start)
        stop = min((kv.start + local + 1) * group, q.start + q.size)
        pairs.append((first - q.start, stop - first))
    return tuple(pairs)
