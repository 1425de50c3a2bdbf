"""Runs what strangers send, such as grammars, chat templates and media, in child processes with limits.

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
from typing import Generic, TypeVar

import msgspec

from tilerank.runtime.protocol.framing import ClosedError, Connection, Inbox, encode

MEMORY = 4 << 30
"""Limit of the address space, in bytes."""
_END_S = 0.1
"""For a process to end by itself once its socket is closed."""
_INHERITED = ("LD_", "PYTHON")
"""Prefixes of the environment variables that the processes see. Others may be secrets, such as the API key."""
Q = TypeVar("Q")
A = TypeVar("A")


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

    def end(self) -> str:
        """End the process now, if it runs; return how it ended."""
        self.close()
        if self._process is None:
            return "could not be started"
        try:
            code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        return f"was ended by signal {-code}" if code < 0 else f"ended with status {code}"


class LimitedPool(Generic[A]):
    """`count` processes, each of which answers one question after the other. answers: decodes the answers."""

    def __init__(self, count: int, answers: msgspec.msgpack.Decoder[A], module: str, *arguments: str) -> None:
        self.processes = [LimitedProcess(module, *arguments) for _ in range(count)]
        self._answers = answers
        self._idle: asyncio.LifoQueue[LimitedProcess] = asyncio.LifoQueue()
        for process in self.processes:
            self._idle.put_nowait(process)

    async def ask(self, question: object) -> A | None:
        """Return the answer; None if the process exceeded a limit."""
        process = await self._idle.get()
        asking = asyncio.create_task(self._ask(process, question))
        asking.add_done_callback(lambda _: self._idle.put_nowait(process))
        return await asyncio.shield(asking)  # a process answers an abandoned question before the next one

    async def _ask(self, process: LimitedProcess, question: object) -> A | None:
        loop, inbox = asyncio.get_running_loop(), Inbox(self._answers)
        connection = await asyncio.to_thread(process.connect) if process.pid is None else process.connect()
        connection.setblocking(False)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError, ClosedError):
            await loop.sock_sendall(connection, encode(question))
            while data := await loop.sock_recv(connection, 1 << 20):
                for answer in inbox.feed(data):
                    return answer
        await asyncio.to_thread(process.end)
        return None


def answer_all(connection: Connection[Q], answer: Callable[[Q], object], cpu_s: int | None = None) -> None:
    """In the child: answer each question, if `cpu_s` is given in at most so many seconds, until the parent closes.

    CPU time is counted, so that a busy machine does not refuse a good program.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    with contextlib.suppress(ClosedError):
        while True:
            question = connection.receive()
            if cpu_s is not None:
                used = resource.getrusage(resource.RUSAGE_SELF)
                # The limit is in whole seconds of the whole process; beyond it the kernel kills the process.
                end = int(used.ru_utime + used.ru_stime) + 1 + cpu_s
                resource.setrlimit(resource.RLIMIT_CPU, (end, resource.RLIM_INFINITY))
            connection.send(answer(question))


def to_parent(questions: msgspec.msgpack.Decoder[Q]) -> Connection[Q]:
    """In the child: return the connection over which the parent asks."""
    return Connection(socket.socket(fileno=0), questions)
