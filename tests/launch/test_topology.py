"""Topology and control-group limits, read from simulated machines and from the one that runs the test."""

import os
from pathlib import Path

import pytest
from fake_sysfs import GIB, SNC3, Machine, sockets
from hypothesis import given
from hypothesis import strategies as st

from tilerank.launch.errors import LaunchError
from tilerank.launch.host.cgroup import oom_kills, read_limits
from tilerank.launch.host.cpulist import format_cpulist, parse_cpulist
from tilerank.launch.host.topology import read_topology

V1_MOUNTS = [f"/ /sys/fs/cgroup/{name} rw - cgroup cgroup rw,{name}" for name in ("cpuset", "cpu", "memory")]


@given(st.sets(st.integers(0, 300), min_size=1))
def test_cpulist_round_trip(ids: set[int]) -> None:
    assert parse_cpulist(format_cpulist(ids)) == tuple(sorted(ids))


@pytest.mark.parametrize(
    ("text", "ids"), [("0-3,8", (0, 1, 2, 3, 8)), (" 5 \n", (5,)), ("", ()), ("3,1-2,2", (1, 2, 3)), ("0-0", (0,))]
)
def test_cpulist(text: str, ids: tuple[int, ...]) -> None:
    assert parse_cpulist(text) == ids


@pytest.mark.parametrize("text", ["3-1", "a", "1,,2", "-1", "1-", "0-99999999999", "1 2", "²", "0x3"])
def test_cpulist_malformed(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_cpulist(text)


@pytest.mark.parametrize("packages", range(1, 9))
def test_sockets(tmp_path: Path, packages: int) -> None:
    topology = read_topology(sockets(packages, 20, threads=2).write(tmp_path))
    assert topology.packages == tuple(range(packages))
    assert topology.nodes_per_package == 1
    assert len(topology.cores) == 20 * packages
    assert topology.cores[0].threads == (0, 20 * packages)  # the second threads come after all the first ones
    assert topology.allowed_cpus == topology.online == tuple(range(40 * packages))
    assert topology.allowed_mems == tuple(range(packages))
    assert topology.nodes[-1].memory_total == 64 * GIB
    if packages > 1:
        assert topology.nodes[0].distances[1] == 21


def test_snc3(tmp_path: Path) -> None:
    topology = read_topology(Machine(SNC3, threads=2).write(tmp_path))
    assert topology.nodes_per_package == 3
    assert [sum(core.node == n for core in topology.cores) for n in range(6)] == [43, 43, 42, 43, 43, 42]
    assert [node.package for node in topology.nodes] == [0, 0, 0, 1, 1, 1]
    assert dict(topology.nodes[1].distances) == {0: 12, 1: 10, 2: 12, 3: 21, 4: 21, 5: 21}


def test_adjacent_siblings(tmp_path: Path) -> None:
    topology = read_topology(Machine([(0, 4)], threads=2, adjacent=True).write(tmp_path))
    assert [core.threads for core in topology.cores] == [(0, 1), (2, 3), (4, 5), (6, 7)]


def test_offline_siblings(tmp_path: Path) -> None:
    topology = read_topology(Machine([(0, 4)], threads=2, offline=frozenset({0, 5, 3, 7})).write(tmp_path))
    assert topology.offline == (0, 3, 5, 7)
    assert [core.threads for core in topology.cores] == [(1,), (2, 6), (4,)]  # cores 1, 2, 0; core 3 is gone


def test_cpus_that_may_be_plugged_in_are_not_offline(tmp_path: Path) -> None:
    root = Machine([(0, 4)], offline=frozenset({3})).write(tmp_path)
    (root / "sys/devices/system/cpu/offline").write_text("3-63\n")
    assert read_topology(root).offline == (3,)


def test_node_without_cpus_or_memory(tmp_path: Path) -> None:
    machine = Machine([(0, 8), (1, 8), (0, 0)], memory={1: 0, 2: 128 * GIB}, remote={(0, 2): 14, (1, 2): 24})
    topology = read_topology(machine.write(tmp_path))
    assert topology.allowed_mems == (0, 2)
    assert topology.nodes[2].package is None
    assert topology.nodes[2].cpus == ()
    assert topology.nearest_memory(0) == 0
    assert topology.nearest_memory(1) == 0  # 21, the memory-only node is at 24


def test_no_numa_support(tmp_path: Path) -> None:
    root = sockets(1, 4).write(tmp_path)
    for path in sorted((root / "sys/devices/system/node").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    topology = read_topology(root)
    assert [(node.id, node.cpus) for node in topology.nodes] == [(0, (0, 1, 2, 3))]
    assert topology.allowed_mems == (0,)
    assert topology.nodes[0].memory_total == 64 * GIB


def test_isolated_cores_are_left_alone(tmp_path: Path) -> None:
    topology = read_topology(Machine([(0, 8)], isolated="3", affinity="0-2,4-7").write(tmp_path))
    assert 3 in topology.allowed_cpus
    assert [core.threads[0] for core in topology.usable_cores()] == [0, 1, 2, 4, 5, 6, 7]


def test_cpuset_not_affinity(tmp_path: Path) -> None:
    """mpirun left one core, but only the cpuset limits what may be used."""
    machine = sockets(2, 4)
    machine.affinity = "1"
    machine.cgroup = {"sys/fs/cgroup/cpuset.cpus.effective": "0-5", "sys/fs/cgroup/cpuset.mems.effective": "0-1"}
    topology = read_topology(machine.write(tmp_path))
    assert topology.inherited_cpus == (1,)
    assert topology.allowed_cpus == (0, 1, 2, 3, 4, 5)


def test_v2_limits_come_from_ancestors(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/kubepods/pod1/c1"
    machine = sockets(2, 4)
    machine.cgroup_paths = ["0::/kubepods/pod1/c1"]
    machine.cgroup = {
        f"{group}/cpu.max": "max 100000",
        "sys/fs/cgroup/kubepods/pod1/cpu.max": "250000 100000",
        "sys/fs/cgroup/kubepods/cpuset.cpus.effective": "4-7",
        "sys/fs/cgroup/kubepods/cpuset.mems.effective": "1",
        f"{group}/memory.max": str(8 * GIB),
        f"{group}/memory.current": str(5 * GIB),
        f"{group}/memory.stat": f"anon {GIB}\nactive_file {GIB}\ninactive_file {2 * GIB}",
        f"{group}/memory.events": "low 0\noom 4\noom_kill 3\noom_group_kill 9",
        "sys/fs/cgroup/kubepods/pod1/memory.max": str(4 * GIB),
        "sys/fs/cgroup/kubepods/pod1/memory.current": str(3 * GIB),
        "sys/fs/cgroup/kubepods/memory.max": "max",
        "sys/fs/cgroup/kubepods/memory.current": str(9 * GIB),
    }
    topology = read_topology(machine.write(tmp_path))
    assert topology.allowed_cpus == (4, 5, 6, 7)
    assert topology.allowed_mems == (1,)
    limits = topology.limits
    assert (limits.cpu_quota, limits.max_threads) == (2.5, 3)
    assert (limits.memory_limit, limits.memory_usage) == (4 * GIB, 3 * GIB)  # 1 GiB left, the inner group has 6
    assert limits.beside(GIB // 4).memory_available == GIB * 3 // 4
    assert limits.memory_available == GIB
    assert oom_kills(tmp_path) == 3


def test_v2_usage_without_page_cache(tmp_path: Path) -> None:
    machine = sockets(1, 2)
    machine.cgroup = {
        "sys/fs/cgroup/memory.max": str(8 * GIB),
        "sys/fs/cgroup/memory.current": str(7 * GIB),
        "sys/fs/cgroup/memory.stat": f"active_file {GIB}\ninactive_file {2 * GIB}",
    }
    assert read_limits(machine.write(tmp_path)).memory_available == 4 * GIB


def test_v1_limits(tmp_path: Path) -> None:
    machine = sockets(2, 4)
    machine.mounts = V1_MOUNTS
    machine.cgroup_paths = ["3:cpuset:/job", "2:cpu:/job/step", "4:memory:/job"]
    machine.cgroup = {
        "sys/fs/cgroup/cpuset/job/cpuset.effective_cpus": "0-2",
        "sys/fs/cgroup/cpuset/job/cpuset.effective_mems": "0",
        "sys/fs/cgroup/cpu/job/step/cpu.cfs_quota_us": "-1",
        "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "50000",
        "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(2 * GIB),
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": str(GIB),
        "sys/fs/cgroup/memory/job/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 2}",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(20 * GIB),
        "sys/fs/cgroup/memory/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2",
    }
    topology = read_topology(machine.write(tmp_path))
    assert topology.allowed_cpus == (0, 1, 2)
    assert topology.allowed_mems == (0,)
    assert (topology.limits.cpu_quota, topology.limits.max_threads) == (0.5, 1)
    assert topology.limits.memory_available == 2 * GIB - GIB // 2
    assert oom_kills(tmp_path) == 2


def test_container_that_sees_the_hosts_path(tmp_path: Path) -> None:
    """Docker with version 1 and no cgroup namespace: the path is the host's, the mount is the container's group."""
    machine = sockets(1, 8)
    machine.mounts = ["/docker/abc /sys/fs/cgroup/cpuset ro - cgroup cgroup rw,cpuset"]
    machine.cgroup_paths = ["3:cpuset:/docker/abc"]
    machine.cgroup = {"sys/fs/cgroup/cpuset/cpuset.effective_cpus": "2-3"}
    assert read_topology(machine.write(tmp_path)).allowed_cpus == (2, 3)


def test_process_outside_of_its_namespace(tmp_path: Path) -> None:
    machine = sockets(1, 8)
    machine.cgroup_paths = ["0::/../../other"]
    machine.cgroup = {"sys/fs/cgroup/cpuset.cpus.effective": "6"}
    assert read_topology(machine.write(tmp_path)).allowed_cpus == (6,)


def test_hybrid(tmp_path: Path) -> None:
    machine = sockets(1, 8)
    machine.mounts = ["/ /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw", *V1_MOUNTS]
    machine.cgroup_paths = ["3:cpuset:/a", "2:cpu:/", "0::/a"]
    machine.cgroup = {
        "sys/fs/cgroup/cpuset/a/cpuset.effective_cpus": "1-2",
        "sys/fs/cgroup/unified/a/cgroup.procs": "1",
        "proc/vmstat": "nr_free_pages 7\noom_kill 5",
    }
    topology = read_topology(machine.write(tmp_path))
    assert topology.allowed_cpus == (1, 2)
    assert topology.limits.cpu_quota is None
    assert oom_kills(tmp_path) == 5  # no group counts, so the machine's counter


def test_nothing_allowed(tmp_path: Path) -> None:
    machine = sockets(1, 2)
    machine.cgroup = {"sys/fs/cgroup/cpuset.cpus.effective": "5"}
    with pytest.raises(LaunchError, match="no usable CPU: online are 0-1, the cpuset has 5"):
        read_topology(machine.write(tmp_path))


def test_this_machine() -> None:
    topology = read_topology()
    assert set(os.sched_getaffinity(0)) <= set(topology.online)
    assert topology.inherited_cpus == tuple(sorted(os.sched_getaffinity(0)))
    assert sorted(topology.online) == sorted({cpu for core in topology.cores for cpu in core.threads})
    assert len(topology.online) == os.sysconf("SC_NPROCESSORS_ONLN")
    assert sum(node.memory_total for node in topology.nodes) <= 1.01 * os.sysconf("SC_PHYS_PAGES") * os.sysconf(
        "SC_PAGE_SIZE"
    )
