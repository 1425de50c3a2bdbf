"""Several hosts, as two network namespaces of this machine; and MPI, with the MPICH of the test extra."""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ranks import Ranks, run_ranks

from tests.parallel.test_group import needs_core
from tilerank.parallel.hosts import PeerInfo, address_of, common_isa, hosts_of

STORE = ("10.77.0.1", 29411)  # exists only inside the namespace


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise PermissionError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[list[str]]:
    """The namespaces of host 0 and host 1, connected by one link and to nothing else."""
    if shutil.which("ip") is None:
        pytest.skip("needs the `ip` command (package iproute2)")
    names = [f"tilerank-{os.getpid()}-{host}" for host in range(2)]
    made = []
    try:
        try:
            for name in names:
                ip("netns", "add", name)
                made.append(name)
            ip("-n", names[0], "link", "add", "link0", "type", "veth", "peer", "name", "link0", "netns", names[1])
            for host, name in enumerate(names):
                ip("-n", name, "addr", "add", f"10.77.0.{host + 1}/24", "dev", "link0")
                ip("-n", name, "link", "set", "link0", "up")
                ip("-n", name, "link", "set", "lo", "up")
        except PermissionError as error:
            pytest.skip(f"cannot make network namespaces: {error}")
        yield names
    finally:
        for name in made:
            ip("netns", "delete", name)


def start(two_hosts: list[str], target: str, **more: Any) -> Ranks:
    """Start four ranks in round-robin order: 0 and 2 on the first host, 1 and 3 on the second."""
    namespaces = [two_hosts[rank % 2] for rank in range(4)]
    return Ranks(4, target, namespaces=namespaces, store=STORE, **more)


@needs_core
def test_two_hosts_give_the_bits_of_one(two_hosts: list[str]) -> None:
    target = "tests.parallel.test_group:sums_and_shuffled"
    with start(two_hosts, target, kwargs={"transport": "HostGroup", "steps": 10}) as ranks:
        over_hosts = ranks.results(120)
    assert all(digests == over_hosts[0] for digests in over_hosts)
    assert over_hosts == run_ranks(4, target, kwargs={"transport": "ShmGroup", "steps": 1})


@needs_core
def test_collectives_of_two_hosts_are_recorded(two_hosts: list[str]) -> None:
    with start(two_hosts, "replay:record_collectives") as ranks:
        assert [found["equal"] for found in ranks.results(60)] == [[True] * 10] * 4


def test_control_messages_reach_the_other_host(two_hosts: list[str]) -> None:
    with start(two_hosts, "tests.parallel.test_group:talk", collectives="gloo") as ranks:
        assert ranks.results(60) == [[], *[[5, 0, 2_560_000]] * 3]


@needs_core
@pytest.mark.parametrize("victim", [1, 2])
def test_killed_on_either_host(two_hosts: list[str], victim: int) -> None:
    with start(two_hosts, "tests.parallel.test_faults:add_up_for_ever", timeout_s=300) as ranks:
        for rank in range(4):
            ranks.wait_for(rank, "adding")
        ranks.signal(victim, signal.SIGKILL)
        for rank in {0, 1, 2, 3} - {victim}:
            said = ranks.result(rank, 120)
            assert said.startswith(f"rank {victim} is gone during all_reduce"), said


@needs_core
def test_stopped_on_the_other_host(two_hosts: list[str]) -> None:
    with start(two_hosts, "tests.parallel.test_faults:add_up_for_ever", timeout_s=5) as ranks:
        for rank in range(4):
            ranks.wait_for(rank, "adding")
        ranks.signal(3, signal.SIGSTOP)
        for rank in range(3):
            said = ranks.result(rank, 120)
            assert said.startswith("rank 3 did not answer within 5 s during all_reduce"), said


def test_ranks_are_grouped_by_host_not_by_number() -> None:
    peers = [PeerInfo(rank, 5, host, "", 1, "avx2") for rank, host in enumerate("baabc")]
    assert hosts_of(peers) == ((0, 3), (1, 2), (4,))


def test_the_newest_rung_of_all_ranks_is_that_of_the_oldest_cpu() -> None:
    peers = [PeerInfo(rank, 3, "a", "", 1, isa) for rank, isa in enumerate(["amx", "avx512", "avx512_bf16"])]
    assert common_isa(peers) == "avx512" and common_isa(peers[::2]) == "avx512_bf16"


