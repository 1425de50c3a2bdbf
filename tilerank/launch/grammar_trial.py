"""Tries grammars of requests out in a process of its own, before the engine sees them.

A grammar is a program that a stranger wrote. What it takes to compile, nobody knows before; here the kernel ends the
process that tries, without harm to any other, and the request is refused. The engine compiles what was found good once
more, beside its steps (runtime/guide.py): compiled grammars cannot be handed from process to process.
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
"""For one grammar. Time of the processor: on a busy machine a good grammar is as good."""
MEMORY = 4 << 30
"""Bytes of address space."""
KEPT = 256
"""Grammars that are known to be good."""
_LENGTH_BYTES = 4


class GrammarTrial:
    """The HTTP process's end. The other process is started when there is a grammar to try."""

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir
        self._good: OrderedDict[str, None] = OrderedDict()
        self._thread = ThreadPoolExecutor(1)  # waits for the process, which tries one at a time
        self._process: subprocess.Popen[bytes] | None = None

    async def check(self, grammar: str) -> None:
        """RequestError if the grammar is wrong, or takes too much to compile."""
        if grammar not in self._good:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._try, grammar)
            self._good[grammar] = None
            if len(self._good) > KEPT:
                self._good.popitem(last=False)

    def _try(self, grammar: str) -> None:
        if self._process is None or self._process.poll() is not None:  # ended meanwhile, say by who frees memory
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
        # Whoever asks hears these signals as well, and may have grammars to try as long as it answers. What is blocked
        # here is blocked there, from the first moment on.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        try:
            return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def main(model_dir: Path) -> None:
    """Answers each grammar with a sentence against it, empty if there is none, until nobody asks any more."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    vocabulary = Vocabulary(model_dir)
    _refusal(vocabulary, "start: /x/")  # reads the tokens
    while (grammar := _read(sys.stdin.buffer)) is not None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        # The kernel counts whole seconds, and ends the process when it has used so many.
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
    """None: the other end is gone."""
    head = stream.read(_LENGTH_BYTES)
    length = int.from_bytes(head, "big")
    data = stream.read(length) if len(head) == _LENGTH_BYTES else b""
    return data.decode() if len(head) == _LENGTH_BYTES and len(data) == length else None


if __name__ == "__main__":
    main(Path(sys.argv[1]))
