"""Binding for real. Each case runs in a separate process, since affinity and policy cannot always be undone."""

import contextlib
import ctypes
import json
import mmap
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_sysfs import Machine, sockets

from tilerank.launch.host.binding import (
    huge_pages,
    inherited_notes,
    local_memory,
    local_share,
    memory_policy_refusal,
    page_nodes,
)
from tilerank.launch.host.placement import place
from tilerank.launch.host.topology import read_topology

PRELUDE = """
import ctypes, json, os, struct, subprocess, sys
from pathlib import Path
from tilerank.launch.host.binding import *
from tilerank.launch.host.cgroup import oom_kills
from tilerank.launch.errors import LaunchError
from tilerank.launch.host.placement import RankPlacement, place
from tilerank.launch.host.topology import read_topology

def to(*cpus, nodes=(0,)):
    return RankPlacement(3, cpus, cpus, nodes, len(cpus), True, "test")

def refuse(*numbers):  # a seccomp filter that answers EPERM to these system calls, as Docker's default profile does
    code = [struct.pack("HBBI", 0x20, 0, 0, 0)]
    for n in numbers:
        code += [struct.pack("HBBI", 0x15, 0, 1, n), struct.pack("HBBI", 0x06, 0, 0, 0x00050001)]
    code = b"".join(code) + struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000)
    buffer = ctypes.create_string_buffer(code)
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer)))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, program, 0, 0) == 0, os.strerror(ctypes.get_errno())

def answer(**values):
    print(json.dumps(values))
"""
NUMA_CALLS = "refuse(237, 238, 239, 279)"  # mbind, set_mempolicy, get_mempolicy, move_pages

needs_two = pytest.mark.skipif(len(read_topology().allowed_cpus) < 2, reason="needs two CPUs")


def child(code: str, group: Path | None = None) -> Any:
    """Run code in a new process, inside a version 1 control group if given, and return what it passed to `answer`."""
    join = f"Path({str(group)!r}, 'cgroup.procs').write_text(str(os.getpid()))\n" if group else ""
    script = PRELUDE + join + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@contextlib.contextmanager
def v1_group(controller: str, **settings: object) -> Iterator[Path]:
    """Create a version 1 control group; skip if there is no such controller or we are not root."""
    top = Path("/sys/fs/cgroup") / controller
    if not (top / "cgroup.procs").exists():
        pytest.skip(f"no version 1 {controller} controller on this machine")
    group = top / f"tilerank-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"cannot make a control group: {error.strerror}")
    try:
        for name, value in settings.items():
            (group / f"{controller}.{name}").write_text(str(value))
        yield group
    finally:
        group.rmdir()


@needs_two
def test_affinity_and_policy_survive_exec() -> None:
    last = read_topology().allowed_cpus[-1]
    found = child(f"""
        bound = bind(to({last}))
        look = "import os; print(*os.sched_getaffinity(0), open('/proc/self/numa_maps').readline().split()[1])"
        out = subprocess.check_output([sys.executable, "-c", look], text=True).split()
        answer(cpus=bound.cpus, policy=bound.policy, notes=bound.notes, child_cpus=out[:-1], child_policy=out[-1])
    """)
    assert found["cpus"] == [last]
    assert found["child_cpus"] == [str(last)]
    if memory_policy_refusal() is None:
        assert (found["policy"], found["child_policy"], found["notes"]) == ("preferred", "prefer:0", [])


@pytest.mark.skipif(memory_policy_refusal() is not None, reason="memory policies are refused here")
def test_strict_policy() -> None:
    found = child("""
        bound = bind(to(), strict=True)
        answer(policy=bound.policy, kernel=open("/proc/self/numa_maps").readline().split()[1])
    """)
    assert found == {"policy": "bind", "kernel": "bind:0"}


def test_no_placement_leaves_everything_as_it_is() -> None:
    found = child("""
        before = sorted(os.sched_getaffinity(0))
        bound = bind(to(nodes=()))
        answer(same=list(bound.cpus) == before == sorted(os.sched_getaffinity(0)), policy=bound.policy)
    """)
    assert found == {"same": True, "policy": "first touch"}