def test_one_host_binds_loopback_only() -> None:
    peers = [PeerInfo(rank, 2, "a", "192.0.2.1", 1, "avx2") for rank in range(2)]
    assert address_of(1, peers, hosts_of(peers)) == "127.0.0.1"


def listening(team: Any) -> list[str]:
    """Return the sockets of this process that listen: addresses as in /proc/net/tcp, and names of unix sockets."""
    team.ready(30)
    team.group.barrier()
    inodes = {str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    rows += [line.split() for line in Path("/proc/net/tcp6").read_text().splitlines()[1:]]
    tcp = [row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]
    unix = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    accepting = "00010000"  # flags of a listening unix socket
    return tcp + [row[-1] for row in unix if row[3] == accepting and f"socket:[{row[6]}]" in inodes]


@needs_core
def test_nothing_listens_once_the_ranks_are_connected() -> None:
    assert run_ranks(2, "tests.parallel.test_hosts:listening") == ([[], []])


def test_gloo_listens_on_loopback_only() -> None:
    addresses = run_ranks(2, "tests.parallel.test_hosts:listening", collectives="gloo")
    assert {address for rank in addresses for address in rank} == {"0100007F"}


@needs_core
def test_only_gloo_listens_between_hosts(two_hosts: list[str]) -> None:
    """gloo's sockets are of the leaders, 0 and 1; rank 0 does not listen at the address of the rendezvous any more."""
    with start(two_hosts, "tests.parallel.test_hosts:listening") as ranks:
        assert ranks.results(60) == [["01004D0A"], ["02004D0A"], [], []]


MPIRUN = Path(sys.executable).parent / "mpirun"  # the MPI that mpi4py loads, not whichever is first on PATH
needs_mpi = pytest.mark.skipif(not MPIRUN.exists(), reason="the mpich wheel is not installed")


def gather_ranks(team: Any) -> list[Any]:
    """Return the transport, and a sum that is right only with the right ranks."""
    import torch

    total = team.group.all_reduce(torch.tensor([2.0**team.group.rank]))
    return [type(team.group).__name__, team.group.rank, total.item()]


def mpirun(size: int, target: str, **more: Any) -> list[Any]:
    """Do what run_ranks does, with ranks numbered by MPI."""
    module, _, function = target.partition(":")
    job: dict[str, Any] = {
        "rank": None,
        "size": size,
        "store": (f"@{secrets.token_hex(16)}", 0),
        "fds": [],
        "listen": True,
        "namespace": None,
        "hosts": None,
        "threads": 1,
        "spin": False,
    }
    job |= {"module": module, "function": function, "kwargs": {}, "collectives": "mpi", "timeout_s": 60} | more
    support = Path(__file__).parents[1] / "support"
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), str(support), str(support.parents[1])]))
    command = [str(MPIRUN), "-n", str(size), sys.executable, str(support / "ranks.py"), json.dumps(job)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, timeout=300, check=False)
    said = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, said
    # mpirun may join the lines of two ranks.
    return [json.JSONDecoder().raw_decode(part)[0] for part in said.split("result: ")[1:]]


@needs_core
@needs_mpi
def test_mpi_gives_the_bits_of_shared_memory() -> None:
    target = "tests.parallel.test_group:sums_and_shuffled"
    digests = mpirun(3, target, kwargs={"transport": "MpiGroup", "steps": 10})
    assert digests == run_ranks(3, target, kwargs={"transport": "ShmGroup", "steps": 1})


@needs_core
@needs_mpi
def test_mpi_between_hosts_that_are_not_in_the_order_of_ranks() -> None:
    """Rank 2 leads no host, but takes part in starting and ending MPI all the same."""
    target, hosts = "tests.parallel.test_group:sums_and_shuffled", ["a", "b", "a"]
    digests = mpirun(3, target, kwargs={"transport": "HostGroup", "steps": 10}, hosts=hosts)
    assert digests == run_ranks(3, target, kwargs={"transport": "ShmGroup", "steps": 1})


@needs_mpi
def test_ranks_that_mpi_does_not_know_are_refused() -> None:
    with Ranks(2, "tests.parallel.test_hosts:gather_ranks", collectives="mpi", timeout_s=20) as ranks:
        for rank in range(2):
            assert ranks.wait(rank, 120) == 1
            expected = f"MPI reports rank 0 of 1, but the launcher says rank {rank} of 2"
            assert expected in ranks.output(rank), ranks.output(rank)
            assert not list(Path("/dev/shm").glob(f"mpich_shm_{ranks.processes[rank].pid:x}_*"))
