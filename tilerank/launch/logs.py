"""Logging of the command and its ranks: short lines on stderr. Rank 0 alone logs what is the same on all ranks."""

import atexit
import contextlib
import logging
import sys
from typing import TextIO, cast

from .log_limit import LimitedHandler
from .log_writer import LineWriter

DRAIN_S = 1.0
"""Longest wait at the end of a process for a reader of its last lines."""

_rank = 0
_writer: LineWriter | None = None


def never_block() -> None:
    """Let everything that Python writes to stderr, tracebacks included, go through a LineWriter."""
    global _writer
    _writer = LineWriter(2)
    sys.stderr = cast(TextIO, _writer)
    atexit.register(drain)


def drain() -> None:
    """Wait until all lines so far are written, at most DRAIN_S. To be called before os._exit, and before a message
    whose receiver may write a line that comes after them."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LimitedHandler):
            handler.sum_up()
    if _writer is not None:
        _writer.drain(DRAIN_S)


def configure(rank: int, level: str, *, prefix: bool = False) -> None:
    """Send this process's log to stderr. `prefix` puts the rank before every line, for use without our supervisor."""
    global _rank
    _rank = rank
    handler = LimitedHandler()
    head = f"[rank {rank}] " if prefix else ""
    where = " %(name)s" if level == "debug" else ""
    handler.setFormatter(logging.Formatter(f"{head}%(levelname)s{where}: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def say(text: str) -> None:
    """Write a line to stderr. A full disk or a closed terminal must not cause a traceback."""
    with contextlib.suppress(OSError, AttributeError):  # AttributeError: stderr was closed from the start
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def log_info_on_rank0(logger: logging.Logger, message: str, *args: object) -> None:
    """Log what is the same on all ranks once."""
    if _rank == 0:
        logger.info(message, *args)


def log_debug_on_rank0(logger: logging.Logger, message: str, *args: object) -> None:
    """Log what is the same on all ranks once, with --log-level debug."""
    if _rank == 0:
        logger.debug(message, *args)
