"""Ranks that other launchers start: torchrun, mpirun (MPICH, Open MPI), srun by its variables, and two hosts.

Network namespaces stand for hosts. All launchers must give the tokens that our own launcher gives.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from command import (
    COMMAND,
    DEMO,
    ENDLESS,
    OPEN_MPI_AS_ROOT,
    OPEN_MPI_ENVIRONMENT,
    SOON_S,
    Result,
    Run,
    await_true,
    endless_copy,
    free_port,
    run,
)
from serving import Server, greedy, serving

GENERATE = ("generate", DEMO, "--dtype", "float32", "--prompt", "Once upon a time", "--ignore-eos")
SHORT = (*GENERATE, "--max-new-tokens", 12, "--json")
BIN = Path(sys.executable).parent
MPICH = BIN / "mpirun"
TORCHRUN = (str(BIN / "torchrun"), "--nproc-per-node", "2")
MODULE = ("-m", "tilerank")  # torchrun runs it with its own interpreter


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    model = endless_copy(tmp_path_factory.mktemp("endless") / "model")
    return ("generate", model, *GENERATE[2:], "--max-new-tokens", ENDLESS // 2, "--max-total-tokens", ENDLESS)


@pytest.fixture(scope="session")
def expected() -> list[int]:
    return tokens(run(*SHORT, "--tp", 2))


def tokens(result: Result) -> list[int]:
    assert result.status == 0, result.err
    (line,) = result.out.splitlines()
    found = json.loads(line)["token_ids"]
    assert len(found) == 12
    return [int(token) for token in found]


def torchrun() -> tuple[str, ...]:
    return TORCHRUN


def mpich() -> tuple[str, ...]:
    if not MPICH.exists():
        pytest.skip("the mpich wheel is not installed")
    return (str(MPICH), "-n", "2")


def open_mpi() -> tuple[str, ...]:
    """Return Open MPI's mpirun for two ranks, under the name that the system gives it."""
    program = shutil.which("mpirun.openmpi") or shutil.which("orterun")
    if program is None:
        pytest.skip("Open MPI is not installed (Debian: openmpi-bin)")
    return (program, "-n", "2")


def test_torchrun(expected: list[int]) -> None:
    result = run(*SHORT, launcher=TORCHRUN, command=MODULE, env={"OMP_NUM_THREADS": "4"})
    assert tokens(result) == expected
    assert len(re.findall(r"\[rank \d\] .*OMP_NUM_THREADS=4 was set by torchrun", result.err)) == 2


def test_mpich(expected: list[int]) -> None:
    assert tokens(run(*SHORT, launcher=mpich())) == expected


def test_mpich_through_a_wrapper_script(expected: list[int], tmp_path: Path) -> None:
    wrapper = tmp_path / "wrapper"
    wrapper.write_text('#!/bin/sh\n"$@"\nexit $?\n')
    wrapper.chmod(0o755)
    assert tokens(run(*SHORT, launcher=(*mpich(), str(wrapper)))) == expected


def test_open_mpi(expected: list[int]) -> None:
    assert tokens(run(*SHORT, launcher=open_mpi(), env=OPEN_MPI_ENVIRONMENT)) == expected


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="binding is visible only with two cores")
def test_the_core_that_open_mpi_bound_to_is_noticed() -> None:
    """A single rank would get all cores, but Open MPI binds it to one."""
    launcher = (*open_mpi()[:2], "1")
    result = run(*SHORT, launcher=launcher, env=OPEN_MPI_AS_ROOT)
    assert len(tokens(result)) == 12
    assert re.search(
        r"\[rank 0\] .*rank 0 was started bound to CPUs \d+, 1 of the \d+ allowed.*; it runs on", result.err
    )
    kept = run(*SHORT, "--bind", "inherit", launcher=launcher, env=OPEN_MPI_AS_ROOT)
    assert kept.status == 0 and "that is kept" in kept.err


def srun(rank: int, size: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "4242",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": str(size),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": str(size),
        "SLURM_STEP_NODELIST": "node01",
    }


