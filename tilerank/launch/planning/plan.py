"""The plan of a model on this host: builds every rank's model without allocating anything and asks its layers.

`tilerank plan` prints it; other commands refuse to load a model if `Plan.refusal` returns a reason.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tilerank.loader.quantization_config import held_codes
from tilerank.runtime.protocol.sizes import MAX_RUNNING, num_states
from tilerank.runtime.protocol.speculative import loads_head, state_drafts

from ..host.placement import Placement, RankPlacement
from ..host.topology import Topology
from ..options.model import ModelOptions
from . import cache_size
from .plan_types import RANK_OVERHEAD, Attention, Dimension, MemoryUse, NodeShare, Plan, RankShare
from .replicas import ModelBytes

if TYPE_CHECKING:
    from tilerank.loader.card import ModelCard
    from tilerank.parallel.parameters import Layer
    from tilerank.parallel.sharding import Sharding
    from tilerank.runtime.step.model import Model


def plan_model(
    card: ModelCard,
    tp: int,
    options: ModelOptions,
    *,
    model: str,
    topology: Topology,
    placement: Placement,
    here: range | None = None,
) -> Plan:
    """Return the plan for one replica of a model on this host. Raises ShardError, ConfigError or LaunchError.

    model: its name in messages. here: the ranks of this host (default: all). placement: of these ranks.
    """
    from tilerank.loader.weight_formats import weight_formats
    from tilerank.runtime.rank.speech_rank import TALKER_TOKENS, speech_bytes
    from tilerank.runtime.step.cache import (
        bytes_per_state,
        bytes_per_token,
        bytes_per_window_token,
        has_states,
        window_of,
    )

    cached_tokens, expected = options.cached_tokens, _expected_tokens(card, options)
    dtype, kv_dtype = options.torch_dtype(card), options.torch_kv_dtype(card)
    formats = weight_formats(card.quantization, dtype, options.quantization, options.activation_bits)
    shardings = _shardings(card, tp, options, here)
    models, draft_models = sharded_models(card, tp, options, here), _draft_models(card, options, shardings)
    with_states = has_states(models[0].cache_specs())
    heads = next(models[0].head_cuts(), None)
    caches = 2 if options.gives_pages else 1  # the memory between the groups is as large as the cache
    ranks = tuple(
        RankShare(
            where,
            part.encoder.nbytes() if part.encoder else 0,
            part.speaker.nbytes() if part.speaker else 0,
            draft.nbytes() if draft else 0,
            weights=part.nbytes() + (draft.nbytes() if draft else 0),
            cache_per_token=caches * bytes_per_token(part.cache_specs() + (draft.cache_specs() if draft else [])),
            window_per_token=caches * bytes_per_window_token(part.cache_specs()),
            state=caches * bytes_per_state(part.cache_specs()),
            media=_media_bytes(part, options),
            speech=speech_bytes(part.speaker, tokens=TALKER_TOKENS, sequences=MAX_RUNNING, ranks=tp)
            if part.speaker
            else 0,
            overhead=RANK_OVERHEAD,
        )
        for where, part, draft in zip(placement.ranks, models, draft_models, strict=True)
    )
    plan = Plan(
        model=model,
        model_type=card.model_type,
        num_layers=len(models[0].cache_specs()),
        parameters=models[0].parameters(),
        dtype=str(dtype).removeprefix("torch."),
        quantization=held_codes(card.quantization, options.quantization),
        activation_bits=8 if formats is not None and formats.projections.operands == "int8" else dtype.itemsize * 8,
        kv_cache_dtype=str(kv_dtype).removeprefix("torch."),
        tp=tp,
        expected_tokens=expected,
        cached_tokens=cached_tokens or 0,
        cache_reason=None,
        states=num_states(cached_tokens or 0) if with_states else 0,
        window=min(window_of(models[0].cache_specs()), card.context_length),
        context_length=card.context_length,
        speculative=options.drafts(card),
        dimensions=tuple(_dimensions(models[0])),
        splits_contexts=models[0].context_part is not None if models[0].expands and tp > 1 else None,
        attention=Attention(heads.strategy, heads.waste, heads.other_waste) if heads else None,
        ranks=ranks,
        nodes=_node_shares(topology, ranks, placement.sharers),
        group_available=topology.limits.memory_available,
        notes=placement.notes,
    )
    if cached_tokens is not None:
        return plan
    cache = cache_size.largest(
        plan.form,
        plan.memory,
        plan.nodes,
        topology.limits,
        options.mem_fraction,
        replicas=placement.replicas,
        requests=MAX_RUNNING,
        context=card.context_length,
        window=plan.window,
    )
    states = num_states(cache.tokens) if with_states else 0
    return dataclasses.replace(plan, cached_tokens=cache.tokens, cache_reason=cache.reason, states=states)


def _media_bytes(part: Model, options: ModelOptions) -> int:
    """Return the limit for encoded media on a rank. Where they become sources, these have one half, and the memory
    through which prefill ranks give them has as much."""
    from tilerank.runtime.step.cache import has_sources

    if part.encoder is None:
        return 0
    gives_sources = options.gives_pages and has_sources(part.cache_specs())
    return options.mm_cache_bytes + (options.mm_cache_bytes // 2 if gives_sources else 0)


def sharded_models(card: ModelCard, tp: int, options: ModelOptions, here: range | None = None) -> list[Model]:
    """Return the parts of a model on the ranks of this host (default: all); nothing is allocated."""
    from tilerank.runtime.rank.registry import build_model

    card = dataclasses.replace(card, draft_head=loads_head(options.drafts(card)))
    return [build_model(card, sharding) for sharding in _shardings(card, tp, options, here)]


def _draft_models(card: ModelCard, options: ModelOptions, shardings: Sequence[Sharding]) -> list[Model | None]:
    """Return what each rank holds of the draft model, None without one."""
    from tilerank.loader.weight_formats import weight_formats
    from tilerank.runtime.rank.registry import build_draft_model, read_draft_card

    if options.draft_model is None:
        return [None] * len(shardings)
    draft = read_draft_card(options.draft_model, card.context_length)
    formats = weight_formats(draft.quantization, shardings[0].dtype, None, options.activation_bits)
    return [build_draft_model(draft, dataclasses.replace(sharding, formats=formats)) for sharding in shardings]


def _shardings(card: ModelCard, tp: int, options: ModelOptions, here: range | None) -> list[Sharding]:
    """Return how the ranks of this host cut a model."""
    from tilerank.loader.weight_formats import weight_formats
    from tilerank.parallel.sharding import Sharding

    dtype, kv_dtype, kv_split = options.torch_dtype(card), options.torch_kv_dtype(card), options.kv_split
    drafts, expected = state_drafts(options.drafts(card)), _expected_tokens(card, options)
    formats = weight_formats(card.quantization, dtype, options.quantization, options.activation_bits)
    if kv_split == "auto" and here is not None and len(here) < tp:
        kv_split = "off"  # as on the ranks: the rule counts collectives in shared memory
    return [
        Sharding(rank, tp, dtype, None, options.strategy, expected, formats, kv_dtype, kv_split, drafts)
        for rank in here or range(tp)
    ]


def _expected_tokens(card: ModelCard, options: ModelOptions) -> int:
    from tilerank.runtime.step.cache import expected_tokens

    return expected_tokens(card.context_length) if options.cached_tokens is None else options.cached_tokens


def _dimensions(model: Layer) -> Iterator[Dimension]:
    """Yield every cut dimension once, in the order of the model's layers, the vocabulary last."""
    for name, cut in sorted(dict.fromkeys(model.cuts()), key=lambda named: named[0] == "vocabulary"):
        yield Dimension(name, cut.total, cut.unit, cut.spans, cut.waste)


