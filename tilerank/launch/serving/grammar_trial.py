"""Compiles the grammars of requests in a separate process, before the engine receives them.

A grammar is an untrusted program, and its cost is only known once it is compiled. In the separate process the kernel
can stop a compilation without harm to any other process, and the request is refused. The engine compiles an accepted
grammar again, in parallel with its steps (runtime/grammar_masks.py), because a compiled grammar cannot move between
processes.
"""

import asyncio
import resource
import signal
import subprocess
import sys
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

from tilerank.runtime.errors import RequestError
from tilerank.runtime.grammar import Vocabulary

CPU_S = 1
"""Limit for one grammar, in CPU time, so that a busy machine does not refuse a good grammar."""
MEMORY = 4 << 30
"""Limit of the address space, in bytes."""
KEPT = 256
"""Number of accepted grammars that are remembered."""
_LENGTH_BYTES = 4


class GrammarTrial:
    """The HTTP process's end. The other process is started with the first grammar."""

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir
        self._good: OrderedDict[str, None] = OrderedDict()
        self._thread = ThreadPoolExecutor(1)  # waits for the process, which compiles one grammar at a time
        self._process: subprocess.Popen[bytes] | None = None

    async def check(self, grammar: str) -> None:
        """Raise RequestError if the grammar is wrong, or too expensive to compile."""
        if grammar not in self._good:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._try, grammar)
            self._good[grammar] = None
            if len(self._good) > KEPT:
                self._good.popitem(last=False)

    def _try(self, grammar: str) -> None:
        if self._process is None or self._process.poll() is not None:  # it may have been killed to free memory
            self._process = self._start()
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            _write(self._process.stdin, grammar)
            refusal = _read(self._process.stdout)
        except BrokenPipeError:
            refusal = None
        if refusal is None:
            self._process.wait()
            self._process = None
            raise RequestError(f"the grammar: compiling it takes more than {CPU_S} s or {MEMORY >> 30} GiB")
        if refusal:
            raise RequestError(refusal)

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", __name__, str(self._model_dir)]
        # The terminal sends these signals to both processes, but this one must keep compiling until the HTTP process
        # has drained its requests. The child inherits the blocked signals, so there is no unprotected moment.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        try:
            return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def main(model_dir: Path) -> None:
    """Answer each grammar with an error sentence, empty if it compiles, until the other end closes the pipe."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    vocabulary = Vocabulary(model_dir)
    _refusal(vocabulary, "start: /x/")  # loads the tokens before the first limit applies
    while (grammar := _read(sys.stdin.buffer)) is not None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        # The limit is in whole seconds of CPU time of the whole process; beyond it the kernel kills the process.
        end = int(used.ru_utime + used.ru_stime) + 1 + CPU_S
        resource.setrlimit(resource.RLIMIT_CPU, (end, resource.RLIM_INFINITY))
        _write(sys.stdout.buffer, _refusal(vocabulary, grammar))


def _refusal(vocabulary: Vocabulary, grammar: str) -> str:
    try:
        vocabulary.matcher(grammar)
    except RequestError as e:
        return str(e)
    return ""


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


if __name__ == "__main__":
    main(Path(sys.argv[1]))
