"""The supervisor with small programs instead of ranks: what it passes on, what it reports, what it leaves behind."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
from command import SOON_S, Run, await_true

from tilerank.launch.processes.supervisor import SETTLE_S, SUSPECT_S, TERMINATE_S, Failure, Outcome, cause

# The supervising process. Its ranks run the program in argv[1] with their rank as argv[1].
SUPERVISOR = """
    import os, sys
    from tilerank.launch.processes.process import ProcessSpec
    from tilerank.launch.processes.supervisor import WatchedConditions, supervise
    from pathlib import Path
    from tilerank.launch.host import cgroup
    from tilerank.launch.errors import LaunchError

    if group := os.environ.get("GROUP"):
        Path(group, "cgroup.procs").write_text(str(os.getpid()))
    program, size = sys.argv[1], int(sys.argv[2])
    counts = iter(map(int, os.environ["OOM_KILLS"].split(","))) if "OOM_KILLS" in os.environ else None
    oom_kills = cgroup.oom_kills if counts is None else lambda: next(counts)
    def prepare():
        os.umask(0o135)
        if "REFUSAL" in os.environ:
            raise LaunchError(os.environ["REFUSAL"])
    longest_stop_s = float(os.environ.get("LONGEST_STOP_S", "inf"))
    specs = [
        ProcessSpec(
            f"rank {r}",
            [sys.executable, "-c", program, str(r)],
            os.environ,
            leads=r == 0,
            label=f"rank {r}" if r else None,
            prepare=prepare,
        )
        for r in range(size)
    ]
    try:
        sys.exit(supervise(specs, WatchedConditions(oom_kills, longest_stop_s)))
    except LaunchError as e:
        sys.exit(f"refused: {e}")
"""

# Functions for the ranks' programs. Several processes write to one stderr, so a line must be a single write; a signal
# handler may interrupt it.
PREAMBLE = """
    import os, signal, sys, time
    from tilerank.launch.processes.status import ErrorReport, Reached, StatusPipe
    rank = int(sys.argv[1])
    status = StatusPipe(int(os.environ["TILERANK_STATUS"]))
    def tell(text):
        os.write(2, text.encode() + b"\\n")
    def await_all(size):
        open(os.path.join(os.environ["MEETING"], str(rank)), "w").close()
        while len(os.listdir(os.environ["MEETING"])) < size:
            time.sleep(0.01)
"""


def run(program: str, size: int, **environment: str) -> tuple[int, str, str]:
    with tempfile.TemporaryDirectory() as meeting, Started(program, size, MEETING=meeting, **environment) as running:
        result = running.finish()
    return result.status, result.out, result.err


class Started(Run):
    """A running supervisor whose ranks run `program`."""

    def __init__(self, program: str, size: int, *, then: str = "", **environment: str) -> None:
        program = "".join(map(textwrap.dedent, (PREAMBLE, program, then)))
        command = [sys.executable, "-c", textwrap.dedent(SUPERVISOR), program]
        super().__init__(size, command=command, env=environment)

    def rank_pids(self, count: int) -> dict[int, int]:
        """Return the process of each rank, as WAITING prints it."""
        found = [re.search(r"rank (\d+) pid (\d+)", self.await_line(" pid ")) for _ in range(count)]
        return {int(match[1]): int(match[2]) for match in found if match}


def state(pid: int) -> str:
    """Return the state of an existing process: R, S, D, T (stopped), Z ..."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


WAITING = """
    tell(f"rank {rank} pid {os.getpid()}")
    time.sleep(600)
"""