def test_srun_variables(expected: list[int]) -> None:
    with ExitStack() as stack:
        ranks = [stack.enter_context(Run(*SHORT, env=srun(rank, 2))) for rank in range(2)]
        results = [rank.finish() for rank in ranks]
    assert tokens(results[0]) == expected
    assert (results[1].status, results[1].out) == (0, "")


def test_plain_variables(expected: list[int]) -> None:
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with ExitStack() as stack:
        ranks = [stack.enter_context(Run(*SHORT, env={**common, "RANK": str(rank)})) for rank in range(2)]
        results = [rank.finish() for rank in ranks]
    assert tokens(results[0]) == expected


def test_contradicting_launchers_are_refused() -> None:
    result = run(*SHORT, launcher=mpich(), env={"RANK": "0", "WORLD_SIZE": "3"})
    assert result.status != 0 and result.out == ""
    assert "of 2 (PMI_RANK, PMI_SIZE), but the environment says rank 0 of 3 (RANK, WORLD_SIZE)" in result.err


def test_tp_and_mpirun_must_agree() -> None:
    result = run(*SHORT, "--tp", 4, launcher=mpich())
    assert result.status != 0 and result.out == ""
    assert "--tp 4, but MPICH started 2 ranks" in result.err


def generating(running: Run) -> None:
    running.await_output(8)


def test_a_dead_rank_ends_torchrun(endless: tuple[object, ...]) -> None:
    with Run(*endless, launcher=TORCHRUN, command=MODULE) as running:
        generating(running)
        pid = running.rank_pid(1, "RANK")
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        result = running.finish(SOON_S)
    assert result.status != 0


def test_torchrun_starts_ranks_again(expected: list[int]) -> None:
    """The agent's store outlives the ranks and still has the keys of the first attempt."""
    launcher = (*TORCHRUN, "--max-restarts", "1")
    with Run(*GENERATE, "--max-new-tokens", 500, "--json", launcher=launcher, command=MODULE) as running:
        running.await_line("collectives")
        pid = running.rank_pid(1, "RANK")
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        result = running.finish()
    assert result.status == 0
    assert json.loads(result.out)["token_ids"][:12] == expected


@pytest.mark.parametrize("launcher", [torchrun, mpich, open_mpi])
def test_no_orphans_of_a_killed_launcher(endless: tuple[object, ...], launcher: Callable[[], tuple[str, ...]]) -> None:
    command = MODULE if launcher is torchrun else COMMAND
    with Run(*endless, launcher=launcher(), command=command, env=OPEN_MPI_ENVIRONMENT) as running:
        generating(running)
        running.process.kill()
        await_true(lambda: not running.pids(), SOON_S, f"orphans: {running.pids()}")