def _home(topology: Topology, rank: RankPlacement) -> dict[int, float]:
    """Return the part of a rank's bytes on each memory node: near its cores, whose threads touch them first, or spread
    over all nodes if the rank is not bound."""
    node_of = {cpu: core.node for core in topology.cores for cpu in core.threads}
    near = Counter(topology.nearest_memory(node_of[cpu]) for cpu in rank.cores) or Counter(topology.allowed_mems)
    return {node: cores / near.total() for node, cores in near.items()}


def without_held_weights(topology: Topology, placement: Placement, held: Sequence[int]) -> Topology:
    """Return the topology as if the memory of weights that ranks find in memory files were free, since a plan counts it
    as theirs. held: bytes of each rank of the placement, or nothing."""
    free = {node.id: node.memory_free for node in topology.nodes}
    for rank, nbytes in zip(placement.ranks, held, strict=False):
        for node, part in _home(topology, rank).items():
            free[node] += int(part * nbytes)
    nodes = tuple(dataclasses.replace(node, memory_free=free[node.id]) for node in topology.nodes)
    return dataclasses.replace(topology, nodes=nodes, limits=topology.limits.beside(-sum(held)))


def _node_shares(topology: Topology, ranks: tuple[RankShare, ...], sharers: int) -> tuple[NodeShare, ...]:
    """Return what each memory node holds. sharers: see Placement."""
    homes = [_home(topology, rank.placement) for rank in ranks]
    shares = []
    for node in topology.allowed_mems:
        parts = [(rank, home[node]) for rank, home in zip(ranks, homes, strict=True) if node in home]
        held = sum((rank * part for rank, part in parts), MemoryUse())
        shares.append(
            NodeShare(
                node,
                tuple(rank.placement.rank for rank, _ in parts),
                topology.node(node).memory_total // sharers,
                topology.node(node).memory_free,
                weights=round(held.weights),
                cache_per_token=held.cache_per_token,
                window_per_token=held.window_per_token,
                state=held.state,
                media=round(held.media),
                speech=round(held.speech),
                overhead=round(held.overhead),
            )
        )
    return tuple(shares)


def model_bytes(card: ModelCard, options: ModelOptions) -> ModelBytes:
    """Return the bytes of a whole model, and those that one token reads."""
    from tilerank.loader.weight_formats import weight_formats
    from tilerank.parallel.sharding import Sharding
    from tilerank.runtime.rank.registry import build_model
    from tilerank.runtime.step.bytes_per_step import bytes_per_step

    dtype = options.torch_dtype(card)
    formats = weight_formats(card.quantization, dtype, options.quantization, options.activation_bits)
    card = dataclasses.replace(card, draft_head=loads_head(options.drafts(card)))
    sharding = Sharding(0, 1, dtype, None, formats=formats)
    model, (draft,) = build_model(card, sharding), _draft_models(card, options, [sharding])
    nbytes = model.nbytes() + (draft.nbytes() if draft else 0)
    return ModelBytes(nbytes, round(bytes_per_step(model).decode(1, 0)))