def test_output_of_rank_0_is_the_programs_and_the_others_get_a_prefix() -> None:
    status, out, err = run(
        """
        print(f"out {rank}", flush=True)
        os.write(2, f"WARNING first {rank}\\nsecond {rank}".encode() + (b"" if rank else b"\\n"))
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
    status, out, _ = run("print(os.umask(0), repr(sys.stdin.read()), os.getpgid(0) == os.getpid())", 1)
    assert (status, out) == (0, f"{0o135} '' True\n")


@pytest.mark.parametrize(
    ("program", "status", "sentence"),
    [
        pytest.param(
            'if rank == 1: status.send(Reached("loading")); os.kill(os.getpid(), 9)\ntime.sleep(600)',
            137,
            r"rank 1 \(process \d+\) was killed by SIGKILL while loading",
            id="killed",
        ),
        pytest.param(
            "if rank == 2: os.kill(os.getpid(), signal.SIGILL)\ntime.sleep(600)",
            132,
            r"rank 2 \(process \d+\) was killed by SIGILL while starting",
            id="illegal-instruction",
        ),
        pytest.param(
            'if rank == 0: status.send(Reached("generating")); sys.exit(7)\ntime.sleep(600)',
            7,
            r"rank 0 \(process \d+\) exited with status 7 while generating",
            id="exited",
        ),
        pytest.param(
            'if rank == 2: status.send(ErrorReport("no room", False)); os._exit(1)\ntime.sleep(600)',
            1,
            "rank 2: no room",
            id="own-words",
        ),
        pytest.param(
            'if rank == 0: status.send(ErrorReport("the prompt is too long", False)); os._exit(1)\ntime.sleep(600)',
            1,
            "the prompt is too long",
            id="rank-0-speaks-for-all",
        ),
        pytest.param(
            'await_all(3); status.send(ErrorReport("shape (3, 4) expected", False)); os._exit(1)',
            1,
            r"shape \(3, 4\) expected",
            id="all-say-so",
        ),
        pytest.param(
            """
            await_all(3)
            if rank == 1:
                time.sleep(0.5)
                os.kill(os.getpid(), 9)
            status.send(ErrorReport("rank 1 is gone", True))
            os._exit(1)
            """,
            137,
            r"rank 1 \(process \d+\) was killed by SIGKILL while starting",
            id="the-cause-and-not-what-others-saw",
        ),
        pytest.param(
            """
            if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)
            status.send(ErrorReport("rank 1 did not answer within 8 s", True))
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
            time.sleep(600)
            """,
            3,
            r"rank 1 \(process \d+\) exited with status 3 while starting",
            id="others-ignore-sigterm",
        ),
    ],
)
def test_one_failure_ends_all_within_five_seconds(program: str, status: int, sentence: str) -> None:
    assert SUSPECT_S + TERMINATE_S < 5 and SETTLE_S + TERMINATE_S < 5
    code, _, err = run('tell(f"rank {rank} pid {os.getpid()}")\n' + textwrap.dedent(program), 3)
    assert code == status
    said = [line for line in err.splitlines() if line.startswith("tilerank: error: ")]
    assert len(said) == 1 and re.fullmatch(f"tilerank: error: {sentence}", said[0]), err


def test_killed_by_the_kernel_for_lack_of_memory() -> None:
    """The cgroup's counter is 4 at the start and 5 once the rank is found killed."""
    code, _, err = run("if rank == 1: os.kill(os.getpid(), 9)\ntime.sleep(600)", 2, OOM_KILLS="4,5")
    assert code == 137
    assert re.search(r"error: rank 1 \(process \d+\) was killed while starting, probably out of memory", err)


def test_killed_by_the_kernel_for_real() -> None:
    """A control group of 200 MB, version 1 or 2, in which rank 1 allocates more."""
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
        code, _, err = run("if rank == 1: held = b'x' * (400 << 20)\ntime.sleep(600)", 2, GROUP=str(group))
    finally:
        group.rmdir()
    assert code == 137
    assert re.search(r"error: rank 1 \(process \d+\) was killed while starting, probably out of memory", err)


def test_what_a_rank_started_ends_with_it() -> None:
    """`finish` checks that no process of the run is left."""
    with Started('import subprocess; tell(f\'pid {subprocess.Popen(["sleep", "600"]).pid}\')', 2) as running:
        result = running.finish()
    assert (result.status, result.err.count("pid")) == (0, 2)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_passed_on(number: signal.Signals) -> None:
    program = """
        def leave(number, frame):
            tell(f"got {number}")
            os._exit(0)
        signal.signal(signal.SIGINT, leave)
        signal.signal(signal.SIGTERM, leave)
    """
    with Started(program, 2, then=WAITING) as running:
        running.rank_pids(2)
        running.process.send_signal(number)
        result = running.finish()
    assert result.status == 128 + number
    assert result.err.count(f"got {int(number)}") == 2
    assert "tilerank: error" not in result.err


def test_a_second_signal_kills() -> None:
    with Started("signal.signal(signal.SIGINT, lambda *_: tell('no'))", 2, then=WAITING + WAITING) as running:
        running.rank_pids(2)
        running.process.send_signal(signal.SIGINT)
        running.await_line("no")
        running.await_line("no")
        running.process.send_signal(signal.SIGINT)
        assert running.finish(SOON_S).status == 130


