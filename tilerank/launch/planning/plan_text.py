"""A plan as a page of text for a terminal, or as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tilerank.parallel.shard import Span
from tilerank.runtime.protocol.sizes import MIN_STATES, PREFILL_CHUNK, TOKENS_PER_STATE, WINDOW_MARGIN
from tilerank.runtime.protocol.speculative import DRAFTS

from ..host.cpulist import format_cpulist
from ..text import count, percent, size, table, token_count
from .plan_types import Dimension, Plan, ReplicaPlans

_STRATEGIES = {
    "pad": "heads are padded with zero heads, so that all ranks have equal shapes",
    "split": "query heads are split unevenly, and a KV head on a border is held by both neighbours",
}
_RANK = (
    "placement",
    "weights",
    "cache_per_token",
    "window_per_token",
    "state",
    "encoder",
    "media",
    "speaker",
    "speech",
    "draft_model",
)
_NODE = (
    "node",
    "ranks",
    "weights",
    "media",
    "speech",
    "cache_per_token",
    "window_per_token",
    "state",
    "overhead",
    "total",
    "free",
)
"""The fields of a rank and of a node in JSON, in this order."""


def render(plan: Plan) -> str:
    """Return the whole page: how the model is cut, where the ranks run, the memory, and whether it fits."""
    sections = [[_title(plan)], _cuts(plan), _places(plan), _memory(plan), _verdict(plan)]
    return _page(sections)


def _title(plan: Plan) -> str:
    million = plan.parameters / 1e6
    parameters = f"{million / 1e3:.2f} billion" if million >= 1000 else f"{million:.1f} million"
    return (
        f"{plan.model}: {plan.model_type}, {count(plan.num_layers, 'layer')}, {parameters} parameters, "
        f"{plan.form}{_activations(plan)}, {plan.bits_per_weight:.2f} bits a weight, "
        f"{_codes_in_cache(plan)}{count(plan.tp, 'rank')}"
    )


def _activations(plan: Plan) -> str:
    return f" with {plan.activation_bits}-bit activations" if plan.quantization else ""


def _codes_in_cache(plan: Plan) -> str:
    return f"{plan.kv_cache_dtype} KV cache, " if plan.kv_cache_dtype == "int8" else ""


def _cuts(plan: Plan) -> list[str]:
    rows = [["", *(dimension.name for dimension in plan.dimensions)]]
    rows.append(["total", *(f"{dimension.total}" for dimension in plan.dimensions)])
    rows.append(["units", *(_units(dimension) for dimension in plan.dimensions)])
    for rank in range(plan.tp):
        rows.append([f"rank {rank}", *(_range(dimension.spans[rank]) for dimension in plan.dimensions)])
    rows.append(["waste", *(percent(dimension.waste) for dimension in plan.dimensions)])
    return [*table(rows), *_strategy(plan), *_contexts(plan)]


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
        f"Slowest rank against a perfect cut, {token_count(plan.expected_tokens)} cached: {costs}.",
    ]


def _contexts(plan: Plan) -> list[str]:
    if plan.splits_contexts is None:
        return []
    cached = plan.ranks[0].cache_per_token
    if not plan.splits_contexts:
        return [
            "",
            f"Contexts: every rank reads all of a context for its own heads, {size(cached)} for each of its tokens.",
        ]
    return [
        "",
        f"Contexts: every rank reads 1/{plan.tp} of a context for the heads of all ranks, {size(cached / plan.tp)} for "
        "each of its tokens.",
    ]


def _places(plan: Plan) -> list[str]:
    caches = (*_if(plan.cached_tokens, "KV cache"), *_states(plan, "states"))
    rows = [["", "weights", "KV per token", *caches, "memory", "where"]]
    for rank in plan.ranks:
        where = rank.placement
        rows.append(
            [
                f"rank {where.rank}",
                size(rank.weights),
                size(rank.cache_per_token),
                *_if(plan.cached_tokens, size(rank.kv_bytes(plan.cached_tokens, plan.window))),
                *_states(plan, size(rank.state * plan.states)),
                f"node {format_cpulist(where.mem_nodes)}" if where.mem_nodes else "any node",
                f"{where.reason}: CPUs {format_cpulist(where.cores)}" if where.cores else where.reason,
            ]
        )
    return [*table(rows, left=2), *(f"Note: {note}." for note in plan.notes)]


def _memory(plan: Plan) -> list[str]:
    rows = [["", "ranks", "weights", *_if(plan.cached_tokens, "KV cache"), *_states(plan, "states"), "free", "used"]]
    for node in plan.nodes:
        rows.append(
            [
                f"node {node.node}",
                format_cpulist(node.ranks),
                size(node.weights),
                *_if(plan.cached_tokens, size(node.kv_bytes(plan.cached_tokens, plan.window))),
                *_states(plan, size(node.state * plan.states)),
                size(node.free),
                percent(node.need(plan.cached_tokens, plan.window) / node.free) if node.free else "full",
            ]
        )
    return table(rows)


def _verdict(plan: Plan) -> list[str]:
    refusal = plan.refusal()
    if refusal is not None:
        return [f"Does not fit: {refusal}."]
    fits = f"Fits: {size(plan.need)} of {size(plan.available)}, processes included."
    full = [node.node for node in plan.nodes if node.need(plan.cached_tokens, plan.window) > node.free]
    if full:
        return [fits, _overflow_note(full), *_media(plan), *_speech(plan), *_drafts(plan)]
    return [
        fits,
        f"{cache_text(plan)}.",
        *_windows(plan, f"{windows_text(plan)}."),
        *_states(plan, f"{states_text(plan)}."),
        *_media(plan),
        *_speech(plan),
        *_drafts(plan),
    ]


def windows_text(plan: Plan) -> str:
    """Return how many tokens layers with a window have room for on this host, and how many requests fit."""
    tokens, context = plan.window_tokens, plan.context_length
    nbytes = plan.memory.window_per_token * tokens
    held = min(plan.window + WINDOW_MARGIN, context)
    chunk = min(PREFILL_CHUNK, context - held)
    requests = min(plan.cached_tokens // context, (tokens - chunk) // held)
    return (
        f"Layers with a window of {plan.window:,} tokens have room for {token_count(tokens)}, {size(nbytes)} of this; "
        f"{count(requests, 'request')} of {context:,} tokens can run at a time"
    )


def _windows(plan: Plan, text: str) -> tuple[str, ...]:
    return _if(plan.window_tokens, text)


def _media(plan: Plan) -> list[str]:
    if not any(rank.encoder for rank in plan.ranks):
        return []
    encoder, most = sum(rank.encoder for rank in plan.ranks), max(rank.media for rank in plan.ranks)
    return [
        f"Pictures and videos: {size(encoder)} of the weights encode them; encoded, they take up to {size(most)} on "
        "each rank."
    ]


def _speech(plan: Plan) -> list[str]:
    if not plan.memory.speech:
        return []
    weights, most = sum(rank.speaker for rank in plan.ranks), max(rank.speech for rank in plan.ranks)
    return [f"Speech: {size(weights)} of the weights speak; what they speak takes up to {size(most)} on each rank."]


def _drafts(plan: Plan) -> list[str]:
    weights = sum(rank.draft_model for rank in plan.ranks)
    held = f", which is {size(weights)} of the weights" if weights else ""
    return [f"Drafts: {DRAFTS[plan.speculative]}{held}."]


def cache_text(plan: Plan) -> str:
    """Return how large the cache is on this host, and why."""
    if plan.cache_reason is None:
        return f"{_cache(plan)}, as asked; there is room for {plan.token_room:,}"
    return f"{_cache(plan)}: {plan.cache_reason}"


def states_text(plan: Plan) -> str:
    """Return how many states of sequences there is room for on this host, and why."""
    return (
        f"States of {plan.states:,} sequences, {size(plan.memory.state * plan.states)}: one for every "
        f"{TOKENS_PER_STATE:,} tokens of the KV cache, at least {MIN_STATES}; a running request takes one, "
        "and the others are snapshots from which prompts with the same beginning continue"
    )


def _states(plan: Plan, cell: str) -> tuple[str, ...]:
    return _if(plan.states, cell)


def _cache(plan: Plan) -> str:
    nbytes = plan.memory.kv_bytes(plan.cached_tokens, plan.window)
    return f"KV cache of {token_count(plan.cached_tokens)}, {size(nbytes)}"


def _if(condition: object, *cells: str) -> tuple[str, ...]:
    return cells if condition else ()


def render_replicas(replicas: ReplicaPlans) -> str:
    """Return the page for several replicas: the cuts, which all share, the places of each, and the memory of all."""
    first, *_ = plans = replicas.plans
    head = f"{_title(first)} in each of {len(plans)} replicas"
    sections = [[head if replicas.reason is None else f"{head} ({replicas.reason})"], _cuts(first)]
    sections += [[f"Replica {number}:", *_group(plan)] for number, plan in enumerate(plans)]
    return _page([*sections, _shared_memory(replicas), _shared_verdict(replicas)])


def render_groups(groups: ReplicaPlans) -> str:
    """Return the page for prefill ranks and decode ranks: the places of each group, the cuts, which those of other
    replicas share, and the memory of all."""
    sections = [[f"{count(groups.dp, 'replica')} ({groups.reason})"]] if groups.reason is not None else []
    for number, (name, plan) in enumerate(zip(groups.names, groups.plans, strict=True)):
        cuts = _cuts(plan) if number < len(groups.roles) else []
        sections += [[f"{name.capitalize()}: {_title(plan)}"], cuts, _group(plan)]
    half = f"Half of the cache of {groups.roles[0]} is the memory through which they give pages to {groups.roles[1]}."
    return _page([*sections, [half], _shared_memory(groups), _shared_verdict(groups)])


def _group(plan: Plan) -> list[str]:
    """Return where the ranks of one of several plans run, and what they keep."""
    reason = "" if plan.cache_reason is None else f": {plan.cache_reason}"
    return [
        *_places(plan),
        f"{_cache(plan)}{reason}.",
        *_windows(plan, f"{windows_text(plan)}."),
        *_states(plan, f"{states_text(plan)}."),
        *_media(plan),
        *_speech(plan),
        *_drafts(plan),
    ]


def _page(sections: Sequence[Sequence[str]]) -> str:
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _shared_memory(replicas: ReplicaPlans) -> list[str]:
    first = replicas.plans[0]
    whose = "ranks" if replicas.roles else "replicas"
    rows = [["", whose, "weights", "KV cache", *_states(first, "states"), "free", "used"]]
    for index, node in enumerate(first.nodes):
        parts = [(number, plan.nodes[index], plan) for number, plan in enumerate(replicas.plans)]
        rows.append(
            [
                f"node {node.node}",
                _names(replicas, [number for number, part, _ in parts if part.ranks]),
                size(sum(part.weights for _, part, _ in parts)),
                size(sum(part.kv_bytes(plan.cached_tokens, plan.window) for _, part, plan in parts)),
                *_states(first, size(sum(part.state * plan.states for _, part, plan in parts))),
                size(node.free),
                percent(replicas.node_need(index) / node.free) if node.free else "full",
            ]
        )
    return table(rows)


def _names(replicas: ReplicaPlans, numbers: Sequence[int]) -> str:
    return ", ".join(replicas.names[number] for number in numbers) if replicas.names else format_cpulist(numbers)


def _shared_verdict(replicas: ReplicaPlans) -> list[str]:
    refusal = replicas.refusal()
    if refusal is not None:
        return [f"Does not fit: {refusal}."]
    fits = f"Fits: {size(replicas.need)} of {size(replicas.available)}, processes included."
    nodes = replicas.plans[0].nodes
    full = [node.node for index, node in enumerate(nodes) if replicas.node_need(index) > node.free]
    return [fits, _overflow_note(full)] if full else [fits]


def _overflow_note(full: list[int]) -> str:
    return f"Note: node {format_cpulist(full)} has too little memory: a part will lie on other nodes and be slower."


def as_json(plan: Plan) -> dict[str, Any]:
    """Return the plan and the totals derived from it, ready for JSON."""
    kinds = ("weights", "media", "speech", "cache_per_token", "window_per_token", "state")
    memory = {name: getattr(plan.memory, name) for name in kinds}
    totals = {
        name: getattr(plan, name) for name in ("need", "available", "token_room", "bits_per_weight", "window_tokens")
    }
    shares = {
        "ranks": [{name: share[name] for name in _RANK} for share in map(dataclasses.asdict, plan.ranks)],
        "nodes": [{name: share[name] for name in _NODE} for share in map(dataclasses.asdict, plan.nodes)],
    }
    return dataclasses.asdict(plan) | shares | memory | totals | {"refusal": plan.refusal()}


def replicas_as_json(replicas: ReplicaPlans) -> dict[str, Any]:
    """Return all plans and what they need together, ready for JSON."""
    names = {"names": replicas.names} if replicas.names else {}
    return names | {
        "dp": replicas.dp,
        "reason": replicas.reason,
        "need": replicas.need,
        "available": replicas.available,
        "refusal": replicas.refusal(),
        "replicas": [as_json(plan) for plan in replicas.plans],
    }
