"""The machine as a rank sees it: packages, NUMA nodes, cores, and the part of them that this process may use.

Read from sysfs and proc below a given root, with the standard library alone. The allowed part is the cpuset of the
control group and not the affinity mask: mpirun binds to one core by default, and a process may widen its own mask
again. In a container that does not show its control group, the kernel is asked how far.
"""

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..errors import LaunchError
from .cgroup import CgroupLimits, read_limits
from .cpulist import format_cpulist, parse_cpulist, read_cpulist, read_fields, read_int, read_text

_MAX_CPUS = 8192  # the most that x86 Linux can be built with


@dataclass(frozen=True)
class Core:
    """A physical core: its online hardware threads (logical CPU numbers, lowest first) and where it is."""

    threads: tuple[int, ...]
    node: int
    package: int


@dataclass(frozen=True)
class Node:
    """A NUMA node. `package` is None for one without CPUs (CXL, HBM); `memory_total` is 0 for one without memory."""

    id: int
    package: int | None
    cpus: tuple[int, ...]  # online
    memory_total: int  # bytes
    memory_free: int  # bytes: free pages and page cache that can be dropped
    distances: Mapping[int, int] = field(default_factory=dict)  # node id -> distance, 10 is local


@dataclass(frozen=True)
class Topology:
    """The input of `placement.place`, and what `doctor` prints."""

    nodes: tuple[Node, ...]
    cores: tuple[Core, ...]  # online, ordered by package, node, first thread
    offline: tuple[int, ...]
    isolated: tuple[int, ...]  # isolcpus=: not used unless requested, or nothing else is allowed
    allowed_cpus: tuple[int, ...]  # online and in the cgroup's cpuset
    allowed_mems: tuple[int, ...]  # nodes with memory that the cpuset lets us use
    inherited_cpus: tuple[int, ...]  # online and in the affinity mask this process was started with
    limits: CgroupLimits

    @property
    def online(self) -> tuple[int, ...]:
        return tuple(sorted(cpu for core in self.cores for cpu in core.threads))

    @property
    def packages(self) -> tuple[int, ...]:
        return tuple(sorted({core.package for core in self.cores}))

    @property
    def nodes_per_package(self) -> int:
        """Return 1 without sub-NUMA clustering, 2 or 3 with SNC2 or SNC3."""
        return max(len({c.node for c in self.cores if c.package == p}) for p in self.packages)

    def node(self, node_id: int) -> Node:
        return next(node for node in self.nodes if node.id == node_id)

    def nearest_memory(self, node_id: int) -> int:
        """Return the nearest allowed node with memory, if possible the node itself; the lower id among equals."""
        distances = self.node(node_id).distances
        return min(self.allowed_mems, key=lambda m: (m != node_id, distances.get(m, 255), m))

    @property
    def usable_cpus(self) -> set[int]:
        """Return the allowed CPUs, without the isolated ones unless all are."""
        allowed = set(self.allowed_cpus)
        return allowed - set(self.isolated) or allowed

    def usable_cores(self) -> tuple[Core, ...]:
        """Return the cores with usable CPUs, reduced to these."""
        usable, found = self.usable_cpus, []
        for core in self.cores:
            threads = tuple(cpu for cpu in core.threads if cpu in usable)
            if threads:
                found.append(Core(threads, core.node, core.package))
        return tuple(found)


def read_topology(root: Path = Path("/")) -> Topology:
    """Read the machine below `root`. LaunchError if no CPU or no memory node may be used."""
    system = root / "sys/devices/system"
    status = read_fields(root / "proc/self/status")
    inherited = parse_cpulist(status.get("Cpus_allowed_list", ""))
    online = read_cpulist(system / "cpu/online") or inherited
    nodes = _nodes(root, system, online)
    limits = read_limits(root)
    if limits.cpus is None and root == Path("/"):
        limits = replace(limits, cpus=_widest_mask())
    allowed = _restrict(online, limits.cpus)
    if not allowed:
        raise LaunchError(f"no usable CPU: online are {format_cpulist(online)}, the cpuset has {_text(limits.cpus)}")
    with_memory = [node.id for node in nodes if node.memory_total]
    own_mems = status.get("Mems_allowed_list")
    mems = _restrict(_restrict(with_memory, limits.mems), parse_cpulist(own_mems) if own_mems else None)
    if not mems:
        found = f"memory is on nodes {format_cpulist(with_memory)}, the cpuset has {_text(limits.mems)}"
        raise LaunchError(f"no usable memory node: {found}")
    # The kernel lists CPUs that may be plugged in later as offline, too.
    offline = read_cpulist(system / "cpu/offline") or ()
    return Topology(
        nodes=nodes,
        cores=_cores(system, online, nodes),
        offline=_restrict(offline, read_cpulist(system / "cpu/present")),
        isolated=read_cpulist(system / "cpu/isolated") or (),
        allowed_cpus=allowed,
        allowed_mems=mems,
        inherited_cpus=_restrict(inherited, online) or online,
        limits=limits,
    )


