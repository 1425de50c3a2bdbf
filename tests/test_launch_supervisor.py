"""The supervisor with small programs in place of ranks: what it passes on, what it says, what it leaves behind."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tilerank.launch.supervisor import Failure, cause

# The supervising process. Its ranks run the program in argv[1] with their rank as argv[1].
SUPERVISOR = """
    import os, sys
    from tilerank.launch.supervisor import RankSpec, supervise
    from pathlib import Path
    from tilerank.launch import cgroup
    from tilerank.launch.errors import LaunchError

    if group := os.environ.get("GROUP"):
        Path(group, "cgroup.procs").write_text(str(os.getpid()))
    program, size = sys.argv[1], int(sys.argv[2])
    counts = iter(map(int, os.environ["OOM_KILLS"].split(","))) if "OOM_KILLS" in os.environ else None
    oom_kills = cgroup.oom_kills if counts is None else lambda: next(counts)
    def prepare():
        os.nice(3)
    specs = [RankSpec(r, [sys.executable, "-c", program, str(r)], os.environ, prepare=prepare) for r in range(size)]
    try:
        sys.exit(supervise(specs, oom_kills=oom_kills))
    except LaunchError as e:
        sys.exit(f"refused: {e}")
"""

# What the ranks have at hand.
PREAMBLE = """
    import os, signal, sys, time
    from tilerank.launch.status import Failed, Reached, StatusPipe
    rank = int(sys.argv[1])
    status = StatusPipe(int(os.environ["TILERANK_STATUS"]))
"""


def start(program: str, size: int, *, then: str = "", **environment: str) -> "subprocess.Popen[str]":
    program = "".join(map(textwrap.dedent, (PREAMBLE, program, then)))
    command = [sys.executable, "-c", textwrap.dedent(SUPERVISOR), program, str(size)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env={**os.environ, **environment})


def finish(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    return process.returncode, out, err


def run(program: str, size: int, **environment: str) -> tuple[int, str, str]:
    return finish(start(program, size, **environment))


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def await_death(pids: list[int], seconds: float) -> list[int]:
    """The ones of `pids` still alive after at most `seconds`."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def read_pids(process: "subprocess.Popen[str]", count: int) -> list[int]:
    """The ranks print `pid N` on stderr."""
    assert process.stderr is not None
    pids: list[int] = []
    while len(pids) < count:
        line = process.stderr.readline()
        assert line, "the ranks ended early"
        if found := re.search(r"pid (\d+)", line):
            pids.append(int(found[1]))
    return pids


WAITING = """
    print("pid", os.getpid(), file=sys.stderr, flush=True)
    time.sleep(60)
"""


def test_output_of_rank_0_is_the_programs_and_the_others_get_a_prefix() -> None:
    status, out, err = run(
        """
        print(f"out {rank}", flush=True)
        print(f"WARNING first {rank}\\nsecond {rank}", end="" if rank else "\\n", file=sys.stderr)
        """,
        3,
    )
    assert status == 0
    assert out == "out 0\n"
    lines = err.splitlines()
    for rank in (1, 2):
        own = [line for line in lines if line.startswith(f"[rank {rank}] ")]
        assert sorted(own) == sorted(f"[rank {rank}] {text} {rank}" for text in ("out", "WARNING first", "second"))
    assert "WARNING first 0" in lines and "second 0" in lines


def test_ranks_are_prepared_and_have_no_input() -> None:
    status, out, _ = run("print(os.nice(0), repr(sys.stdin.read()), os.getpgid(0) == os.getpid())", 1)
    assert (status, out) == (0, f"{os.nice(0) + 3} '' True\n")


@pytest.mark.parametrize(
    ("program", "status", "sentence"),
    [
        pytest.param(
            'if rank == 1: status.send(Reached("loading")); os.kill(os.getpid(), 9)\ntime.sleep(60)',
            137,
            r"rank 1 \(process \d+\) was killed by SIGKILL while loading",
            id="killed",
        ),
        pytest.param(
            "if rank == 2: os.kill(os.getpid(), signal.SIGILL)\ntime.sleep(60)",
            132,
            r"rank 2 \(process \d+\) was killed by SIGILL while starting",
            id="illegal-instruction",
        ),
        pytest.param(
            'if rank == 0: status.send(Reached("generating")); sys.exit(7)\ntime.sleep(60)',
            7,
            r"rank 0 \(process \d+\) exited with status 7 while generating",
            id="exited",
        ),
        pytest.param(
            'if rank == 2: status.send(Failed("no room", False)); os._exit(1)\ntime.sleep(60)',
            1,
            "rank 2: no room",
            id="own-words",
        ),
        pytest.param(
            'if rank == 0: status.send(Failed("the prompt is too long", False)); os._exit(1)\ntime.sleep(60)',
            1,
            "the prompt is too long",
            id="rank-0-speaks-for-all",
        ),
        pytest.param(
            'status.send(Failed("shape (3, 4) expected", False)); os._exit(1)',
            1,
            r"shape \(3, 4\) expected",
            id="all-say-so",
        ),
        pytest.param(
            """
            if rank == 1:
                time.sleep(0.5)
                os.kill(os.getpid(), 9)
            status.send(Failed("rank 1 is gone", True))
            os._exit(1)
            """,
            137,
            r"rank 1 \(process \d+\) was killed by SIGKILL while starting",
            id="the-cause-and-not-what-others-saw",
        ),
        pytest.param(
            """
            if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)
            status.send(Failed("rank 1 did not answer within 8 s", True))
            os._exit(1)
            """,
            1,
            "rank 1 did not answer within 8 s",
            id="stopped",
        ),
        pytest.param(
            """
            if rank == 1: sys.exit(3)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(60)
            """,
            3,
            r"rank 1 \(process \d+\) exited with status 3 while starting",
            id="others-ignore-sigterm",
        ),
    ],
)
def test_one_failure_ends_all_within_five_seconds(program: str, status: int, sentence: str) -> None:
    process = start('print("pid", os.getpid(), file=sys.stderr, flush=True)\n' + textwrap.dedent(program), 3)
    began = time.monotonic()
    code, _, err = finish(process)
    assert time.monotonic() - began < 5 + 5, "five seconds after the failure, and some to start"
    assert code == status
    said = [line for line in err.splitlines() if line.startswith("tilerank: error: ")]
    assert len(said) == 1 and re.fullmatch(f"tilerank: error: {sentence}", said[0]), err
    pids = [int(pid) for pid in re.findall(r"pid (\d+)", err)]
    assert pids and not [pid for pid in pids if alive(pid)]


