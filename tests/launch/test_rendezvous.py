"""Rank and rendezvous from the recorded variables of real launchers, and the socket at which ranks meet."""

import os
import socket
import subprocess
import sys
import textwrap

import pytest

from tilerank.launch.errors import LaunchError
from tilerank.launch.ranks.bootstrap import (
    RendezvousAddress,
    find_address,
    interface_addresses,
    launcher_process,
    listen,
)
from tilerank.launch.ranks.rendezvous import (
    Identity,
    RendezvousMethod,
    check_tp,
    first_host,
    identify,
    rendezvous_method,
    starts_ranks,
    tasks_on_host,
)

OWN = {
    "TILERANK_RANK": "1",
    "TILERANK_SIZE": "3",
    "TILERANK_LOCAL_RANK": "1",
    "TILERANK_LOCAL_SIZE": "3",
    "TILERANK_RENDEZVOUS": "127.0.0.1:4711",
}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "OMP_NUM_THREADS": "1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
    "PMIX_RANK": "1",
}
MPICH = {"PMI_RANK": "0", "PMI_SIZE": "3", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "3"}
SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "6",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "node[04-06,09]",
}
SBATCH = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
PLAIN = {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1"}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        pytest.param({}, Identity("none"), id="nobody"),
        pytest.param(OWN, Identity("tilerank", 1, 3, 1, 3), id="own"),
        pytest.param(TORCHRUN, Identity("torchrun", 3, 4, 1, 2), id="torchrun"),
        pytest.param(OPEN_MPI, Identity("Open MPI", 1, 3, 2, 3), id="openmpi"),
        pytest.param(MPICH, Identity("MPICH", 0, 3, 0, 3), id="mpich"),
        pytest.param(SRUN, Identity("Slurm", 6, 7, 0, 1), id="srun"),
        pytest.param({**SRUN, "PMI_RANK": "6", "PMI_SIZE": "7"}, Identity("Slurm", 6, 7, 0, 1), id="srun-pmi2"),
        pytest.param(SBATCH, Identity("none"), id="sbatch-script"),
        pytest.param({**SBATCH, **MPICH}, Identity("MPICH", 0, 3, 0, 3), id="mpirun-in-sbatch"),
        pytest.param({**SRUN, **TORCHRUN}, Identity("torchrun", 3, 4, 1, 2), id="torchrun-per-host-under-srun"),
        pytest.param(PLAIN, Identity("environment", 2, 3, 2, 3), id="plain"),
        pytest.param({"RANK": "2", "WORLD_SIZE": "3"}, Identity("environment", 2, 3, 2, 3), id="plain-one-host"),
        pytest.param(
            {"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "leader-0.job"},
            Identity("environment", 2, 3, 0, 1),
            id="plain-process-per-host",
        ),
        pytest.param({"RANK": "2"}, Identity("none"), id="rank-alone-says-nothing"),
    ],
)
def test_identity(env: dict[str, str], expected: Identity) -> None:
    assert identify(env) == expected


@pytest.mark.parametrize(
    ("env", "words"),
    [
        pytest.param(
            {**MPICH, "RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x", "LOCAL_RANK": "0"}
            | {"LOCAL_WORLD_SIZE": "2"},
            ["torchrun says rank 0 of 2", "MPICH says rank 0 of 3", "WORLD_SIZE", "PMI_SIZE"],
            id="torchrun-in-mpirun",
        ),
        pytest.param(
            {**OPEN_MPI, **PLAIN}, ["Open MPI says rank 1 of 3", "the environment says rank 2 of 3"], id="stale-rank"
        ),
        pytest.param(
            {**SRUN, "SLURM_NODEID": "0", "RANK": "0", "WORLD_SIZE": "2"},
            ["Slurm says rank 6 of 7", "the environment says rank 0 of 2"],
            id="exported-in-srun",
        ),
        pytest.param(
            {**OPEN_MPI, **OWN, "TILERANK_RANK": "0"},
            ["tilerank says rank 0", "Open MPI says rank 1"],
            id="own-left-over",
        ),
        pytest.param({**MPICH, "PMI_RANK": "3"}, ["PMI_RANK=3 is not below PMI_SIZE=3"], id="rank-beyond"),
        pytest.param({**MPICH, "PMI_SIZE": "three"}, ["PMI_SIZE=three is not a whole number"], id="no-number"),
        pytest.param({**SRUN, "SLURM_NODEID": "x3"}, ["SLURM_NODEID=x3 is not a whole number"], id="no-node"),
        pytest.param({**MPICH, "PMI_RANK": "-1"}, ["PMI_RANK=-1"], id="negative"),
        pytest.param({"OMPI_COMM_WORLD_RANK": "0"}, ["OMPI_COMM_WORLD_SIZE is not set"], id="half-a-set"),
        pytest.param(
            {**MPICH, "MPI_LOCALNRANKS": "4"}, ["MPI_LOCALNRANKS says 4", "PMI_SIZE says 3"], id="more-here-than-in-all"
        ),
        pytest.param({"PMI_RANK": "0", "PMI_SIZE": "2"}, ["PMI_RANK=0", "set RANK, WORLD_SIZE"], id="unknown-mpi"),
        pytest.param(
            {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "two"}, ["SLURM_STEP_TASKS_PER_NODE=two"], id="slurm-counts"
        ),
        pytest.param({**SRUN, "SLURM_NODEID": "4"}, ["SLURM_NODEID=4", "lists 4 hosts"], id="slurm-host-beyond"),
    ],
)
def test_contradictions_are_refused(env: dict[str, str], words: list[str]) -> None:
    with pytest.raises(LaunchError) as refused:
        identify(env)
    for word in words:
        assert word in str(refused.value)


