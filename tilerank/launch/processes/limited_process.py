"""Runs untrusted programs, such as grammars and chat templates, in a child process with limits of time and memory.

Their cost is only known once they have run. In a process of their own, the kernel can stop one without harm to others.
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
from typing import IO

MEMORY = 4 << 30
"""Limit of the address space, in bytes."""
_LENGTH_BYTES = 4
_INHERITED = ("LD_", "PYTHON")
"""Prefixes of the environment variables that the processes see. Others may be secrets, such as the API key."""


class LimitedPool:
    """`count` processes `python -m module *arguments`, each of which calls `answer_all`. Started when needed."""

    def __init__(self, count: int, module: str, *arguments: str) -> None:
        self.processes = [LimitedProcess(module, *arguments) for _ in range(count)]
        self._idle: asyncio.LifoQueue[LimitedProcess] = asyncio.LifoQueue()
        for process in self.processes:
            self._idle.put_nowait(process)

    async def ask(self, question: str) -> str | None:
        """Return the answer; None if the process exceeded a limit."""
        process = await self._idle.get()
        asking = asyncio.create_task(process.ask(question))
        asking.add_done_callback(lambda _: self._idle.put_nowait(process))
        return await asyncio.shield(asking)  # a process answers an abandoned question before the next one


class LimitedProcess:
    """The parent's end of one process."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._command = [sys.executable, "-P", "-m", module, *arguments]
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    @property
    def is_running(self) -> bool:
        """Whether the process runs: it may have been killed to free memory."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the process. Another one that it replaces has ended."""
        self.close()
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        # The terminal sends these signals to both processes, but this one must keep working until the HTTP process
        # has drained its requests. The child inherits the blocked signals, so there is no unprotected moment.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        try:
            environment = {name: value for name, value in os.environ.items() if name.startswith(_INHERITED)}
            with theirs:
                end = theirs.fileno()
                self._process = subprocess.Popen(self._command, stdin=end, stdout=end, env=environment)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def close(self) -> None:
        """End the process as soon as it has answered."""
        if self._socket is not None:
            self._socket.close()

    async def ask(self, question: str) -> str | None:
        """Return the answer; None if the process exceeded a limit. To be awaited by one task at a time."""
        if not self.is_running:
            await asyncio.to_thread(self.start)
        assert self._process is not None and self._socket is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            await asyncio.get_running_loop().sock_sendall(self._socket, _message(question))
            if (answer := await _receive(self._socket)) is not None:
                return answer
        self._process.kill()
        await asyncio.to_thread(self._process.wait)
        return None


def answer_all(answer: Callable[[str], str], cpu_s: int) -> None:
    """In the child: answer each question, in at most `cpu_s` seconds, until the other end closes the pipe.

    CPU time is counted, so that a busy machine does not refuse a good program.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    while (question := _read(sys.stdin.buffer)) is not None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        # The limit is in whole seconds of the whole process; beyond it the kernel kills the process.
        end = int(used.ru_utime + used.ru_stime) + 1 + cpu_s
        resource.setrlimit(resource.RLIMIT_CPU, (end, resource.RLIM_INFINITY))
        sys.stdout.buffer.write(_message(answer(question)))
        sys.stdout.buffer.flush()


def _message(text: str) -> bytes:
    data = text.encode()
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


async def _receive(connection: socket.socket) -> str | None:
    """Return the next message, or None once the other end has closed."""
    loop, data, end = asyncio.get_running_loop(), bytearray(), _LENGTH_BYTES
    while len(data) < end:
        received = await loop.sock_recv(connection, 1 << 20)
        if not received:
            return None
        data += received
        if len(data) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "big")
    return data[_LENGTH_BYTES:].decode()


def _read(stream: IO[bytes]) -> str | None:
    """Return the next message, or None once the other end has closed."""
    head = stream.read(_LENGTH_BYTES)
    length = int.from_bytes(head, "big")
    data = stream.read(length) if len(head) == _LENGTH_BYTES else b""
    return data.decode() if len(head) == _LENGTH_BYTES and len(data) == length else None
