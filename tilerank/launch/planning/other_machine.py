"""A machine that options describe, which `tilerank plan` plans for instead of the one that it runs on."""

from __future__ import annotations

from dataclasses import replace

from ..errors import LaunchError
from ..host.cgroup import CgroupLimits
from ..host.topology import Core, Node, Topology
from .plan_types import Plan

MAX_NODES = 64
_CORES = 60
"""Cores of a node in the arithmetic, which divide evenly over up to six ranks. No plan shows them."""


def described_machine(nodes: int | None, node_bytes: int | None) -> Topology | None:
    """Return an idle machine with so many equal NUMA nodes and bytes on each; None if neither is given.

    Raises LaunchError if one is given without the other.
    """
    if nodes is None and node_bytes is None:
        return None
    if nodes is None or not node_bytes:
        raise LaunchError("--nodes and --node-memory describe a machine together: expected both, above 0")
    return idle_machine(nodes, node_bytes, _CORES)


def idle_machine(nodes: int, node_bytes: int, cores_of_node: int) -> Topology:
    """Return an idle machine of equal NUMA nodes."""
    cores = tuple(Core((cpu,), cpu // cores_of_node, cpu // cores_of_node) for cpu in range(nodes * cores_of_node))
    cpus = tuple(range(len(cores)))
    distances = dict.fromkeys(range(nodes), 20)
    return Topology(
        nodes=tuple(
            Node(
                node,
                node,
                cpus[node * cores_of_node :][:cores_of_node],
                node_bytes,
                node_bytes,
                {**distances, node: 10},
            )
            for node in range(nodes)
        ),
        cores=cores,
        offline=(),
        isolated=(),
        allowed_cpus=cpus,
        allowed_mems=tuple(range(nodes)),
        inherited_cpus=cpus,
        limits=CgroupLimits(),
    )


def without_cores(plan: Plan) -> Plan:
    """Return a plan for a described machine, which says on which nodes ranks run, and nothing of its cores."""
    ranks = tuple(
        replace(
            rank,
            placement=replace(rank.placement, cores=(), affinity=(), threads=0, pinned=False, reason="cores not known"),
        )
        for rank in plan.ranks
    )
    return replace(plan, ranks=ranks, notes=())