def test_ranks_die_with_a_killed_supervisor() -> None:
    with Started("signal.signal(signal.SIGTERM, signal.SIG_IGN)", 3, then=WAITING) as running:
        running.rank_pids(3)
        running.process.kill()
        assert running.finish().status == -signal.SIGKILL


def test_ctrl_z_stops_the_ranks_and_fg_continues_them() -> None:
    with Started("", 2, then=WAITING) as running:
        pids = running.rank_pids(2).values()
        own = running.process.pid
        running.process.send_signal(signal.SIGTSTP)
        await_true(lambda: [state(pid) for pid in (own, *pids)] == ["T"] * 3, SOON_S, "not all are stopped")
        running.process.send_signal(signal.SIGCONT)
        await_true(lambda: "T" not in map(state, (own, *pids)), SOON_S, "not all go on")
        running.process.send_signal(signal.SIGTERM)
        assert running.finish().status == 128 + signal.SIGTERM


def test_a_rank_that_stays_stopped_ends_all_and_is_named() -> None:
    """A stopped rank is not a slow one: a rank may be busy for any time."""
    program = 'time.sleep(2.5); status.send(Reached("loading"))'
    with Started(program, 3, then=WAITING, LONGEST_STOP_S="2") as running:
        pids = running.rank_pids(3)
        os.kill(pids[2], signal.SIGSTOP)
        os.kill(pids[2], signal.SIGCONT)
        os.kill(pids[1], signal.SIGSTOP)
        result = running.finish(SOON_S)
    sentence = f"rank 1 (process {pids[1]}) was stopped for 2 s while loading"
    assert (result.status, result.errors) == (1, [f"tilerank: error: {sentence}"]), result.err


def test_a_stopped_rank_is_the_cause_also_if_others_report_it_first() -> None:
    program = """
        if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1.5)
        status.send(ErrorReport("rank 1 did not answer within 1 s", True))
        os._exit(1)
    """
    status, _, err = run(program, 3, LONGEST_STOP_S="2")
    assert status == 1
    assert re.search(r"error: rank 1 \(process \d+\) was stopped for 2 s while starting", err), err


def test_a_rank_that_was_stopped_and_goes_on_is_forgiven() -> None:
    with Started("", 2, then=WAITING, LONGEST_STOP_S="60") as running:
        pids = running.rank_pids(2)
        os.kill(pids[1], signal.SIGSTOP)
        await_true(lambda: state(pids[1]) == "T", SOON_S, "it is not stopped")
        os.kill(pids[1], signal.SIGCONT)
        os.kill(pids[0], signal.SIGKILL)
        result = running.finish()
    assert result.status == 137 and f"rank 0 (process {pids[0]}) was killed" in result.err


def test_what_a_rank_cannot_be_prepared_for_is_said() -> None:
    _, _, err = run("", 2, REFUSAL="memory cannot be bound strictly to node 7")
    assert err == "refused: rank 0 could not be started: memory cannot be bound strictly to node 7\n"


def test_a_rank_that_cannot_be_started_is_named() -> None:
    code = """
        import os, sys
        from tilerank.launch.errors import LaunchError
        from tilerank.launch.processes.process import ProcessSpec
        from tilerank.launch.processes.supervisor import WatchedConditions, supervise
        specs = [ProcessSpec("rank 0", ["sleep", "60"], os.environ), ProcessSpec("rank 1", ["/no/such/program"], {})]
        try:
            supervise(specs, WatchedConditions())
        except LaunchError as e:
            print(e)
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=20)
    assert "rank 1 could not be started: " in result.stdout and "/no/such/program" in result.stdout


def test_the_cause_is_not_what_peers_saw_of_it() -> None:
    saw = Failure("rank 0", "rank 2 is gone", 1, consequence=True, own_words=True, leads=True)
    died = Failure("rank 2", "rank 2 (process 7) was killed by SIGKILL while loading", 137)
    assert cause([saw, died]) == Outcome(137, died.sentence)
    assert cause([saw]) == Outcome(1, "rank 2 is gone")
    alone = Failure("rank 1", "model-2.safetensors is cut short", 1, own_words=True)
    assert cause([alone]) == Outcome(1, "rank 1: model-2.safetensors is cut short")
    assert cause([alone, Failure("rank 2", alone.sentence, 1, own_words=True)]) == Outcome(1, alone.sentence)