def _widest_mask() -> tuple[int, ...] | None:
    """Return the CPUs that the kernel lets this process use, None if it refuses to change masks.

    A thread widens its own mask and ends, so that the mask of the process stays as it is.
    """

    def widen() -> tuple[int, ...] | None:
        try:
            os.sched_setaffinity(0, range(_MAX_CPUS))
        except PermissionError:
            return None
        return tuple(sorted(os.sched_getaffinity(0)))

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(widen).result()


def _restrict(ids: Iterable[int], to: tuple[int, ...] | None) -> tuple[int, ...]:
    return tuple(sorted(set(ids) if to is None else set(ids) & set(to)))


def _text(ids: tuple[int, ...] | None) -> str:
    return "no limit" if ids is None else format_cpulist(ids)


def _nodes(root: Path, system: Path, online: tuple[int, ...]) -> tuple[Node, ...]:
    """Return the online nodes; a single node for the whole machine if the kernel has no NUMA support."""
    ids = read_cpulist(system / "node/online")
    if ids is None:
        ids = tuple(sorted(int(p.name[4:]) for p in (system / "node").glob("node[0-9]*")))
    if not ids:
        total, free = _meminfo(read_text(root / "proc/meminfo") or "")
        return (Node(0, _package(system, online[0]) if online else None, online, total, free, {0: 10}),)
    nodes = []
    for i in ids:
        directory = system / f"node/node{i}"
        cpus = _restrict(read_cpulist(directory / "cpulist") or (), online)
        total, free = _meminfo(read_text(directory / "meminfo") or "")
        distances = [int(d) for d in (read_text(directory / "distance") or "").split()]
        package = _package(system, cpus[0]) if cpus else None
        # The kernel prints one distance per online node, so a gap in the ids is no gap in the list.
        nodes.append(Node(i, package, cpus, total, free, dict(zip(ids, distances, strict=False))))
    with_memory = [index for index, node in enumerate(nodes) if node.memory_total]
    if len(with_memory) == 1:
        # Some virtual machines with memory balloons or hotplug count only part of the memory on the node.
        total, free = _meminfo(read_text(root / "proc/meminfo") or "")
        node = nodes[with_memory[0]]
        nodes[with_memory[0]] = replace(
            node, memory_total=max(node.memory_total, total), memory_free=max(node.memory_free, free)
        )
    return tuple(nodes)


def _meminfo(text: str) -> tuple[int, int]:
    """Return (total, free or droppable) bytes from a node's or the machine's meminfo."""
    kib: dict[str, int] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        kib[name.split()[-1]] = int(value.split()[0])  # "Node 0 MemTotal" or "MemTotal"
    droppable = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")
    return kib.get("MemTotal", 0) * 1024, sum(kib.get(name, 0) for name in droppable) * 1024


def _package(system: Path, cpu: int) -> int:
    found = read_int(system / f"cpu/cpu{cpu}/topology/physical_package_id")
    return found if found is not None and found >= 0 else 0  # -1: the firmware does not say


def _cores(system: Path, online: tuple[int, ...], nodes: tuple[Node, ...]) -> tuple[Core, ...]:
    """Return cores from the thread siblings that the kernel lists, never from the parity of CPU numbers."""
    node_of = {cpu: node.id for node in nodes for cpu in node.cpus}
    seen: set[int] = set()
    cores = []
    for cpu in online:
        if cpu in seen:
            continue
        siblings = read_cpulist(system / f"cpu/cpu{cpu}/topology/thread_siblings_list") or (cpu,)
        threads = _restrict({*siblings, cpu}, online)
        seen.update(threads)
        cores.append(Core(threads, node_of.get(cpu, nodes[0].id), _package(system, cpu)))
    return tuple(sorted(cores, key=lambda core: (core.package, core.node, core.threads)))
