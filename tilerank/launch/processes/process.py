"""One child process of the command: its start, its output and status messages, and its end. Imports no torch."""

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from ..errors import LaunchError
from ..logs import say
from .event_loop import Loop, Timer
from .status import ErrorReport, Phase, Reached, status_inbox

_PR_SET_PDEATHSIG = 1
_READ = 1 << 16
"""Bytes of output that are read at a time, and the most of a line that is not complete yet."""
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class ProcessSpec:
    """The command and the environment of a process, which messages call `name`.

    `leads`: the other processes of its group only serve this one, so that they end when it ends.
    `label` precedes each line that the process writes, and nothing reaches stdout. With None the process writes to the
    command's own streams. `pass_fds` are handed over, and closed here once the process has them. `prepare` runs in the
    new process before the program, for cores and memory policy; the process cannot be started if it raises LaunchError.
    """

    name: str
    command: Sequence[str]
    env: Mapping[str, str]
    leads: bool = True
    label: str | None = None
    pass_fds: tuple[int, ...] = ()
    prepare: Callable[[], object] | None = None


class Listener(Protocol):
    """Receives the events of a process."""

    def reached(self, process: "Process") -> None:
        """The process entered another phase."""

    def stuck(self, process: "Process") -> None:
        """The process was stopped (SIGSTOP, a debugger) for too long."""

    def ended(self, process: "Process", code: int) -> None:
        """The process ended with an exit status, or with the negated number of a signal."""


class Process:
    """A running process in a process group of its own. `longest_stop_s`: see Listener.stuck.

    Raises LaunchError if it cannot be started.
    """

    def __init__(self, loop: Loop, spec: ProcessSpec, listener: Listener, longest_stop_s: float) -> None:
        self.spec = spec
        self.phase: Phase = "starting"
        self.failed: ErrorReport | None = None
        """The error that the process has reported."""
        self.running = True
        self._loop = loop
        self._listener = listener
        self._longest_stop_s = longest_stop_s
        self._until_stuck: Timer | None = None
        self._status = status_inbox()
        self._line = b""
        """The beginning of a line that the process has not completed yet."""
        status_read, status_write = os.pipe()
        error_read, error_write = os.pipe()
        refusal_read, refusal_write = os.pipe()
        output = None if spec.label is None else error_write
        try:
            self._process = subprocess.Popen(
                spec.command,
                env={**spec.env, "TILERANK_STATUS": str(status_write)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(*spec.pass_fds, status_write),
                process_group=0,
                preexec_fn=partial(_before_exec, os.getpid(), spec.prepare, refusal_write),
            )
        except (OSError, subprocess.SubprocessError) as e:
            why = _refusal(refusal_read) or str(e)
            for fd in (status_read, error_read):
                os.close(fd)
            raise LaunchError(f"{spec.name} could not be started: {why}") from e
        finally:
            for fd in (status_write, error_write, refusal_read, refusal_write, *spec.pass_fds):
                os.close(fd)
        self._pidfd = os.pidfd_open(self._process.pid)
        loop.watch(self._pidfd, self._on_end)
        self._pipes = [_Pipe(loop, status_read, self._take_status), _Pipe(loop, error_read, self._print_lines)]
        loop.children.append(self)

    def __str__(self) -> str:
        return f"{self.spec.name} (process {self._process.pid})"

    def signal(self, number: signal.Signals) -> None:
        if self.running:  # afterwards its pid may belong to another process
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def note_stopped(self) -> None:
        change = os.WSTOPPED | os.WCONTINUED | os.WNOHANG
        with contextlib.suppress(ChildProcessError):
            while self.running and (found := os.waitid(os.P_PID, self._process.pid, change)) is not None:
                self._loop.cancel(self._until_stuck)
                if found.si_code == os.CLD_STOPPED:
                    self._until_stuck = self._loop.after(self._longest_stop_s, partial(self._listener.stuck, self))

    def kill(self) -> None:
        """End the process now, without a call of the listener."""
        self.signal(signal.SIGKILL)
        self._reap()

    def _on_end(self) -> None:
        self.signal(signal.SIGKILL)  # ends its own children; its pid stays reserved until wait()
        code = self._reap()
        self._listener.ended(self, code)

    def _reap(self) -> int:
        code = self._process.wait()
        self.running = False
        self._loop.cancel(self._until_stuck)
        self._loop.close_fd(self._pidfd)
        self._loop.children.remove(self)
        for pipe in self._pipes:  # the last lines explain why it ended
            pipe.close()
        return code

    def _take_status(self, data: bytes) -> None:
        for message in self._status.feed(data):
            if isinstance(message, Reached):
                self.phase = message.phase
                self._listener.reached(self)
            else:
                self.failed = message

    def _print_lines(self, data: bytes) -> None:
        *lines, self._line = (self._line + data).split(b"\n")
        if self._line and (not data or len(self._line) > _READ):
            lines.append(self._line)
            self._line = b""
        for line in lines:
            say(f"[{self.spec.label}] {line.decode(errors='backslashreplace')}")


class _Pipe:
    """The reading end of a process's output. take: called with what has arrived, and with nothing at the end."""

    def __init__(self, loop: Loop, fd: int, take: Callable[[bytes], None]) -> None:
        self._loop = loop
        self._fd: int | None = fd
        self._take = take
        os.set_blocking(fd, False)
        loop.watch(fd, self._read)

    def _read(self) -> None:
        assert self._fd is not None
        try:
            data = os.read(self._fd, _READ)
        except BlockingIOError:
            return
        if data:
            self._take(data)
        else:
            self._close()

    def close(self) -> None:
        """Pass on what is left and close the pipe."""
        if self._fd is not None:
            self._read()
            self._close()

    def _close(self) -> None:
        if self._fd is not None:
            self._take(b"")
            self._loop.close_fd(self._fd)
            self._fd = None


def die_with(parent: int) -> None:
    """Make the kernel kill this new process when its parent ends, for whatever reason. Call it before exec."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _before_exec(parent: int, prepare: Callable[[], object] | None, refusal: int) -> None:
    """Run in the new process: tie its life to the parent, allow terminal output in the background, and place it.

    subprocess reports only that an exception was raised, so its text goes through the pipe `refusal`.
    """
    die_with(parent)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    if prepare is not None:
        try:
            prepare()
        except LaunchError as e:
            os.write(refusal, str(e).encode()[:4096])
            raise


def _refusal(pipe: int) -> str:
    """Return the text of the exception that `prepare` raised, if any."""
    os.set_blocking(pipe, False)
    try:
        return os.read(pipe, 4096).decode(errors="replace")
    except BlockingIOError:
        return ""
