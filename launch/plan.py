"""What would happen at a given TP size: how the model is cut, what each node must hold, where the ranks run.

`plan_model` builds the model of every rank without allocating anything, so it knows whatever the model files know. The
command prints the result; the launcher asks `Plan.refusal()` before it loads a byte.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilerank.loader.quantization import held_codes

from . import cache_size, quantize
from .cache_size import Demand
from .cpulist import count
from .placement import Placement, RankPlacement, auto_ranks
from .plan_text import render, size
from .quantize import quantization_of, resolve_dtype, resolve_kv_dtype
from .rendezvous import identify
from .start import own_placement, own_topology, whole_number
from .topology import Topology, read_topology

if TYPE_CHECKING:
    from tilerank.loader.config import ModelConfig
    from tilerank.loader.quantization import Quantization
    from tilerank.parallel.layer import Layer
    from tilerank.parallel.shard import HeadCut, Span, Strategy

RANK_OVERHEAD = 300 << 20
"""Bytes of a rank beside weights and cache: interpreter, libraries, activations, the tensor that is being read."""

_ORDER = ("query heads", "KV heads", "MLP width", "expert width", "vocabulary")


@dataclass(frozen=True)
class Dimension:
    """A dimension that is cut: `total` items in units of `unit`, the part of every rank, waste of the slowest."""

    name: str
    total: int
    unit: int
    spans: tuple[Span, ...]
    waste: float

    @property
    def units(self) -> int:
        return -(-self.total // self.unit)


@dataclass(frozen=True)
class Attention:
    """The strategy by which heads are cut; what the slowest rank reads beyond a perfect cut, and would by the other."""

    strategy: str
    waste: float
    other_waste: float | None


@dataclass(frozen=True)
class RankShare:
    """What one rank holds, in bytes, and where it runs."""

    placement: RankPlacement
    weights: int
    cache_per_token: int


@dataclass(frozen=True)
class NodeShare:
    """What the ranks that run near a memory node put there, in bytes. `total` is all that the node has; `free` counts
    page cache that can be dropped."""

    node: int
    ranks: tuple[int, ...]
    weights: int
    cache_per_token: float
    overhead: int
    total: int
    free: int

    def need(self, tokens: int) -> float:
        return self.weights + self.overhead + self.cache_per_token * tokens


@dataclass(frozen=True)
class Plan:
    """How a model is cut over the `tp` ranks of this host, for steps that read `expected_tokens` from the KV cache.
    `cached_tokens` is its size, and `cache_reason` where that comes from: None if it was asked for."""

    model: str
    model_type: str
    num_layers: int
    parameters: int
    dtype: str
    """Of activations, and of weights unless `quantization` says int8, int4 or fp8."""
    quantization: str | None
    kv_cache_dtype: str
    tp: int
    expected_tokens: int
    cached_tokens: int
    cache_reason: str | None
    dimensions: tuple[Dimension, ...]
    attention: Attention | None
    ranks: tuple[RankShare, ...]
    nodes: tuple[NodeShare, ...]
    group_available: int | None
    """Bytes that the control group may still allocate, None where it sets no limit."""
    notes: tuple[str, ...]

    @property
    def form(self) -> str:
        """What weights are held as."""
        return self.quantization or self.dtype

    @property
    def weights(self) -> int:
        return sum(rank.weights for rank in self.ranks)

    @property
    def cache_per_token(self) -> int:
        return sum(rank.cache_per_token for rank in self.ranks)

    @property
    def need(self) -> int:
        """Bytes of all ranks of this host together."""
        return self.weights + self.cache_per_token * self.cached_tokens + self.overhead

    @property
    def overhead(self) -> int:
        return len(self.ranks) * RANK_OVERHEAD

    @property
    def free(self) -> int:
        return sum(node.free for node in self.nodes)

    @property
    def available(self) -> int:
        """Bytes that this host has for the ranks: its free memory, or what the control group still allows of it."""
        return self.free if self.group_available is None else min(self.free, self.group_available)

    @property
    def token_room(self) -> int:
        """Cached tokens that fit beside the weights before the fullest node, or the control group, is full."""
        rooms = [
            (node.free - node.weights - node.overhead) / node.cache_per_token
            for node in self.nodes
            if node.cache_per_token
        ]
        if self.group_available is not None and self.cache_per_token:
            rooms.append((self.group_available - self.weights - self.overhead) / self.cache_per_token)
        return max(0, int(min(rooms, default=0)))

    def refusal(self) -> str | None:
        """Why this cannot be loaded: one sentence with numbers. None if it can."""
        if self.need <= self.available:
            if self.cache_reason is None or self.cached_tokens:
                return None
            return (
                f"{self.model}: no room for a KV cache: {self.cache_reason}; a size given by --max-total-tokens is "
                "held against the host's memory as a whole"
            )
        cache = f"{size(self.cache_per_token * self.cached_tokens)} of KV cache for {self.cached_tokens:,} tokens, "
        return (
            f"{self.model}: not enough memory for {count(len(self.ranks), 'rank')}: "
            f"{size(self.weights)} of {self.form} weights, "
            f"{cache if self.cached_tokens else ''}{size(self.overhead)} for the processes, "
            f"{size(self.need)} together, but "
            f"{'this host has' if self.available == self.free else 'the control group allows'} {size(self.available)}"
        )


def plan_model(
    config: ModelConfig,
    tp: int,
    *,
    model: str,
    topology: Topology,
    placement: Placement,
    strategy: Strategy = "auto",
    dtype: str = "auto",
    quantization: Quantization | None = None,
    kv_cache_dtype: str = "auto",
    cached_tokens: int | None = None,
    mem_fraction: float = cache_size.DEFAULT_FRACTION,
    here: range | None = None,
) -> Plan:
    """The plan for a model on this host. ShardError or ConfigError where it cannot be cut or is not known.

    `model` is what messages call it; `dtype` "auto" is the checkpoint's, `quantization` what is asked for beyond it,
    `kv_cache_dtype` as on the command line;
    `cached_tokens` is the size of the KV cache, by default what `mem_fraction` of the memory leaves room for. `here`
    are the ranks of this host, all unless there are more; `placement` is theirs.
    """
    from tilerank.loader.formats import weight_formats
    from tilerank.parallel.layer import Sharding
    from tilerank.runtime.cache import bytes_per_token, expected_tokens
    from tilerank.runtime.engine import MAX_RUNNING
    from tilerank.runtime.registry import model_class

    expected = expected_tokens(config) if cached_tokens is None else cached_tokens
    torch_dtype = resolve_dtype(config, dtype, quantization)
    kv_dtype = resolve_kv_dtype(kv_cache_dtype, torch_dtype)
    formats = weight_formats(config, torch_dtype, quantization)
    make = model_class(config.model_type)
    models = [
        make(config, Sharding(rank, tp, torch_dtype, None, strategy, expected, formats, kv_dtype))
        for rank in here or range(tp)
    ]
    shapes = {piece.name: piece.shape for piece in models[0].pieces()}
    heads = next(_head_cuts(models[0]), None)
    ranks = tuple(
        RankShare(where, part.nbytes(), bytes_per_token(part.cache_specs()))
        for where, part in zip(placement.ranks, models, strict=True)
    )
    plan = Plan(
        model=model,
        model_type=config.model_type,
        num_layers=config.num_layers,
        parameters=sum(math.prod(shape) for shape in shapes.values()),
        dtype=str(torch_dtype).removeprefix("torch."),
        quantization=held_codes(config.quantization, quantization),
        kv_cache_dtype=str(kv_dtype).removeprefix("torch."),
        tp=tp,
        expected_tokens=expected,
        cached_tokens=cached_tokens or 0,
        cache_reason=None,
        dimensions=tuple(sorted(dict.fromkeys(_dimensions(models[0])), key=lambda d: _ORDER.index(d.name))),
        attention=Attention(heads.strategy, heads.waste, heads.other_waste) if heads else None,
        ranks=ranks,
        nodes=_node_shares(topology, ranks, placement.sharers),
        group_available=topology.limits.memory_available,
        notes=placement.notes,
    )
    if cached_tokens is not None:
        return plan
    cache = cache_size.largest(
        Demand(plan.form, plan.weights, plan.cache_per_token, plan.overhead),
        plan.nodes,
        topology.limits,
        mem_fraction,
        replicas=placement.replicas,
        requests=MAX_RUNNING,
        context=config.max_position_embeddings,
    )
    return dataclasses.replace(plan, cached_tokens=cache.tokens, cache_reason=cache.reason)


def _dimensions(model: Layer) -> Iterator[Dimension]:
    """The same dimension of many layers comes many times."""
    from tilerank.parallel.experts import ParallelExperts
    from tilerank.parallel.layers import GateUpParallelLinear, ParallelLMHead, QKVParallelLinear, VocabParallelEmbedding

    for layer in model.walk():
        if isinstance(layer, QKVParallelLinear):
            for name, spans in (("query heads", layer.heads.q), ("KV heads", layer.heads.kv)):
                total = max(span.stop for span in spans)
                yield Dimension(name, total, 1, spans, max(span.size for span in spans) * len(spans) / total - 1)
        elif isinstance(layer, GateUpParallelLinear):
            yield Dimension("MLP width", layer.cut.total, layer.cut.unit, layer.cut.spans, layer.cut.waste)
        elif isinstance(layer, ParallelExperts):
            yield Dimension("expert width", layer.cut.total, layer.cut.unit, layer.cut.spans, layer.cut.waste)
        elif isinstance(layer, VocabParallelEmbedding | ParallelLMHead):
            yield Dimension("vocabulary", layer.cut.total, layer.cut.unit, layer.cut.spans, layer.cut.waste)


def _head_cuts(model: Layer) -> Iterator[HeadCut]:
    from tilerank.parallel.layers import QKVParallelLinear

    return (layer.heads for layer in model.walk() if isinstance(layer, QKVParallelLinear))


def _node_shares(topology: Topology, ranks: tuple[RankShare, ...], sharers: int) -> tuple[NodeShare, ...]:
    """Pinned threads touch their part first: a rank's bytes lie near its cores, or anywhere if it is bound to none.

    `sharers`: see Placement.
    """
    node_of = {cpu: core.node for core in topology.cores for cpu in core.threads}
    homes = []
    for rank in ranks:
        near = Counter(topology.nearest_memory(node_of[cpu]) for cpu in rank.placement.cores)
        homes.append(near or Counter(topology.allowed_mems))
    shares = []
    for node in topology.allowed_mems:
        parts = [(rank, home[node] / home.total()) for rank, home in zip(ranks, homes, strict=True) if home[node]]
        shares.append(
            NodeShare(
                node=node,
                ranks=tuple(rank.placement.rank for rank, _ in parts),
                weights=round(sum(rank.weights * part for rank, part in parts)),
                cache_per_token=sum(rank.cache_per_token * part for rank, part in parts),
                overhead=round(sum(RANK_OVERHEAD * part for _, part in parts)),
                total=topology.node(node).memory_total // sharers,
                free=topology.node(node).memory_free,
            )
        )
    return tuple(shares)


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan and what follows from it, ready for JSON."""
    follows = {name: getattr(plan, name) for name in ("weights", "cache_per_token", "need", "available", "token_room")}
    return dataclasses.asdict(plan) | follows | {"refusal": plan.refusal()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model_dir", metavar="MODEL_DIR", type=Path, help="a Hugging Face model directory")
    parser.add_argument(
        "--tp",
        "--tensor-parallel-size",
        type=_tp,
        metavar="auto|N",
        help="number of ranks that a layer is cut over (auto: one per NUMA node)",
    )
    parser.add_argument("--cores", default="auto", help='cores of each rank, "0-39|43-82"; auto or none')
    parser.set_defaults(bind="auto")
    parser.add_argument(
        "--strategy",
        default="auto",
        choices=("auto", "pad", "split"),
        help="how heads are cut: padded to equal shapes, split unevenly, or auto: whichever reads less",
    )
    parser.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float32"), help="of the weights")
    quantize.add_arguments(parser)
    cache_size.add_arguments(parser, "--cached-tokens", low=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def _tp(text: str) -> int | None:
    return None if text == "auto" else whole_number(1)(text)


def run(args: argparse.Namespace) -> int:
    """Prints the plan; 1 if the memory does not suffice, else 0."""
    from tilerank.runtime.registry import read_config

    machine, identity = read_topology(), identify(os.environ)
    topology = own_topology(args, identity, machine)
    tp = args.tp or auto_ranks(topology)
    plan = plan_model(
        read_config(args.model_dir),
        tp,
        model=str(args.model_dir),
        topology=topology,
        placement=own_placement(args, identity, machine, tp),
        strategy=args.strategy,
        dtype=args.dtype,
        quantization=quantization_of(args),
        kv_cache_dtype=args.kv_cache_dtype,
        cached_tokens=args.max_total_tokens,
        mem_fraction=args.mem_fraction_static,
    )
    print(json.dumps(as_json(plan)) if args.json else render(plan))
    return 0 if plan.refusal() is None else 1
