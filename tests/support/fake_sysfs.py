"""Writes the sysfs, proc and cgroup files of a simulated machine below a directory, in the layout of the kernel."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tilerank.launch.host.cpulist import format_cpulist

GIB = 1 << 30


@dataclass
class Machine:
    """`cores` has, for each node, its package and its number of physical cores; 0 cores is a memory-only node.

    CPUs are numbered as firmware does it: first one thread of every core, node after node, then all second threads.
    """

    cores: Sequence[tuple[int, int]]
    threads: int = 1
    memory: Mapping[int, int] = field(default_factory=dict)  # node -> bytes, by default 64 GiB
    offline: frozenset[int] = frozenset()
    isolated: str = ""
    cgroup: Mapping[str, str] = field(default_factory=dict)  # path below / -> content
    cgroup_paths: Sequence[str] = ("0::/",)
    mounts: Sequence[str] = ("/ /sys/fs/cgroup rw - cgroup2 cgroup2 rw",)
    affinity: str = ""  # Cpus_allowed_list, by default all online CPUs
    mems_allowed: str = ""
    remote: Mapping[tuple[int, int], int] = field(default_factory=dict)  # distances other than 10 / 12 / 21
    adjacent: bool = False  # siblings numbered 0,1 2,3 instead

    def cpus_of(self, node: int) -> list[list[int]]:
        """Return, for each core of a node, the CPU numbers of its threads, offline ones included."""
        total, start = sum(n for _, n in self.cores), sum(n for _, n in self.cores[:node])
        if self.adjacent:
            return [
                [core * self.threads + t for t in range(self.threads)]
                for core in range(start, start + self.cores[node][1])
            ]
        return [[core + t * total for t in range(self.threads)] for core in range(start, start + self.cores[node][1])]

    def write(self, root: Path) -> Path:
        nodes = range(len(self.cores))
        every = sorted(cpu for node in nodes for core in self.cpus_of(node) for cpu in core)
        online = [cpu for cpu in every if cpu not in self.offline]
        system = "sys/devices/system"
        _put(root, f"{system}/cpu/online", format_cpulist(online))
        _put(root, f"{system}/cpu/present", format_cpulist(every))
        _put(root, f"{system}/cpu/offline", format_cpulist(self.offline) if self.offline else "")
        _put(root, f"{system}/cpu/isolated", self.isolated)
        _put(root, f"{system}/node/online", format_cpulist(nodes))
        for node in nodes:
            self._write_node(root, f"{system}/node/node{node}", node)
            for core in self.cpus_of(node):
                present = [cpu for cpu in core if cpu not in self.offline]
                for cpu in present:  # the kernel removes the topology directory of an offline CPU
                    _put(root, f"{system}/cpu/cpu{cpu}/topology/physical_package_id", str(self.cores[node][0]))
                    _put(root, f"{system}/cpu/cpu{cpu}/topology/thread_siblings_list", format_cpulist(present))
        total = sum(self._memory(node) for node in nodes) // 1024
        _put(root, "proc/meminfo", f"MemTotal: {total} kB\nMemFree: {total // 2} kB\n")
        affinity, mems = self.affinity or format_cpulist(online), self.mems_allowed or format_cpulist(nodes)
        _put(root, "proc/self/status", f"Name:\tpython\nCpus_allowed_list:\t{affinity}\nMems_allowed_list:\t{mems}\n")
        _put(root, "proc/self/cgroup", "\n".join(self.cgroup_paths))
        _put(root, "proc/self/mountinfo", "\n".join(f"30 20 0:26 {mount}" for mount in self.mounts))
        for path, text in self.cgroup.items():
            _put(root, path, text)
        return root

    def _memory(self, node: int) -> int:
        return self.memory.get(node, 64 * GIB)

    def _write_node(self, root: Path, directory: str, node: int) -> None:
        present = [cpu for core in self.cpus_of(node) for cpu in core if cpu not in self.offline]
        _put(root, f"{directory}/cpulist", format_cpulist(present) if present else "")
        kib = self._memory(node) // 1024
        _put(root, f"{directory}/meminfo", f"Node {node} MemTotal: {kib} kB\nNode {node} MemFree: {kib // 2} kB\n")
        _put(
            root,
            f"{directory}/distance",
            " ".join(str(self._distance(node, other)) for other in range(len(self.cores))),
        )

    def _distance(self, a: int, b: int) -> int:
        same = 12 if self.cores[a][0] == self.cores[b][0] else 21
        return 10 if a == b else self.remote.get((a, b), self.remote.get((b, a), same))


def sockets(packages: int, cores: int, threads: int = 1) -> Machine:
    """One node per package."""
    return Machine([(p, cores) for p in range(packages)], threads)


SNC3 = [(0, 43), (0, 43), (0, 42), (1, 43), (1, 43), (1, 42)]  # 2 x Xeon 6980P


def _put(root: Path, path: str, text: str) -> None:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text + "\n")