def test_killed_by_the_kernel_for_lack_of_memory() -> None:
    """The cgroup's counter stood at 4 at the start and at 5 when the rank was found killed."""
    code, _, err = run("if rank == 1: os.kill(os.getpid(), 9)\ntime.sleep(60)", 2, OOM_KILLS="4,5")
    assert code == 137
    assert re.search(r"error: rank 1 \(process \d+\) was killed while starting, probably out of memory", err)


def test_killed_by_the_kernel_for_real() -> None:
    """A control group of 200 MB, version 1 or 2, in which rank 1 asks for more."""
    roots = {"memory.limit_in_bytes": Path("/sys/fs/cgroup/memory"), "memory.max": Path("/sys/fs/cgroup")}
    limit, root = next(((n, r) for n, r in roots.items() if (r / "cgroup.procs").exists()), ("", None))
    if root is None:
        pytest.skip("no memory control groups on this machine")
    group = root / f"tilerank-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(200 << 20))
    except OSError as error:
        pytest.skip(f"cannot make a control group: {error.strerror}")
    try:
        code, _, err = run("if rank == 1: held = b'x' * (400 << 20)\ntime.sleep(60)", 2, GROUP=str(group))
    finally:
        group.rmdir()
    assert code == 137
    assert re.search(r"error: rank 1 \(process \d+\) was killed while starting, probably out of memory", err)


def test_what_a_rank_started_ends_with_it() -> None:
    process = start(
        """
        import subprocess
        child = subprocess.Popen(["sleep", "60"])
        print("pid", child.pid, file=sys.stderr, flush=True)
        """,
        2,
    )
    pids = read_pids(process, 2)
    assert finish(process)[0] == 0
    assert await_death(pids, 2) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_passed_on(number: signal.Signals) -> None:
    process = start(
        """
        def leave(number, frame):
            print("got", number, file=sys.stderr, flush=True)
            os._exit(0)
        signal.signal(signal.SIGINT, leave)
        signal.signal(signal.SIGTERM, leave)
        """,
        2,
        then=WAITING,
    )
    pids = read_pids(process, 2)
    process.send_signal(number)
    code, _, err = finish(process)
    assert code == 128 + number
    assert err.count(f"got {int(number)}") == 2
    assert "tilerank: error" not in err
    assert await_death(pids, 1) == []


def test_a_second_signal_kills() -> None:
    process = start("signal.signal(signal.SIGINT, signal.SIG_IGN)", 2, then=WAITING)
    pids = read_pids(process, 2)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert len([pid for pid in pids if alive(pid)]) == 2
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 130
    assert await_death(pids, 1) == []


def test_ranks_die_with_a_killed_supervisor() -> None:
    process = start("signal.signal(signal.SIGTERM, signal.SIG_IGN)", 3, then=WAITING)
    pids = read_pids(process, 3)
    process.kill()
    assert await_death(pids, 5) == []
    finish(process)


def test_a_rank_that_cannot_be_started_is_named() -> None:
    code = """
        import os, sys
        from tilerank.launch.errors import LaunchError
        from tilerank.launch.supervisor import RankSpec, supervise
        sleeper = RankSpec(0, ["sleep", "60"], os.environ)
        try:
            supervise([sleeper, RankSpec(1, ["/no/such/program"], os.environ)])
        except LaunchError as e:
            print(e)
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=20)
    assert "rank 1 could not be started: " in result.stdout and "/no/such/program" in result.stdout


def test_the_cause_is_not_what_peers_saw_of_it() -> None:
    saw = Failure(0, "rank 2 is gone", 1, consequence=True, own_words=True)
    died = Failure(2, "rank 2 (process 7) was killed by SIGKILL while loading", 137)
    assert cause([saw, died]) == (died.sentence, 137)
    assert cause([saw]) == ("rank 2 is gone", 1)
    alone = Failure(1, "model-2.safetensors is cut short", 1, own_words=True)
    assert cause([alone]) == ("rank 1: model-2.safetensors is cut short", 1)
    assert cause([alone, Failure(2, alone.sentence, 1, own_words=True)]) == (alone.sentence, 1)


@pytest.fixture(autouse=True)
def nothing_is_left_in_shared_memory() -> Iterator[None]:
    before = set(Path("/dev/shm").iterdir())
    yield
    assert set(Path("/dev/shm").iterdir()) <= before
