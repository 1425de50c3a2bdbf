"""Runs the ranks of one host: starts them, passes signals on, ends all when one fails and says why in one sentence.

One thread around one selector: the kernel ties a rank's parent-death signal to the thread that forked it. No torch.
"""

import contextlib
import ctypes
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from .errors import LaunchError
from .logs import say
from .status import Failed, Phase, Reached, decode

SETTLE_S = 0.3  # after a first failure: others may know the same sentence
SUSPECT_S = 1.5  # after "another rank is gone": that rank's own end says why
TERMINATE_S = 2.0  # from SIGTERM to SIGKILL once a rank failed; with the above, all is over within 5 s
END_S = 10.0  # the same when everything went well, or the user asked for the end

_PR_SET_PDEATHSIG = 1
_LINE_LIMIT = 1 << 16
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class RankSpec:
    """How to start one rank.

    `pass_fds` are handed over: closed here once the rank has them. `prepare` runs in the new process before the
    program: cores, memory policy; a LaunchError of it is the sentence that the rank could not be started for.
    """

    rank: int
    command: Sequence[str]
    env: Mapping[str, str]
    pass_fds: tuple[int, ...] = ()
    prepare: Callable[[], object] | None = None


@dataclass(frozen=True)
class Failure:
    """Why a rank ended. `consequence`: it only noticed that another one was gone."""

    rank: int
    sentence: str
    status: int
    consequence: bool = False
    own_words: bool = False


class _Pipe:
    """The reading end of what a rank writes, line by line."""

    def __init__(self, fd: int, take: Callable[[bytes], None]) -> None:
        self.fd = fd
        self._take = take
        self._rest = b""
        os.set_blocking(fd, False)

    def read(self) -> bool:
        """Hands on what is there; False at the end."""
        try:
            data = os.read(self.fd, _LINE_LIMIT)
        except BlockingIOError:
            return True
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take(line)
        if len(self._rest) > _LINE_LIMIT:
            self.flush()
        return bool(data)

    def flush(self) -> None:
        if self._rest:
            self._take(self._rest)
        self._rest = b""


@dataclass(eq=False)
class _Rank:
    rank: int
    process: subprocess.Popen[bytes]
    pidfd: int
    phase: Phase = "starting"
    sentence: Failed | None = None
    running: bool = True
    stopped_at: float | None = None  # since when SIGSTOP, or a debugger, holds it
    pipes: list[_Pipe] = field(default_factory=list)


def supervise(
    specs: Sequence[RankSpec],
    oom_kills: Callable[[], int] = lambda: 0,
    *,
    longest_stop_s: float = float("inf"),
    end_s: float = END_S,
) -> int:
    """Runs the ranks to their end and returns the exit status for the command.

    `oom_kills` counts the processes of our cgroup that the kernel killed for lack of memory so far. A rank may work as
    long as it likes, but one that is stopped (SIGSTOP) for `longest_stop_s` counts as failed, whatever it was doing.
    `end_s`: seconds that ranks get to end in when the user wants the end.
    The sentence about the first failure goes to stderr. Raises LaunchError if a rank cannot be started.
    """
    supervisor = _Supervisor(oom_kills, longest_stop_s, end_s)
    try:
        for spec in specs:
            supervisor.start(spec)
        return supervisor.run()
    finally:
        supervisor.close()


def cause(failures: Sequence[Failure]) -> tuple[str, int]:
    """The sentence and exit status of what happened first: a rank's own end rather than what its peers saw of it."""
    roots = [failure for failure in failures if not failure.consequence] or list(failures)
    first = roots[0]
    if not first.own_words:
        return first.sentence, first.status
    # What rank 0 or several ranks say alike is about the input, not about a rank.
    shared = any(other.rank == 0 or other.rank != first.rank for other in roots if other.sentence == first.sentence)
    return (first.sentence if shared else f"rank {first.rank}: {first.sentence}"), first.status


