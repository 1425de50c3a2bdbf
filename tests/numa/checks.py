"""Checks for virtual machines: they do what a launcher does, and return the resulting state of the kernel as JSON.

Nothing is judged here; the test on the host does that (tests/launch/test_numa.py). on_*.py choose the checks of each
machine; every check runs in a separate process.
"""

import contextlib
import ctypes
import dataclasses
import json
import mmap
import os
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tilerank.launch.commands import doctor
from tilerank.launch.errors import LaunchError
from tilerank.launch.host.binding import bind, local_share, memory_policy_refusal, page_nodes
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
    memory = Memory(MIB)
    maps = subprocess.check_output(["busybox", "head", "-n1", "/proc/self/numa_maps"], text=True)
    status = subprocess.check_output(["busybox", "grep", "allowed_list", "/proc/self/status"], text=True).split()
    return {
        "cpus": sorted(os.sched_getaffinity(0)),
        "policy": binding.policy,
        "notes": binding.notes,
        "pages": memory.pages(),
        "numa_maps": numa_maps(memory.address),
        "local_share": local_share(memory.address, memory.size, rank.mem_nodes),
        "executed": {"policy": maps.split()[1], "cpus": status[1], "mems": status[3]},
    }


def fill_node(node: int, size: int, strict: bool) -> dict[str, Any]:
    """Allocate more memory than the node has."""
    bind(RankPlacement(0, (), (), (node,), 1, False, "test"), strict=strict)
    return {"pages": Memory(size, populate=True).pages()}


@contextlib.contextmanager
def group(name: str, settings: Mapping[str, str]) -> Iterator[Path]:
    """Make a version 2 control group for the time of the context."""
    (CGROUP / "cgroup.subtree_control").write_text("+cpuset +cpu +memory")
    directory = CGROUP / name
    directory.mkdir()
    for setting, value in settings.items():
        (directory / setting).write_text(value)
    yield directory
    directory.rmdir()


def inside(directory: Path, check: Callable[..., Any], *arguments: Any) -> Any:
    """Run a check in a process of a control group."""

    def join() -> Any:
        (directory / "cgroup.procs").write_text(str(os.getpid()))
        return check(*arguments)

    return in_child(join)


def in_group(settings: Mapping[str, str], check: Callable[..., Any], *arguments: Any) -> Any:
    """Run a check in a process of a new control group."""
    with group("job", settings) as directory:
        return inside(directory, check, *arguments)


def seen() -> dict[str, Any]:
    """Return the topology and the placement of one rank, as read in this process."""
    topology = read_topology()
    return {"topology": dataclasses.asdict(topology), "rank": dataclasses.asdict(place(topology, 1).ranks[0])}


def server(ranks: int, cores: str = "auto") -> dict[str, Any]:
    """Place and bind ranks in this process's part of the machine; return the sentences about it, and what the kernel
    says of each rank."""
    placement = place(read_topology(), ranks, cores)
    return {"notes": placement.notes, "ranks": [in_child(bound_rank, rank) for rank in placement.ranks]}


def placements() -> dict[int, Any]:
    """Return, by number of ranks, the cores and memory nodes of each rank."""
    topology = read_topology()
    return {n: [[rank.cores, rank.mem_nodes] for rank in place(topology, n).ranks] for n in (1, 2, 3, 4, 6, 20)}


def basics() -> dict[str, Any]:
    """Return what is read of the machine, how ranks are placed, and what the kernel says of one rank for each node."""
    topology = read_topology()
    found = doctor.machine_findings(topology, Path("/"), memory_policy_refusal())
    Path("/proc/sys/kernel/numa_balancing").write_text("0")  # pages must stay where the checks put them
    auto = auto_ranks(topology)
    return {
        **seen(),
        "auto": auto,
        "findings": [finding.what for finding in found],
        "placements": placements(),
        **server(auto),
    }


def say(answer: Mapping[str, Any]) -> None:
    """Print the answer for the test on the host."""
    print("ANSWER " + json.dumps(answer))
