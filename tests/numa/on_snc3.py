"""The checks on two packages with three nodes each."""

import dataclasses
import os
import threading
from typing import Any

from tests.numa.checks import MIB, Memory, basics, bound_rank, fill_node, in_child, in_group, say, seen, server
from tilerank.launch.host.binding import bind
from tilerank.launch.host.cgroup import oom_kills
from tilerank.launch.host.placement import RankPlacement, auto_ranks, place
from tilerank.launch.host.topology import Topology, read_topology


def worker_pages(rank: RankPlacement) -> list[Any]:
    """Return [core, pages by node] of every worker. Each is pinned to its core and touches its own part."""
    bind(rank)
    found: list[Any] = []

    def work(core: int) -> None:
        os.sched_setaffinity(0, {core})
        found.append([core, Memory(MIB).pages()])

    for core in rank.pool_cores or ():
        thread = threading.Thread(target=work, args=(core,))
        thread.start()
        thread.join()
    return found


def started_by_mpirun(rank: RankPlacement) -> dict[str, Any]:
    """Narrow the mask to CPU 0, as mpirun does; the rank then widens it again."""
    os.sched_setaffinity(0, {0})
    topology = read_topology()
    return {
        "inherited": topology.inherited_cpus,
        "allowed": topology.allowed_cpus,
        "cpus": bind(place(topology, auto_ranks(topology)).ranks[rank.rank]).cpus,
    }


def filled(topology: Topology) -> dict[str, Any]:
    """Allocate more than the fullest node has, with the preferred policy and with the strict one."""
    fullest = min((node for node in topology.nodes if node.memory_total), key=lambda node: node.memory_free)
    size, kills = fullest.memory_free + 64 * MIB, oom_kills()
    preferred = in_child(fill_node, fullest.id, size, False)
    preferred_kills = oom_kills() - kills
    strict = in_child(fill_node, fullest.id, size, True)
    return {
        "node": fullest.id,
        "preferred": preferred,
        "preferred_kills": preferred_kills,
        "strict": strict,
        "strict_kills": oom_kills() - kills,
    }


def main() -> None:
    topology = read_topology()
    ranks = place(topology, auto_ranks(topology)).ranks
    one_node = {"cpuset.cpus": "0-1", "cpuset.mems": "1"}
    limits = one_node | {"cpu.max": "150000 100000", "memory.max": str(100 * MIB)}
    say(
        {
            **basics(),
            "first_touch": [in_child(bound_rank, dataclasses.replace(rank, mem_nodes=())) for rank in ranks],
            "workers": in_child(worker_pages, place(topology, 1).ranks[0]),
            "mpirun": in_child(started_by_mpirun, ranks[-1]),
            "fill": filled(topology),
            "group": in_group(limits, seen),
            "group_server": in_group(one_node, server, 1),
            "group_outside": in_group(one_node, bound_rank, ranks[-1]),
        }
    )


main()