class _Supervisor:
    def __init__(self, oom_kills: Callable[[], int], longest_stop_s: float, end_s: float) -> None:
        self._oom_kills = oom_kills
        self._longest_stop_s = longest_stop_s
        self._end_s = end_s
        self._oom_before = oom_kills()
        self._pid = os.getpid()
        self._ranks: list[_Rank] = []
        self._failures: list[Failure] = []
        self._decide_at: float | None = None
        self._kill_at: float | None = None
        self._outcome: int | None = None  # exit status once decided
        self._interrupted = False
        self._selector = selectors.DefaultSelector()
        self._wake, self._signalled = socket.socketpair()
        self._old_handlers = {
            number: signal.signal(number, lambda *_: None)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTSTP, signal.SIGCHLD)
        }
        for end in (self._wake, self._signalled):
            end.setblocking(False)
        self._old_wakeup = signal.set_wakeup_fd(self._signalled.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._wake, selectors.EVENT_READ, self._on_signal)

    def start(self, spec: RankSpec) -> None:
        status_read, status_write = os.pipe()
        # Rank 0 is the program: its output is ours. The others' lines get a prefix, and nothing else reaches stdout.
        error_read, error_write = os.pipe()
        refusal_read, refusal_write = os.pipe()
        try:
            process = subprocess.Popen(
                spec.command,
                env={**spec.env, "TILERANK_STATUS": str(status_write)},
                stdin=subprocess.DEVNULL,
                stdout=None if spec.rank == 0 else error_write,
                stderr=None if spec.rank == 0 else error_write,
                pass_fds=(*spec.pass_fds, status_write),
                process_group=0,
                preexec_fn=partial(_before_exec, self._pid, spec.prepare, refusal_write),
            )
        except (OSError, subprocess.SubprocessError) as e:
            why = _refusal(refusal_read) or str(e)
            raise LaunchError(f"rank {spec.rank} could not be started: {why}") from e
        finally:
            for fd in (status_write, error_write, refusal_read, refusal_write, *spec.pass_fds):
                os.close(fd)
        rank = _Rank(spec.rank, process, os.pidfd_open(process.pid))
        self._ranks.append(rank)
        self._selector.register(rank.pidfd, selectors.EVENT_READ, partial(self._on_exit, rank))
        for fd, take in ((status_read, _take_status), (error_read, _print_line)):
            pipe = _Pipe(fd, partial(take, rank))
            rank.pipes.append(pipe)
            self._selector.register(fd, selectors.EVENT_READ, partial(self._on_output, rank, pipe))

    def run(self) -> int:
        while any(rank.running for rank in self._ranks):
            times = [at for at in (self._decide_at, self._kill_at, self._patience_ends()) if at is not None]
            for key, _ in self._selector.select(max(min(times) - time.monotonic(), 0) if times else None):
                if key.fd in self._selector.get_map():  # not closed by an earlier one of this round
                    key.data()
            now = time.monotonic()
            if (ends := self._patience_ends()) is not None and now >= ends:
                self._fail_stopped()
            if self._decide_at is not None and now >= self._decide_at:
                self._decide()
            if self._kill_at is not None and now >= self._kill_at:
                self._kill_at = None
                self._signal_all(signal.SIGKILL)
        if self._decide_at is not None:
            self._decide()
        return self._outcome or 0

    def close(self) -> None:
        self._signal_all(signal.SIGKILL)
        for rank in self._ranks:
            if rank.running:
                rank.process.wait()
                self._close_fd(rank.pidfd)
            for pipe in list(rank.pipes):
                self._close_pipe(rank, pipe)
        self._selector.close()
        signal.set_wakeup_fd(self._old_wakeup)
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        self._wake.close()
        self._signalled.close()

    def _on_signal(self) -> None:
        for number in self._wake.recv(64):
            if number == signal.SIGCHLD:
                self._note_stopped()
            elif number == signal.SIGTSTP:
                self._pause()
            else:
                self._end(signal.Signals(number))

    def _end(self, number: signal.Signals) -> None:
        self._decide_at = None
        self._kill_at = time.monotonic() + (0 if self._interrupted else self._end_s)
        self._interrupted = True
        self._outcome = self._outcome or 128 + number
        self._signal_all(number)
        self._signal_all(signal.SIGCONT)  # a stopped one hears it, too

    def _pause(self) -> None:
        """Ctrl-Z: the terminal stops only our own process group, and each rank has one of its own."""
        self._signal_all(signal.SIGSTOP)
        began = time.monotonic()
        os.kill(self._pid, signal.SIGSTOP)  # returns when the shell's fg or bg, or somebody's SIGCONT, continues us
        self._signal_all(signal.SIGCONT)
        away = time.monotonic() - began
        self._decide_at = None if self._decide_at is None else self._decide_at + away
        self._kill_at = None if self._kill_at is None else self._kill_at + away
        for rank in self._ranks:
            rank.stopped_at = None

    def _note_stopped(self) -> None:
        """Which ranks are held, and since when. SIGCHLD tells of it; of their end the pidfd does."""
        change = os.WSTOPPED | os.WCONTINUED | os.WNOHANG
        for rank in self._ranks:
            with contextlib.suppress(ChildProcessError):
                while rank.running and (found := os.waitid(os.P_PID, rank.process.pid, change)) is not None:
                    rank.stopped_at = time.monotonic() if found.si_code == os.CLD_STOPPED else None

    def _patience_ends(self) -> float | None:
        """When the rank that has been stopped longest will have been so for too long."""
        since = [rank.stopped_at for rank in self._ranks if rank.running and rank.stopped_at is not None]
        if not since or self._outcome is not None or self._decide_at is not None:
            return None
        ends = min(since) + self._longest_stop_s
        return ends if ends < float("inf") else None

    def _fail_stopped(self) -> None:
        held = [(rank.stopped_at, rank) for rank in self._ranks if rank.running and rank.stopped_at is not None]
        _, rank = min(held, key=lambda item: item[0])
        name = f"rank {rank.rank} (process {rank.process.pid})"
        self._fail(Failure(rank.rank, f"{name} was stopped for {self._longest_stop_s:g} s while {rank.phase}", 1))

    def _on_output(self, rank: _Rank, pipe: _Pipe) -> None:
        if not pipe.read():
            self._close_pipe(rank, pipe)

    def _on_exit(self, rank: _Rank) -> None:
        self._signal(rank, signal.SIGKILL)  # whatever it started itself; its pid is not free before wait()
        code = rank.process.wait()
        rank.running = False
        self._close_fd(rank.pidfd)
        for pipe in list(rank.pipes):  # what it wrote last explains its end
            pipe.read()
            self._close_pipe(rank, pipe)
        if self._outcome is not None:
            return
        if code != 0:
            self._fail(self._describe(rank, code))
        elif rank.rank == 0 and self._decide_at is None:
            self._outcome = 0
            self._kill_at = time.monotonic() + END_S

    def _describe(self, rank: _Rank, code: int) -> Failure:
        status = 128 - code if code < 0 else code
        if rank.sentence is not None:
            return Failure(rank.rank, rank.sentence.sentence, status, rank.sentence.consequence, own_words=True)
        name = f"rank {rank.rank} (process {rank.process.pid})"
        if code >= 0:
            return Failure(rank.rank, f"{name} exited with status {code} while {rank.phase}", status)
        killed = f"{name} was killed by {signal.Signals(-code).name} while {rank.phase}"
        if -code == signal.SIGKILL and self._oom_kills() > self._oom_before:
            killed = f"{name} was killed while {rank.phase}, probably out of memory"
        return Failure(rank.rank, killed, status)

    def _fail(self, failure: Failure) -> None:
        self._failures.append(failure)
        at = time.monotonic() + (SUSPECT_S if failure.consequence else SETTLE_S)
        self._decide_at = at if self._decide_at is None else min(at, self._decide_at)

    def _decide(self) -> None:
        # Also what ranks have said that are still on their way out.
        said = [(rank.rank, rank.sentence) for rank in self._ranks if rank.running and rank.sentence is not None]
        going = [Failure(rank, failed.sentence, 1, failed.consequence, own_words=True) for rank, failed in said]
        sentence, self._outcome = cause([*self._failures, *going])
        self._decide_at = None
        self._kill_at = time.monotonic() + TERMINATE_S
        self._signal_all(signal.SIGTERM)
        say(f"tilerank: error: {sentence}")

    def _signal_all(self, number: signal.Signals) -> None:
        for rank in self._ranks:
            if rank.running:
                self._signal(rank, number)

    def _signal(self, rank: _Rank, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.process.pid, number)

    def _close_pipe(self, rank: _Rank, pipe: _Pipe) -> None:
        pipe.flush()
        rank.pipes.remove(pipe)
        self._close_fd(pipe.fd)

    def _close_fd(self, fd: int) -> None:
        self._selector.unregister(fd)
        os.close(fd)


def _before_exec(supervisor: int, prepare: Callable[[], object] | None, refusal: int) -> None:
    """In the new process: it dies with the supervisor, may write to the terminal from the background, and is placed.

    Of an exception the parent learns only that there was one; the sentence goes through the pipe `refusal`.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(1)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    if prepare is not None:
        try:
            prepare()
        except LaunchError as e:
            os.write(refusal, str(e).encode()[:4096])
            raise


def _refusal(pipe: int) -> str:
    """What `prepare` failed with, if it did."""
    os.set_blocking(pipe, False)
    try:
        return os.read(pipe, 4096).decode(errors="replace")
    except BlockingIOError:
        return ""


def _take_status(rank: _Rank, line: bytes) -> None:
    try:
        message = decode(line)
    except msgspec.DecodeError:
        return  # cut short by the rank's death
    if isinstance(message, Reached):
        rank.phase = message.phase
    else:
        rank.sentence = message


def _print_line(rank: _Rank, line: bytes) -> None:
    say(f"[rank {rank.rank}] {line.decode(errors='backslashreplace')}")