@pytest.mark.parametrize("launcher", [torchrun, mpich, open_mpi])
def test_a_server(launcher: Callable[[], tuple[str, ...]]) -> None:
    command = MODULE if launcher is torchrun else COMMAND
    with serving(launcher=launcher(), command=command, env=OPEN_MPI_ENVIRONMENT) as server:
        answer = server.post("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0})
        assert answer.json()["choices"][0]["text"] == greedy("Once upon a time", 12)
        server.running.process.send_signal(signal.SIGTERM)
        server.running.finish()


@pytest.mark.parametrize(("launcher", "variable", "rank"), [(torchrun, "RANK", 0), (mpich, "PMI_RANK", 1)])
def test_a_rank_stopped_while_a_server_is_idle_ends_it(
    launcher: Callable[[], tuple[str, ...]], variable: str, rank: int
) -> None:
    command = MODULE if launcher is torchrun else COMMAND
    with serving("--dist-timeout", 6, launcher=launcher(), command=command) as server:
        time.sleep(7)  # longer than the deadline
        assert server.get("/health").status_code == 200
        pid = server.running.rank_pid(rank, variable)
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        result = server.running.finish()
    assert result.status != 0
    assert f"rank {rank} did not answer within 6 s: stopped, stuck or far too slow" in result.err


def test_torchrun_starts_a_server_again() -> None:
    """The HTTP process of the second attempt gets the port of the first."""
    with serving("--port", free_port(), launcher=(*TORCHRUN, "--max-restarts", "1"), command=MODULE) as server:
        pid = server.running.rank_pid(1, "RANK")
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        again = Server(server.running)
        assert again.port == server.port
        answer = again.post("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0})
        assert answer.json()["choices"][0]["text"] == greedy("Once upon a time", 12)
        pid = server.running.rank_pid(1, "RANK")
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert server.running.finish().status != 0


HOSTS = ("10.77.13.1", "10.77.13.2")
SECRET = {"TILERANK_SECRET": "known to both of the hosts"}


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """Two network namespaces joined by a cable stand for two hosts."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    names = [f"tilerank-{os.getpid()}-{i}" for i in range(2)]
    ends = [f"tr{os.getpid()}{end}" for end in "ab"]

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    try:
        for name in names:
            ip("netns", "add", name)
    except subprocess.CalledProcessError as e:
        pytest.skip(f"network namespaces cannot be made: {e.stderr.decode().strip()}")
    try:
        ip("link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1], "netns", names[1])
        for name, end, address in zip(names, ends, HOSTS, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", end, "up")
        yield names
    finally:
        for name in names:
            ip("netns", "del", name)


def start_host(namespace: str, *arguments: object) -> Run:
    return Run(*arguments, launcher=("ip", "netns", "exec", namespace), env=SECRET)


def test_two_hosts(expected: list[int], namespaces: list[str]) -> None:
    options = ("--tp", 4, "--nnodes", 2, "--master-addr", HOSTS[0], "--master-port", 29700)
    with ExitStack() as stack:
        hosts = [
            stack.enter_context(start_host(name, *SHORT, *options, "--node-rank", i))
            for i, name in enumerate(namespaces)
        ]
        results = [host.finish() for host in hosts]
    assert tokens(results[0]) == expected
    assert (results[1].status, results[1].out) == (0, "")
    assert "2 ranks on other hosts" in results[0].err


def test_a_host_that_fails_ends_the_other(endless: tuple[object, ...], namespaces: list[str]) -> None:
    options = ("--tp", 4, "--nnodes", 2, "--master-addr", HOSTS[0], "--master-port", 29700)
    with ExitStack() as stack:
        hosts = [
            stack.enter_context(start_host(name, *endless, *options, "--node-rank", i))
            for i, name in enumerate(namespaces)
        ]
        generating(hosts[0])
        hosts[1].process.kill()
        result = hosts[0].finish(SOON_S)
    assert result.status != 0
    assert len(result.errors) == 1 and re.search(r"rank [23]\b", result.errors[0]), result.err


def test_torchrun_on_two_hosts(expected: list[int], namespaces: list[str]) -> None:
    """Rank 0's port comes through the store of torchrun's agent, the proof of the secret does not."""
    with ExitStack() as stack:
        hosts = []
        for i, name in enumerate(namespaces):
            options = ("--nnodes", "2", "--node-rank", str(i), "--nproc-per-node", "1", "--master-addr", HOSTS[0])
            launcher = ("ip", "netns", "exec", name, TORCHRUN[0], *options, "--master-port", "29701")
            hosts.append(stack.enter_context(Run(*SHORT, launcher=launcher, command=MODULE, env=SECRET)))
        results = [host.finish() for host in hosts]
    assert tokens(results[0]) == expected
    assert results[1].status == 0


def test_mpirun_on_two_hosts_without_an_address(expected: list[int], namespaces: list[str], tmp_path: Path) -> None:
    """mpi4py carries rank 0's address. A script takes the place of ssh: it runs commands in the last host's
    namespace."""
    pytest.importorskip("mpi4py")
    program = mpich()[0]
    ssh = tmp_path / "ssh"
    cases = "; ".join(f"{address}) space={name};" for address, name in zip(HOSTS, namespaces, strict=True))
    ssh.write_text(
        '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\n'
        f'host=$1; shift\ncase $host in {cases} esac\nexec ip netns exec $space sh -c "$*"\n'
    )
    ssh.chmod(0o755)
    options = ("-launcher", "ssh", "-launcher-exec", str(ssh), "-hosts", ",".join(HOSTS), "-ppn", "2", "-n", "4")
    launcher = ("ip", "netns", "exec", namespaces[0], program, *options)
    assert tokens(run(*SHORT, launcher=launcher)) == expected
