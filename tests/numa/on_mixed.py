"""The checks of what containers have, on three packages with hyper-threads, one without memory, and memory without
cores: servers in control groups, and servers beside each other."""

import contextlib
import ctypes
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from tests.numa.checks import (
    MIB,
    basics,
    bound_rank,
    fill_node,
    group,
    in_child,
    in_group,
    inside,
    say,
    server,
)
from tilerank.launch.host.neighbours import neighbour_notes, pinned_by_others
from tilerank.launch.host.placement import cpus_beside, place
from tilerank.launch.host.topology import read_topology

CLONE_NEWNS = 0x20000  # <linux/sched.h>
PINNED = """
import os, sys, threading
cpus = [int(cpu) for cpu in sys.argv[1:]]
ready = threading.Barrier(len(cpus) + 1)
def work(cpu):
    os.sched_setaffinity(0, {cpu})
    ready.wait()
    threading.Event().wait()
for cpu in cpus:
    threading.Thread(target=work, args=(cpu,), daemon=True).start()
ready.wait()
print(flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def pinned_threads(*cpus: int) -> Iterator[int]:
    """Run a process that looks as a rank does: it is called tilerank, and each of its workers is pinned to a CPU.

    Yields its process id.
    """
    command = ["tilerank", "-B", "-S", "-c", PINNED, *map(str, cpus)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, executable=sys.executable, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid


def exclusive() -> dict[str, Any]:
    """A server in an exclusive cpuset, and another one outside of it."""
    settings = {"cpuset.cpus": "4-7", "cpuset.mems": "1", "cpuset.cpus.partition": "root"}
    with group("exclusive", settings) as own:
        partition = (own / "cpuset.cpus.partition").read_text().strip()
        return {"partition": partition, "inside": inside(own, server, 2), "outside": in_child(server, 1)}


def side_by_side(first: str, second: str) -> list[Any]:
    """Two servers with CPUs of the same node."""
    settings = [{"cpuset.cpus": cpus, "cpuset.mems": "1"} for cpus in (first, second)]
    with group("first", settings[0]) as one, group("second", settings[1]) as other:
        return [inside(own, server, 1) for own in (one, other)]


def beside_another() -> dict[str, Any]:
    """A server without a cpuset, whose ranks may share cores with those of another one."""
    topology = read_topology()
    with pinned_threads(4, 6) as pid:
        pinned = pinned_by_others()
        apart = place(topology, 1, "0,2")
        return {
            "pid": pid,
            "pinned": {process: sorted(cpus) for process, cpus in pinned.items()},
            "notes": neighbour_notes(topology, place(topology, 2), pinned),
            "apart": {
                "notes": neighbour_notes(topology, apart, pinned),
                "ranks": [in_child(bound_rank, rank) for rank in apart.ranks],
                "http": sorted(cpus_beside(topology, apart.ranks)),
            },
        }


def without_group_files() -> dict[str, Any]:
    """A container that does not show its control group."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["busybox", "umount", "/sys/fs/cgroup"], check=True)
    return server(1)


def main() -> None:
    free = read_topology().node(0).memory_free
    say(
        {
            **basics(),
            "exclusive": exclusive(),
            "side_by_side": side_by_side("4-5", "6-7"),
            "halves": side_by_side("4,6", "5,7"),
            "beside_another": beside_another(),
            "without_group_files": in_group({"cpuset.cpus": "4-5", "cpuset.mems": "1"}, without_group_files),
            "fill": in_child(fill_node, 0, free + 64 * MIB, False),
        }
    )


main()
