"""A plan as a page of text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .cpulist import count, format_cpulist

if TYPE_CHECKING:
    from tilerank.parallel.shard import Span

    from .plan import Dimension, Plan

_STRATEGIES = {
    "pad": "heads are padded with zero heads, so that all ranks have equal shapes",
    "split": "query heads are dealt out unevenly, a KV head on a border is held by both neighbours",
}


def size(nbytes: float) -> str:
    """512 B, 12.0 KiB, 300 MiB, 1.50 GiB: three digits."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB"):
        if nbytes < 1024:
            break
        nbytes, unit = nbytes / 1024, larger
    digits = 0 if unit == "B" or nbytes >= 100 else 1 if nbytes >= 10 else 2
    return f"{nbytes:.{digits}f} {unit}"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def render(plan: Plan) -> str:
    """The whole page: what is cut and where, then what it costs, then whether it fits."""
    sections = [[_title(plan)], _cuts(plan), _places(plan), _memory(plan), _verdict(plan)]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _title(plan: Plan) -> str:
    million = plan.parameters / 1e6
    parameters = f"{million / 1e3:.2f} billion" if million >= 1000 else f"{million:.1f} million"
    return (
        f"{plan.model}: {plan.model_type}, {count(plan.num_layers, 'layer')}, {parameters} parameters, "
        f"{plan.form}, {_codes_in_cache(plan)}{count(plan.tp, 'rank')}"
    )


def _codes_in_cache(plan: Plan) -> str:
    return f"{plan.kv_cache_dtype} KV cache, " if plan.kv_cache_dtype == "int8" else ""


def _cuts(plan: Plan) -> list[str]:
    rows = [["", *(dimension.name for dimension in plan.dimensions)]]
    rows.append(["total", *(f"{dimension.total}" for dimension in plan.dimensions)])
    rows.append(["units", *(_units(dimension) for dimension in plan.dimensions)])
    for rank in range(plan.tp):
        rows.append([f"rank {rank}", *(_range(dimension.spans[rank]) for dimension in plan.dimensions)])
    rows.append(["waste", *(percent(dimension.waste) for dimension in plan.dimensions)])
    return [*table(rows), *_strategy(plan)]


def _units(dimension: Dimension) -> str:
    return f"{dimension.units}" if dimension.unit == 1 else f"{dimension.units} x {dimension.unit}"


def _range(span: Span) -> str:
    real = f"{span.start}-{span.stop - 1}" if span.real > 1 else f"{span.start}" if span.real else ""
    zeros = f"{span.size - span.real} zero" if span.size > span.real else ""
    return " + ".join(filter(None, (real, zeros))) or "none"


def _strategy(plan: Plan) -> list[str]:
    taken = plan.attention
    if taken is None or plan.tp == 1:
        return []
    if taken.waste == 0:
        return ["", "Heads divide evenly over the ranks."]
    other = "split" if taken.strategy == "pad" else "pad"
    costs = f"+{percent(taken.waste)} with {taken.strategy}"
    if taken.other_waste is None:
        costs += f"; {other} is not possible"
    else:
        costs += f", +{percent(taken.other_waste)} with {other}"
    return [
        "",
        f"Strategy {taken.strategy}: {_STRATEGIES[taken.strategy]}.",
        f"Slowest rank against a perfect cut, {_tokens(plan.expected_tokens)} cached: {costs}.",
    ]


def _tokens(n: int) -> str:
    return f"{n:,} token{'s' * (n != 1)}"


def _places(plan: Plan) -> list[str]:
    rows = [["", "weights", "KV per token", *_if(plan.cached_tokens, "KV cache"), "memory", "where"]]
    for rank in plan.ranks:
        where = rank.placement
        rows.append(
            [
                f"rank {where.rank}",
                size(rank.weights),
                size(rank.cache_per_token),
                *_if(plan.cached_tokens, size(rank.cache_per_token * plan.cached_tokens)),
                f"node {format_cpulist(where.mem_nodes)}" if where.mem_nodes else "any node",
                f"{where.reason}: CPUs {format_cpulist(where.cores)}" if where.cores else where.reason,
            ]
        )
    return [*table(rows, left=2), *(f"Note: {note}." for note in plan.notes)]


def _memory(plan: Plan) -> list[str]:
    rows = [["", "ranks", "weights", *_if(plan.cached_tokens, "KV cache"), "free", "used"]]
    for node in plan.nodes:
        rows.append(
            [
                f"node {node.node}",
                format_cpulist(node.ranks),
                size(node.weights),
                *_if(plan.cached_tokens, size(node.cache_per_token * plan.cached_tokens)),
                size(node.free),
                percent(node.need(plan.cached_tokens) / node.free) if node.free else "full",
            ]
        )
    return table(rows)


def _verdict(plan: Plan) -> list[str]:
    refusal = plan.refusal()
    if refusal is not None:
        return [f"Does not fit: {refusal}."]
    fits = f"Fits: {size(plan.need)} of {size(plan.available)}, processes included."
    full = [node.node for node in plan.nodes if node.need(plan.cached_tokens) > node.free]
    if full:
        return [
            fits,
            f"Note: node {format_cpulist(full)} has too little: a part will lie on other nodes and be slower.",
        ]
    return [fits, f"{cache_text(plan)}."]


def cache_text(plan: Plan) -> str:
    """How large the cache is on this host, and where that comes from."""
    taken = f"KV cache of {_tokens(plan.cached_tokens)}, {size(plan.cache_per_token * plan.cached_tokens)}"
    if plan.cache_reason is None:
        return f"{taken}, as asked; there is room for {plan.token_room:,}"
    return f"{taken}: {plan.cache_reason}"


def _if(condition: object, *cells: str) -> tuple[str, ...]:
    return cells if condition else ()


def table(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Columns are right-aligned but for the first, and the last `left - 1`."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    last = len(widths) - (left - 1)
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if 0 < i < last else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("   ".join(cells).rstrip())
    return lines