def test_container_that_refuses_memory_policies() -> None:
    """There is one warning, and the cores are bound all the same."""
    found = child(f"""
        cpu = read_topology().allowed_cpus[-1]
        {NUMA_CALLS}
        bound = bind(to(cpu))
        here = ctypes.create_string_buffer(1 << 20)
        share = local_share(ctypes.addressof(here), 1 << 20, (0,))
        try:
            bind(to(cpu), strict=True)
        except LaunchError as error:
            strict = str(error)
        answer(cpus=list(bound.cpus) == [cpu], policy=bound.policy, mem_nodes=bound.mem_nodes, notes=bound.notes,
               refusal=memory_policy_refusal(), share=share, strict=strict)
    """)
    assert found["cpus"]
    assert (found["policy"], found["mem_nodes"], found["share"]) == ("first touch", [], None)
    assert found["refusal"] == "Operation not permitted"
    assert found["notes"] == [
        "memory policy for node 0 is refused (Operation not permitted, as in a container without CAP_SYS_NICE): "
        "pages go to the node of the pinned thread that touches them first"
    ]
    assert found["strict"] == "memory cannot be bound strictly to node 0: Operation not permitted"


def test_sandbox_that_refuses_affinity() -> None:
    found = child("""
        cpu = read_topology().allowed_cpus[0]
        refuse(203)  # sched_setaffinity
        answer(cpu=cpu, notes=bind(to(cpu, nodes=())).notes)
    """)
    note = f"binding to CPUs {found['cpu']} is not permitted here; the scheduler places rank 3"
    assert found["notes"] == [note]


def test_without_group_files_the_kernel_is_asked() -> None:
    """The mask of the process does not count, and stays as it is."""
    found = child("""
        from tilerank.launch.host import cgroup, topology
        allowed = topology.read_topology().allowed_cpus
        topology.read_limits = lambda root: cgroup.CgroupLimits()
        os.sched_setaffinity(0, allowed[-1:])
        asked, mask = topology.read_topology().limits.cpus, sorted(os.sched_getaffinity(0))
        refuse(203)  # sched_setaffinity
        refused = topology.read_topology()
        everything = refused.limits.cpus is None and refused.allowed_cpus == refused.online
        answer(allowed=allowed, asked=asked, mask=mask, everything=everything)
    """)
    assert found["asked"] == found["allowed"]
    assert found["mask"] == found["allowed"][-1:]
    assert found["everything"]


@needs_two
def test_v1_cpuset() -> None:
    """The cpuset is read, and a placement that contradicts it is reported."""
    first, last = read_topology().allowed_cpus[0], read_topology().allowed_cpus[-1]
    with v1_group("cpuset", mems=0, cpus=last) as group:
        found = child(
            f"""
            topology = read_topology()
            notes = bind(to({first}, {last}, nodes=())).notes
            try:
                bind(to({first}))
            except LaunchError as error:
                refused = str(error)
            cores = place(topology, 1).ranks[0].cores
            answer(allowed=topology.allowed_cpus, cores=cores, notes=notes, error=refused)
            """,
            group,
        )
    assert found["allowed"] == found["cores"] == [last]
    assert found["notes"] == [f"rank 3 asked for CPUs {first}-{last}, but the kernel allows only {last} of them"]
    assert found["error"] == f"rank 3 cannot run on CPUs {first}: Invalid argument"


def test_v1_quota() -> None:
    with v1_group("cpu", cfs_period_us=100_000, cfs_quota_us=50_000) as group:
        found = child("answer(quota=read_topology().limits.cpu_quota)", group)
    assert found == {"quota": 0.5}


def test_v1_out_of_memory_is_counted() -> None:
    """The child allocates more than the group allows: the kernel kills it with signal 9 and counts it."""
    with v1_group("memory", limit_in_bytes=64 << 20) as group:
        found = child(
            """
            before, limits = oom_kills(), read_topology().limits
            greedy = subprocess.run([sys.executable, "-c", "x = bytearray(256 << 20)"])
            answer(code=greedy.returncode, kills=oom_kills() - before, limit=limits.memory_limit,
                   sane=0 < limits.memory_usage < limits.memory_limit)
            """,
            group,
        )
    assert found == {"code": -9, "kills": 1, "limit": 64 << 20, "sane": True}


