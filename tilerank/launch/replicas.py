"""How a host is divided into replicas of a model: --dp of them, on --tp ranks each. Pure: figures in, numbers out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .host.placement import auto_ranks
from .host.topology import Topology
from .start import whole_number
from .text import size

MAX_REPLICAS = 256

PACE_BYTES = 8 << 30
"""What a node may read for a token of one stream: 50 ms where it streams 170 GB/s. Only then replicas are worth more
than ranks, which make each stream faster."""
WEIGHT_SHARE = 0.5
"""Of a node's memory, for weights. The rest is for what makes replicas worth while: many requests."""


@dataclass(frozen=True)
class Appetite:
    """What a whole model takes, in bytes: its weights, and what one token reads of them."""

    weights: int
    token: int


def replica_count(text: str) -> int | None:
    """The type of --dp: a number of replicas, or None for "auto"."""
    return None if text == "auto" else whole_number(1, MAX_REPLICAS)(text)


@dataclass(frozen=True)
class Division:
    """`dp` replicas of `tp` ranks. `reason`: one sentence about what was not asked for, if something was not."""

    tp: int
    dp: int
    reason: str | None = None


def divide(topology: Topology, tp: int | None, dp: int | None, appetite: Callable[[], Appetite]) -> Division:
    """The numbers asked for, and in place of None those that fit best. `appetite` is called if it matters."""
    nodes = auto_ranks(topology)
    if tp is not None and dp is not None:
        return Division(tp, dp)
    if dp is not None:
        return Division(max(1, nodes // dp), dp, f"{_nodes(nodes)} for {dp} replicas" if dp > 1 else None)
    if tp is not None:
        return Division(tp, max(1, nodes // tp), f"{_nodes(nodes)} for replicas of {tp} ranks")
    if nodes == 1:
        return Division(1, 1, "there is one NUMA node")
    return _by_size(nodes, _smallest_memory(topology), appetite())


def _by_size(nodes: int, memory: int, model: Appetite) -> Division:
    """The fewest nodes for a replica that hold it well and read it fast enough."""
    tp, refused = 1, ""
    while tp < nodes:
        weights, token = model.weights // tp, model.token // tp
        if weights > WEIGHT_SHARE * memory:
            refused = f"; fewer would hold {size(weights)} of weights each, of {size(memory)}"
        elif token > PACE_BYTES:
            refused = f"; fewer would read {size(token)} each, more than {size(PACE_BYTES)}"
        else:
            break
        tp = next(more for more in range(tp + 1, nodes + 1) if nodes % more == 0)
    each = f"{tp} for each replica, which read {size(model.token // tp)} each for a token"
    return Division(tp, nodes // tp, f"{_nodes(nodes)}, {each}{refused}")


def _nodes(nodes: int) -> str:
    return f"{nodes} NUMA node{'s' if nodes > 1 else ''}"


def _smallest_memory(topology: Topology) -> int:
    return min(topology.node(node).memory_total for node in topology.allowed_mems)
