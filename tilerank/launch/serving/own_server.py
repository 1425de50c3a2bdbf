"""A server that a command starts for itself: `tilerank chat` and `tilerank bench serve`. Imports no torch."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import IO

from ..processes.process import die_with

SERVED_AT = " is served at "
STOP_S = 60.0


@contextlib.contextmanager
def own_server(argv: Sequence[str], shown: str = "") -> Iterator[str]:
    """Run `tilerank serve` with the options `argv` on a free port, and yield its address once it is ready.

    stderr shows what it writes until then, and later the lines that contain `shown`. SystemExit with its status if it
    ends before it is ready.
    """
    command = [sys.executable, "-P", "-m", "tilerank", "serve", *argv, "--port", "0"]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for this command, which then ends the server
        preexec_fn=partial(die_with, os.getpid()),
    ) as process:
        assert process.stderr is not None
        try:
            yield _address(process, process.stderr, shown)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            finally:
                process.kill()


def _address(process: subprocess.Popen[str], lines: IO[str], shown: str) -> str:
    for line in lines:
        if SERVED_AT in line:
            threading.Thread(target=_relay, args=[lines, shown], daemon=True).start()
            return line.rsplit(SERVED_AT, 1)[1].strip()
        sys.stderr.write(line)
    raise SystemExit(process.wait() or 1)


def _relay(lines: IO[str], shown: str) -> None:
    for line in lines:
        if shown in line:
            sys.stderr.write(line)
