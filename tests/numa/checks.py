"""Runs inside the virtual machine: does what a launcher does, and prints the resulting state of the kernel as JSON.

Nothing is judged here; the test on the host does that (tests/launch/test_numa.py). Every check runs in a separate
process.
"""

import ctypes
import dataclasses
import json
import mmap
import os
import re
import subprocess
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tilerank.launch.commands import doctor
from tilerank.launch.errors import LaunchError
from tilerank.launch.host.binding import bind, local_share, memory_policy_refusal, page_nodes
from tilerank.launch.host.cgroup import oom_kills
from tilerank.launch.host.placement import RankPlacement, auto_ranks, place
from tilerank.launch.host.topology import read_topology

CGROUP = Path("/sys/fs/cgroup")
MIB = 1 << 20


def in_child(check: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of the check in a forked process; {"error": ...} if it raised, {"code": ...} if it died."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            result = check(*arguments)
        except LaunchError as error:
            result = {"error": str(error)}
        os.write(write, json.dumps(result).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    return json.loads(text) if text else {"code": os.waitstatus_to_exitcode(status)}


class Memory:
    """Anonymous memory of small pages, so that threads never share one; touched page by page unless `populate`."""

    def __init__(self, size: int, *, populate: bool = False) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (mmap.MAP_POPULATE if populate else 0)
        self.size, self.map = size, mmap.mmap(-1, size, flags=flags)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        if not populate:
            self.map.madvise(mmap.MADV_NOHUGEPAGE)
            for offset in range(0, size, mmap.PAGESIZE):
                self.map[offset] = 1

    def pages(self) -> dict[int | None, int]:
        """Return the number of pages by node, from move_pages."""
        return dict(Counter(page_nodes(self.address, self.size)))


def numa_maps(address: int) -> dict[str, int]:
    """Return the number of pages by node of the mapping at an address, from numa_maps."""
    for line in Path("/proc/self/numa_maps").read_text().splitlines():
        if int(line.split()[0], 16) == address:
            return {node: int(pages) for node, pages in re.findall(r" N(\d+)=(\d+)", line)}
    return {}


def bound_rank(rank: RankPlacement) -> dict[str, Any]:
    """Bind as a rank does; return where it runs, where its memory is, and what a program that it starts inherits."""
    binding = bind(rank)
    memory = Memory(4 * MIB)
    maps = subprocess.check_output(["busybox", "head", "-n1", "/proc/self/numa_maps"], text=True)
    status = subprocess.check_output(["busybox", "grep", "Cpus_allowed_list", "/proc/self/status"], text=True)
    return {
        "cpus": sorted(os.sched_getaffinity(0)),
        "policy": binding.policy,
        "notes": binding.notes,
        "pages": memory.pages(),
        "numa_maps": numa_maps(memory.address),
        "local_share": local_share(memory.address, memory.size, rank.mem_nodes),
        "executed": {"policy": maps.split()[1], "cpus": status.split()[1]},
    }


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


def fill_node(node: int, size: int, strict: bool) -> dict[str, Any]:
    """Allocate more memory than the node has."""
    bind(RankPlacement(0, (), (), (node,), 1, False, "test"), strict=strict)
    return {"pages": Memory(size, populate=True).pages()}


def in_group(settings: dict[str, str], check: Callable[..., Any], *arguments: Any) -> Any:
    """Run a check in a new version 2 control group."""
    group = CGROUP / "job"
    group.mkdir(exist_ok=True)
    for name, value in settings.items():
        (group / name).write_text(value)

    def joined() -> Any:
        (group / "cgroup.procs").write_text(str(os.getpid()))
        return check(*arguments)

    result = in_child(joined)
    group.rmdir()
    return result


def seen() -> dict[str, Any]:
    """Return the topology and the placement of one rank, as read in this process."""
    topology = read_topology()
    return {"topology": dataclasses.asdict(topology), "rank": dataclasses.asdict(place(topology, 1).ranks[0])}


def bound_in_group() -> dict[str, Any]:
    return bound_rank(place(read_topology(), 1).ranks[0])


def placements() -> dict[int, Any]:
    """Return, by number of ranks, the cores and memory nodes of each rank."""
    topology = read_topology()
    return {n: [[rank.cores, rank.mem_nodes] for rank in place(topology, n).ranks] for n in (1, 2, 3, 4, 6, 20)}


def started_by_mpirun(rank: RankPlacement) -> dict[str, Any]:
    """Narrow the mask to CPU 0, as mpirun does; the rank then widens it again."""
    os.sched_setaffinity(0, {0})
    topology = read_topology()
    return {
        "inherited": topology.inherited_cpus,
        "allowed": topology.allowed_cpus,
        "cpus": bind(place(topology, auto_ranks(topology)).ranks[rank.rank]).cpus,
    }


def main() -> None:
    topology = read_topology()
    ranks = place(topology, auto_ranks(topology)).ranks
    fullest = min((node for node in topology.nodes if node.memory_total), key=lambda node: node.memory_free)
    answer: dict[str, Any] = {
        **seen(),
        "auto": len(ranks),
        "findings": [f.what for f in doctor.machine_findings(topology, Path("/"), memory_policy_refusal())],
        "placements": placements(),
    }
    Path("/proc/sys/kernel/numa_balancing").write_text("0")  # pages must stay where the checks put them
    answer["ranks"] = [in_child(bound_rank, rank) for rank in ranks]
    answer["first_touch"] = [in_child(bound_rank, dataclasses.replace(rank, mem_nodes=())) for rank in ranks]
    answer["workers"] = in_child(worker_pages, place(topology, 1).ranks[0])
    answer["mpirun"] = in_child(started_by_mpirun, ranks[-1])

    size = fullest.memory_total * 5 // 4
    kills = oom_kills()
    answer["fill"] = {"node": fullest.id, "preferred": in_child(fill_node, fullest.id, size, False)}
    answer["fill"]["preferred_kills"] = oom_kills() - kills
    answer["fill"]["strict"] = in_child(fill_node, fullest.id, size, True)
    answer["fill"]["strict_kills"] = oom_kills() - kills

    (CGROUP / "cgroup.subtree_control").write_text("+cpuset +cpu +memory")
    limits = {"cpuset.cpus": "0-1", "cpuset.mems": "1", "cpu.max": "150000 100000", "memory.max": str(100 * MIB)}
    answer["group"] = in_group(limits, seen)
    answer["group_rank"] = in_group({"cpuset.cpus": "0-1", "cpuset.mems": "1"}, bound_in_group)
    answer["group_outside"] = in_group({"cpuset.cpus": "0-1", "cpuset.mems": "1"}, bound_rank, ranks[-1])

    last = topology.online[-1]
    Path(f"/sys/devices/system/cpu/cpu{last}/online").write_text("0")
    answer["offline"] = in_child(seen)
    print("ANSWER " + json.dumps(answer))


main()
