"""Limits of this process's control group: CPUs, memory nodes, CPU time, bytes. Versions 1, 2 and both at once.

The file system is found through /proc/self/mountinfo and the group through /proc/self/cgroup. Every limit is looked up
from that group towards the root, since each ancestor limits as well. In a container without its own cgroup namespace
the path in /proc/self/cgroup is the host's, while the mount shows only the container's part; the root of the mount then
shows which part of the path to drop.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from .cpulist import read_cpulist, read_int, read_text

_UNLIMITED = 1 << 60  # version 1 writes "no limit" as a huge number, rounded to pages


@dataclass(frozen=True)
class CgroupLimits:
    """Limits of this process's group; None means that no group sets one."""

    cpus: tuple[int, ...] | None = None
    mems: tuple[int, ...] | None = None
    cpu_quota: float | None = None  # in CPUs: 2.5 is 250 ms of CPU time per 100 ms
    memory_limit: int | None = None  # bytes, of the group with the least room left
    memory_usage: int | None = None  # bytes used in that group, without droppable page cache

    @property
    def max_threads(self) -> int | None:
        """Return how many threads the CPU quota can keep busy: the quota rounded up, at least one."""
        return None if self.cpu_quota is None else max(1, math.ceil(self.cpu_quota))

    @property
    def memory_available(self) -> int | None:
        """Return how many bytes the group may still allocate."""
        if self.memory_limit is None or self.memory_usage is None:
            return None
        return max(0, self.memory_limit - self.memory_usage)

    def beside(self, nbytes: int) -> "CgroupLimits":
        """Return the limits that are left beside a process that may take so many bytes."""
        return self if self.memory_usage is None else replace(self, memory_usage=self.memory_usage + nbytes)


def read_limits(root: Path = Path("/")) -> CgroupLimits:
    """Return the limits of the calling process's group below `root` (a test's tree or "/")."""
    limit, usage = _memory(root)
    return CgroupLimits(
        cpus=_cpuset(root, "cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"),
        mems=_cpuset(root, "cpuset.mems.effective", "cpuset.effective_mems", "cpuset.mems"),
        cpu_quota=_cpu_quota(root),
        memory_limit=limit,
        memory_usage=usage,
    )


def oom_kills(root: Path = Path("/")) -> int:
    """Return how many processes of this group the kernel has killed for lack of memory.

    The count is that of the whole machine if the group has no counter, so only the difference of two calls is useful.
    """
    for version, group in _groups(root, "memory"):
        name = "memory.events" if version == 2 else "memory.oom_control"
        count = _keyed(group / name).get("oom_kill")
        if count is not None:
            return count
    return _keyed(root / "proc/vmstat").get("oom_kill", 0)


def _groups(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """Yield (version, directory) of this process's group for a controller and of its ancestors, innermost first.

    In a hybrid set-up a controller belongs to exactly one version. Version 1 is tried first; a version 2 tree without
    the controller lacks its files and so yields no limits.
    """
    paths: dict[str, str] = {}
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))  # the empty name is version 2
    for kind, mount_root, mount_point, options in _mounts(root):
        if kind == "cgroup" and controller in options and controller in paths:
            yield from ((1, group) for group in _chain(root, mount_root, mount_point, paths[controller]))
        elif kind == "cgroup2" and "" in paths:
            yield from ((2, group) for group in _chain(root, mount_root, mount_point, paths[""]))


def _mounts(root: Path) -> list[tuple[str, str, str, list[str]]]:
    """Return (kind, root within the file system, mount point, options) of every cgroup mount, version 1 before 2."""
    found = []
    for line in (read_text(root / "proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        fields, (kind, _, options) = before.split(), [*after.split(), "", "", ""][:3]
        if kind in ("cgroup", "cgroup2"):
            found.append((kind, fields[3], fields[4], options.split(",")))
    return sorted(found, key=lambda mount: mount[0])


def _chain(root: Path, mount_root: str, mount_point: str, path: str) -> Iterator[Path]:
    """Yield the group's directory and its ancestors up to the mount point."""
    top = root / mount_point.lstrip("/")
    prefix = mount_root.rstrip("/")
    inside = path[len(prefix) :] if path == prefix or path.startswith(prefix + "/") else ""
    parts = [part for part in inside.split("/") if part]
    if ".." in parts or not top.joinpath(*parts).is_dir():
        parts = []  # the group is outside of this namespace: only the mounted part is visible
    for depth in range(len(parts), -1, -1):
        yield top.joinpath(*parts[:depth])


def _cpuset(root: Path, v2_name: str, v1_effective: str, v1_name: str) -> tuple[int, ...] | None:
    for version, group in _groups(root, "cpuset"):
        for name in (v2_name,) if version == 2 else (v1_effective, v1_name):
            found = read_cpulist(group / name)
            if found:
                return found  # the effective set already respects the ancestors
    return None


def _cpu_quota(root: Path) -> float | None:
    quotas: list[float] = []
    for version, group in _groups(root, "cpu"):
        if version == 2:
            quota, _, period = (read_text(group / "cpu.max") or "max").partition(" ")
            if quota != "max":
                quotas.append(int(quota) / int(period or 100_000))
        else:
            used, period_us = read_int(group / "cpu.cfs_quota_us"), read_int(group / "cpu.cfs_period_us")
            if used is not None and used > 0 and period_us:
                quotas.append(used / period_us)
    return min(quotas, default=None)


def _memory(root: Path) -> tuple[int | None, int | None]:
    """Return (limit, usage) of the group among this one and its ancestors that has the least room left."""
    found: list[tuple[int, int]] = []
    for version, group in _groups(root, "memory"):
        limit = read_int(group / ("memory.max" if version == 2 else "memory.limit_in_bytes"))
        used = read_int(group / ("memory.current" if version == 2 else "memory.usage_in_bytes"))
        if limit is None or used is None or limit >= _UNLIMITED:
            continue
        stat, prefix = _keyed(group / "memory.stat"), "" if version == 2 else "total_"
        cache = stat.get(prefix + "inactive_file", 0) + stat.get(prefix + "active_file", 0)
        found.append((limit, max(0, used - cache)))
    return min(found, key=lambda pair: pair[0] - pair[1], default=(None, None))


def _keyed(path: Path) -> dict[str, int]:
    """Parse a file of "name number" lines."""
    pairs = (line.split() for line in (read_text(path) or "").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
