"""Runs untrusted programs, such as grammars and chat templates, in a child process with limits of time and memory.

Their cost is only known once they have run. In a process of their own, the kernel can stop one without harm to others.
"""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import IO

MEMORY = 4 << 30
"""Limit of the address space, in bytes."""
_LENGTH_BYTES = 4
_INHERITED = ("LD_", "PYTHON")
"""Prefixes of the environment variables that the processes see. Others may be secrets, such as the API key."""


class LimitedProcess:
    """The parent's end of a process `python -m module *arguments`, which calls `answer_all`. Started when needed."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._command = [sys.executable, "-P", "-m", module, *arguments]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process if it does not run."""
        if self._process is not None and self._process.poll() is None:  # it may have been killed to free memory
            return
        # The terminal sends these signals to both processes, but this one must keep working until the HTTP process
        # has drained its requests. The child inherits the blocked signals, so there is no unprotected moment.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        try:
            environment = {name: value for name, value in os.environ.items() if name.startswith(_INHERITED)}
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def ask(self, question: str) -> str | None:
        """Return the answer; None if the process exceeded a limit. To be called by one thread at a time."""
        self.start()
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            _write(process.stdin, question)
            answer = _read(process.stdout)
        except BrokenPipeError:
            answer = None
        if answer is None:
            process.kill()
            process.wait()
        return answer


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
        _write(sys.stdout.buffer, answer(question))


def _write(stream: IO[bytes], text: str) -> None:
    data = text.encode()
    stream.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)
    stream.flush()


def _read(stream: IO[bytes]) -> str | None:
    """Return the next message, or None once the other end has closed."""
    head = stream.read(_LENGTH_BYTES)
    length = int.from_bytes(head, "big")
    data = stream.read(length) if len(head) == _LENGTH_BYTES else b""
    return data.decode() if len(head) == _LENGTH_BYTES and len(data) == length else None
