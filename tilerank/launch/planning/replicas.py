"""The division of a host into --dp replicas of a model, each of --tp ranks. Pure functions of the machine's figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..host.placement import auto_ranks
from ..host.topology import Topology
from ..text import count, size

PACE_BYTES = 8 << 30
"""Bytes that a node may read per token of one stream: 50 ms at 170 GB/s. Only below this are more replicas worth more
than more ranks per replica, which speed up every stream."""
WEIGHT_SHARE = 0.5
"""Fraction of a node's memory for weights. The rest holds the cache of many requests, the purpose of replicas."""


@dataclass(frozen=True)
class ModelBytes:
    """The needs of a whole model in bytes: its weights, and the bytes that one token reads of them."""

    weights: int
    token: int


@dataclass(frozen=True)
class Division:
    """`dp` replicas of `tp` ranks. `reason`: one sentence about the numbers that were chosen automatically, if any."""

    tp: int
    dp: int
    reason: str | None = None


def divide(topology: Topology, tp: int | None, dp: int | None, model: Callable[[], ModelBytes]) -> Division:
    """Return the given numbers, with the best choice in place of None. `model` is called only if it matters."""
    nodes = auto_ranks(topology)
    if tp is not None and dp is not None:
        return Division(tp, dp)
    if dp is not None:
        return Division(max(1, nodes // dp), dp, f"{count(nodes, 'NUMA node')} for {dp} replicas" if dp > 1 else None)
    if tp is not None:
        return Division(tp, max(1, nodes // tp), f"{count(nodes, 'NUMA node')} for replicas of {tp} ranks")
    if nodes == 1:
        return Division(1, 1, "there is one NUMA node")
    return _by_size(nodes, _smallest_memory(topology), model())


def _by_size(nodes: int, memory: int, model: ModelBytes) -> Division:
    """Return replicas on the fewest nodes whose memory holds the weights and whose bandwidth reads them fast enough."""
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
    return Division(tp, nodes // tp, f"{count(nodes, 'NUMA node')}, {each}{refused}")


def _smallest_memory(topology: Topology) -> int:
    return min(topology.node(node).memory_total for node in topology.allowed_mems)