def test_a_restart_count_that_is_no_number_is_refused() -> None:
    with pytest.raises(LaunchError, match="TORCHELASTIC_RESTART_COUNT=many is not a whole number"):
        rendezvous_method(identify(TORCHRUN), {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "many"})


def test_tp_must_be_what_the_launcher_started() -> None:
    identity = identify(MPICH)
    check_tp(identity, None)
    check_tp(identity, 3)
    with pytest.raises(LaunchError, match="--tp 4, but MPICH started 3 ranks"):
        check_tp(identity, 4)


def test_who_starts_ranks() -> None:
    assert starts_ranks(identify({}))
    assert starts_ranks(identify(SBATCH))
    shell = {**SRUN, "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "1"}
    assert starts_ranks(identify(shell)), "srun --pty bash"
    assert not starts_ranks(identify({**MPICH, "PMI_SIZE": "1", "MPI_LOCALNRANKS": "1"})), "mpirun -n 1 means one rank"
    assert not starts_ranks(identify(OWN))


SLURM_PORT = 20000 + 77 * 31


@pytest.mark.parametrize(
    ("env", "arguments", "expected"),
    [
        pytest.param(OWN, (), RendezvousMethod("given", "127.0.0.1", 4711), id="own"),
        pytest.param(TORCHRUN, (), RendezvousMethod("agent", "10.0.0.1", 29500), id="torchrun"),
        pytest.param(
            {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2"},
            (),
            RendezvousMethod("agent", "10.0.0.1", 29500, 2),
            id="restarted",
        ),
        pytest.param(
            {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"},
            (),
            RendezvousMethod("address", "10.0.0.1", 29500),
            id="no-agent",
        ),
        pytest.param(OPEN_MPI, (), RendezvousMethod("launcher"), id="openmpi-one-host"),
        pytest.param(MPICH, (None, 29600), RendezvousMethod("launcher"), id="mpich-own-port"),
        pytest.param(
            {**MPICH, "MPI_LOCALNRANKS": "2", "MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "1234"},
            (),
            RendezvousMethod("address", "10.0.0.9", 1234),
            id="mpich-given",
        ),
        pytest.param(
            {**MPICH, "MPI_LOCALNRANKS": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            ("b", 2),
            RendezvousMethod("address", "b", 2),
            id="flags-win",
        ),
        pytest.param({**MPICH, "MPI_LOCALNRANKS": "2"}, (), RendezvousMethod("mpi"), id="mpich-hosts"),
        pytest.param({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "6"}, (), RendezvousMethod("mpi"), id="openmpi-hosts"),
        pytest.param(SRUN, (), RendezvousMethod("address", "node04", SLURM_PORT), id="srun-hosts"),
        pytest.param(
            {**SRUN, "MASTER_ADDR": "node05"}, (), RendezvousMethod("address", "node05", SLURM_PORT), id="srun-address"
        ),
        pytest.param({**PLAIN, "MASTER_PORT": "29500"}, (), RendezvousMethod("port", port=29500), id="plain"),
        pytest.param({**TORCHRUN, "LOCAL_WORLD_SIZE": "4"}, (), RendezvousMethod("launcher"), id="torchrun-one-host"),
        pytest.param(
            {**OWN, "TILERANK_RENDEZVOUS": "@name"}, (), RendezvousMethod("given", "@name"), id="own-one-host"
        ),
    ],
)
def test_rendezvous_method(
    env: dict[str, str], arguments: tuple[str | None, int | None], expected: RendezvousMethod
) -> None:
    assert rendezvous_method(identify(env), env, *arguments) == expected


def test_plain_variables_need_an_address() -> None:
    env = {"RANK": "0", "WORLD_SIZE": "2"}
    with pytest.raises(LaunchError, match="no MASTER_ADDR"):
        rendezvous_method(identify(env), env)
    env["MASTER_ADDR"] = "127.0.0.1"
    with pytest.raises(LaunchError, match="MASTER_PORT is not set"):
        rendezvous_method(identify(env), env)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("gpu3", "gpu3"),
        ("n[01-04,07],gpu3", "n01"),
        ("n[7,9-11]", "n7"),
        ("r[1-2]n[05-06].cluster", "r1n05.cluster"),
        ("a,b", "a"),
    ],
)
def test_first_host(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


def test_tasks_on_host() -> None:
    assert [tasks_on_host("2(x3),1", node) for node in range(4)] == [2, 2, 2, 1]
    assert tasks_on_host("6", 0) == 6


def test_a_port_in_use_is_named() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"cannot listen on 127.0.0.1 port {port}: Address already in use"):
            listen("127.0.0.1", port)


def test_an_address_of_another_machine_is_named() -> None:
    with pytest.raises(LaunchError, match=r"cannot listen on 192\.0\.2\.1 port 4000: Cannot assign requested address"):
        listen("192.0.2.1", 4000)
    with pytest.raises(LaunchError, match=r"no-such-host\.invalid has no address"):
        listen("no-such-host.invalid", 4000)


def test_loopback_is_refused_for_several_hosts() -> None:
    with pytest.raises(LaunchError, match=r"localhost is 127\.0\.0\.1 on the machine of rank 0"):
        listen("localhost", 0, one_host=False)


def test_interface_addresses_are_not_loopback() -> None:
    for address in interface_addresses():
        assert not address.startswith("127.")
        with listen(address, 0) as listener:
            assert listener.getsockname()[0] == address


def test_only_rank_0_listens_and_on_one_host_not_for_the_network() -> None:
    method = RendezvousMethod("port", port=4711)
    name = f"@tilerank-{os.getuid()}-port-4711"
    assert find_address(Identity("environment", 1, 2, 1, 2), method) == RendezvousAddress(name, 0, None)
    address = find_address(Identity("environment", 0, 2, 0, 2), method)
    assert address.host == name and address.fd is not None
    with socket.socket(fileno=address.fd) as listener:
        assert listener.getsockname() == b"\0" + name[1:].encode()
        with pytest.raises(LaunchError, match=r"another rank 0 was started for port 4711 \(MASTER_PORT\)"):
            find_address(Identity("environment", 0, 2, 0, 2), method)


@pytest.mark.parametrize(
    "method", [RendezvousMethod("address", "192.0.2.1", 1), RendezvousMethod("agent", "192.0.2.1", 1)]
)
def test_several_hosts_need_a_secret(method: RendezvousMethod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TILERANK_SECRET", raising=False)
    with pytest.raises(LaunchError, match=r"need TILERANK_SECRET.* TILERANK_SECRET=\$\(openssl rand -hex 32\)"):
        find_address(Identity("environment", 0, 2, 0, 1), method)
    monkeypatch.setenv("TILERANK_SECRET", "short")
    with pytest.raises(LaunchError, match="TILERANK_SECRET has 5 characters, expected at least 16"):
        find_address(Identity("environment", 1, 2, 0, 1), method)
    monkeypatch.setenv("TILERANK_SECRET", "s" * 16)
    assert find_address(Identity("environment", 1, 2, 0, 1), method).secret == "s" * 16


MEET = """
    import os, socket, sys
    from tilerank.launch.ranks.bootstrap import find_address
    from tilerank.launch.ranks.rendezvous import identify, rendezvous_method
    identity = identify(os.environ)
    address = find_address(identity, rendezvous_method(identity, os.environ))
    assert (address.fd is not None) == (identity.rank == 0)
    print(identity.rank, address.host, flush=True)
    sys.stdin.read()  # rank 0 holds the name until all have it
"""


def start_rank(rank: int, *, wrapped: bool) -> "subprocess.Popen[str]":
    env = {**os.environ, "PMI_RANK": str(rank), "PMI_SIZE": "3", "MPI_LOCALRANKID": str(rank), "MPI_LOCALNRANKS": "3"}
    command = [sys.executable, "-c", textwrap.dedent(MEET)]
    if wrapped:  # with a second command, the shell does not replace itself by the first
        command = ["sh", "-c", '"$@"; exit $?', "sh", *command]
    return subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_children_of_one_launcher_find_rank_0() -> None:
    """This process is the launcher of three, one of them behind a wrapper script; rank 0 arrives last."""
    ranks = [start_rank(rank, wrapped=rank == 1) for rank in (1, 2, 0)]
    lines = sorted(process.communicate(timeout=110)[0].split() for process in ranks)
    assert [process.returncode for process in ranks] == [0, 0, 0]
    assert [line[0] for line in lines] == ["0", "1", "2"]
    assert len({line[1] for line in lines}) == 1 and lines[0][1].startswith("@tilerank-")


def test_two_first_ranks_of_one_launcher_are_refused() -> None:
    launcher = launcher_process()
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(f"\0tilerank-{os.getuid()}-{launcher.pid}-{launcher.started}")
        with pytest.raises(LaunchError, match=f"another rank 0 was started by MPICH .process {launcher.pid}"):
            find_address(Identity("MPICH", 0, 3, 0, 3), RendezvousMethod("launcher"))


def test_several_hosts_under_mpirun_need_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(LaunchError, match=r"several hosts .* mpi4py is not installed: pip install 'tilerank\[mpi\]'"):
        find_address(Identity("MPICH", 0, 4, 0, 2), RendezvousMethod("mpi"))


def test_the_launcher_is_the_parent_where_nobody_wrote_variables() -> None:
    assert launcher_process().pid == os.getppid()