@pytest.mark.skipif(memory_policy_refusal() is not None, reason="move_pages is refused here")
def test_page_nodes() -> None:
    size = 4 << 20
    pages = mmap.mmap(-1, size)
    view = (ctypes.c_char * size).from_buffer(pages)
    address = ctypes.addressof(view)
    assert page_nodes(address, size) == [None] * 1024
    assert local_share(address, size, (0,)) is None
    for offset in range(0, size // 2, 4096):
        view[offset] = b"x"
    where = page_nodes(address, size)
    assert None not in where[:512]
    assert where[-1] is None
    nodes = tuple({node for node in where if node is not None})
    assert local_share(address, size, nodes) == 1.0
    assert local_share(address, size, (max(nodes) + 1,)) == 0.0
    assert len(page_nodes(address, size, samples=10)) == 10
    assert page_nodes(address + 4095, 2) == where[:2]  # two bytes on two pages


def test_mpirun_mask_is_reported(tmp_path: Path) -> None:
    machine = sockets(2, 4)
    machine.affinity = "2"
    topology = read_topology(machine.write(tmp_path))
    assert inherited_notes(topology, place(topology, 2).ranks[1], {}) == [
        "rank 1 was started bound to CPUs 2, 1 of the 8 allowed, as mpirun and srun do by default; it runs on 4-7"
    ]
    assert inherited_notes(topology, place(topology, 8).ranks[2], {}) == []  # already bound to its own place
    kept = inherited_notes(topology, place(topology, 2, "none", own_mask=True).ranks[1], {})
    assert kept[0].endswith("that is kept (--cores none)")


def test_isolated_cores_are_no_narrowed_mask(tmp_path: Path) -> None:
    topology = read_topology(Machine([(0, 8)], isolated="3", affinity="0-2,4-7").write(tmp_path))
    assert inherited_notes(topology, place(topology, 1).ranks[0], {}) == []


def test_torchruns_omp_num_threads_is_reported(tmp_path: Path) -> None:
    topology = read_topology(sockets(2, 4).write(tmp_path))
    rank = place(topology, 2).ranks[0]
    assert inherited_notes(topology, rank, {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}) == [
        "OMP_NUM_THREADS=1 was set by torchrun and is ignored: rank 0 runs 4 threads of its own"
    ]
    assert inherited_notes(topology, rank, {"OMP_NUM_THREADS": "4"}) == []


def test_huge_pages(tmp_path: Path) -> None:
    pool = tmp_path / "sys/kernel/mm/hugepages/hugepages-2048kB"
    pool.mkdir(parents=True)
    (pool / "nr_hugepages").write_text("12\n")
    (pool / "free_hugepages").write_text("5\n")
    enabled = tmp_path / "sys/kernel/mm/transparent_hugepage/enabled"
    enabled.parent.mkdir(parents=True)
    enabled.write_text("always [madvise] never\n")
    found = huge_pages(tmp_path)
    assert (found.transparent, found.reserved, found.reserved_free) == ("madvise", 12, 5)
    assert huge_pages(tmp_path / "nothing").transparent is None


NUMA_MAPS = """\
55a1fe16a000 default file=/usr/bin/python3 mapped=2 N0=2 kernelpagesize_kB=4
55a20fbe3000 prefer:1 heap anon=6 dirty=6 active=0 N0=2 N1=4 kernelpagesize_kB=4
7f0000000000 prefer:1 anon=3 dirty=3 N1=2 N2=1 kernelpagesize_kB=2048
7f1000000000 default
7f2000000000 prefer:1 file=/memfd:tilerank-weights\\040(deleted) dirty=2 active=0 N2=2 kernelpagesize_kB=4
7ffc3d9e4000 default stack:1 anon=4 dirty=4 N0=4 kernelpagesize_kB=4
"""


def test_share_of_memory_near_the_cores(tmp_path: Path) -> None:
    """In KiB: 24 on node 0, 16 and two huge pages on node 1, one huge page and 8 of a memory file on node 2. Files on
    disk are not counted."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/numa_maps").write_text(NUMA_MAPS)
    total = 24 + 16 + 3 * 2048 + 8
    assert local_memory((1,), tmp_path) == (16 + 2 * 2048) / total
    assert local_memory((0, 2), tmp_path) == (24 + 2048 + 8) / total
    assert local_memory((3,), tmp_path) == 0
    assert local_memory((), tmp_path) is None


def test_memory_of_which_the_kernel_says_nothing(tmp_path: Path) -> None:
    assert local_memory((0,), tmp_path) is None
