"""Runs what strangers send, such as grammars, chat templates, texts and media, in child processes with limits.

Its cost is only known once it has run. In a process of its own, the kernel can stop it without harm to others.
"""

import asyncio
import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from tilerank.runtime.protocol.errors import UnavailableError
from tilerank.runtime.protocol.framing import ClosedError, Connection, Inbox, encode

from .process import die_with

TRIES = 2
"""How many processes get a question, if they end for another reason than the question."""
_END_S = 0.1
"""For a process to end by itself once its socket is closed."""
_OUT_OF_MEMORY = 77
"""The exit status of a process whose question needs more memory than it may have."""
_OWN_SIGNALS = {
    signal.SIGXCPU,
    signal.SIGABRT,
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGILL,
    signal.SIGFPE,
    signal.SIGTRAP,
}
"""The signals with which a question ends its process: too much processor time; libraries that get no memory, overflow
the stack, or have an error. Others come from outside, such as SIGKILL from the kernel that is out of memory."""
_INHERITED = ("LD_", "PYTHON")
"""Prefixes of the environment variables that the processes see. Others may be secrets, such as the API key."""
Q = TypeVar("Q")
A = TypeVar("A")


class OverLimitError(Exception):
    """A question takes more processor time or memory than its process may use. Says how the process ended."""


@dataclass(frozen=True)
class Ending:
    """How a process ended. code: its exit status, or the negated number of a signal; None if it never started."""

    code: int | None

    @property
    def by_question(self) -> bool:
        """Whether its question ended it, and not somebody else."""
        return self.code is not None and (self.code == _OUT_OF_MEMORY or -self.code in _OWN_SIGNALS)

    def __str__(self) -> str:
        if self.code is None:
            return "could not be started"
        return f"was ended by signal {-self.code}" if self.code < 0 else f"ended with status {self.code}"


class LimitedProcess:
    """The parent's end of a process `python -m module *arguments`, which calls `answer_all` with its standard input."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._command = [sys.executable, "-P", "-m", module, *arguments]
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        """The process, if it runs: it may have been killed to free memory."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    @property
    def is_stopped(self) -> bool:
        """Whether the process runs, but was stopped by a signal."""
        pid = self.pid
        try:
            _, _, after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
        except FileNotFoundError:  # it does not run, or has ended since
            return False
        return after_name.split()[0] == "T"

    def connect(self) -> socket.socket:
        """Return the socket of the process, which is started if it does not run."""
        if self.pid is None:
            self._start()
        assert self._socket is not None
        return self._socket

    def _start(self) -> None:
        self.close()
        self._socket, theirs = socket.socketpair()
        # The terminal sends these signals to both processes, but this one must keep working until the HTTP process
        # has drained its requests. The child inherits the blocked signals, so there is no unprotected moment.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        try:
            environment = {name: value for name, value in os.environ.items() if name.startswith(_INHERITED)}
            with theirs:
                self._process = subprocess.Popen(
                    self._command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=environment
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def close(self) -> None:
        """End the process as soon as it has answered."""
        if self._socket is not None:
            self._socket.close()

    def kill(self) -> None:
        """Kill the process, if it runs. Its socket is then closed at its end."""
        if self._process is not None:
            self._process.kill()

    def end(self) -> Ending:
        """End the process now, if it runs; return how it ended."""
        self.close()
        if self._process is None:
            return Ending(None)
        try:
            code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        return Ending(code)


class LimitedPool(Generic[A]):
    """`count` processes, each of which answers one question after the other. answers: decodes the answers."""

    def __init__(self, count: int, answers: msgspec.msgpack.Decoder[A], module: str, *arguments: str) -> None:
        self.processes = [LimitedProcess(module, *arguments) for _ in range(count)]
        self._answers = answers
        self._idle: asyncio.LifoQueue[LimitedProcess] = asyncio.LifoQueue()
        for process in self.processes:
            self._idle.put_nowait(process)

    def start(self) -> None:
        """Start the processes, so that the first questions need not wait."""
        for process in self.processes:
            process.connect()

    async def ask(self, question: object, deadline_s: float) -> A:
        """Return the answer. A process that does not give it within `deadline_s` seconds is killed.

        Raises OverLimitError if the question ends its process, and UnavailableError if TRIES processes end otherwise.
        """
        data = encode(question)
        process = await self._idle.get()
        asking = asyncio.create_task(self._ask(process, data, deadline_s))

        def release(done: asyncio.Task[A]) -> None:
            self._idle.put_nowait(process)
            if not done.cancelled():
                done.exception()  # asyncio would log an exception that is never read

        asking.add_done_callback(release)
        return await asyncio.shield(asking)  # a process answers an abandoned question before the next one

    async def _ask(self, process: LimitedProcess, data: bytes, deadline_s: float) -> A:
        endings = list[Ending]()
        for _ in range(TRIES):
            connection = process.connect()  # in this thread, with whose end the kernel kills the process
            at_deadline = asyncio.get_running_loop().call_later(deadline_s, process.kill)
            try:
                return await self._exchange(connection, data)
            except (BrokenPipeError, ConnectionResetError, ClosedError):
                endings.append(await asyncio.to_thread(process.end))
            finally:
                at_deadline.cancel()
            if endings[-1].by_question:
                raise OverLimitError(f"the process {endings[-1]}")
        how = " and ".join(map(str, endings))
        raise UnavailableError(f"{TRIES} processes of the server failed at this request, one after the other: {how}")

    async def _exchange(self, connection: socket.socket, question: bytes) -> A:
        loop, inbox = asyncio.get_running_loop(), Inbox(self._answers)
        connection.setblocking(False)
        await loop.sock_sendall(connection, question)
        while data := await loop.sock_recv(connection, 1 << 20):
            for answer in inbox.feed(data):
                return answer
        raise ClosedError


def answer_all(
    connection: Connection[Q],
    answer: Callable[[Q], object],
    memory: int,
    cpu_s: Callable[[Q], int] | None = None,
) -> None:
    """In the child: answer each question until the parent closes, with an address space of `memory` bytes.

    cpu_s: returns the seconds of a question, if they are limited. CPU time is counted, so that a busy machine does not
    refuse a good program.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    with contextlib.suppress(ClosedError):
        while True:
            try:
                question = connection.receive()
                if cpu_s is not None:
                    used = resource.getrusage(resource.RUSAGE_SELF)
                    # The limit is in whole seconds of the whole process; beyond it the kernel kills the process.
                    end = int(used.ru_utime + used.ru_stime) + 1 + cpu_s(question)
                    resource.setrlimit(resource.RLIMIT_CPU, (end, resource.RLIM_INFINITY))
                connection.send(answer(question))
            except MemoryError:
                os._exit(_OUT_OF_MEMORY)  # a new process begins with all of its memory free
            del question


def to_parent(questions: msgspec.msgpack.Decoder[Q]) -> Connection[Q]:
    """In the child: return the connection over which the parent asks.

    The child is killed when the parent ends, also if it is stopped then, and before others where memory is short, for
    it can be replaced.
    """
    die_with(os.getppid())
    with contextlib.suppress(OSError):  # where /proc cannot be written
        Path("/proc/self/oom_score_adj").write_text("1000")
    return Connection(socket.socket(fileno=0), questions)
