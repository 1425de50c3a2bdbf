"""Logging of the command and its ranks: short lines on stderr. Rank 0 alone logs what is the same on all ranks."""

import atexit
import contextlib
import json
import logging
import sys
import time
from typing import Literal, TextIO, cast

from .log_limit import LimitedHandler
from .log_writer import LineWriter

DRAIN_S = 1.0
"""Longest wait at the end of a process for a reader of its last lines."""

LogFormat = Literal["plain", "text", "json"]
"""plain: lines for a terminal. text: the same lines with the time in UTC. json: an object on each line."""

_rank = 0
_format: LogFormat = "plain"
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


def use_format(format: LogFormat) -> None:
    """Choose the format of all lines that this process writes from now on."""
    global _format
    _format = format


def configure(rank: int, level: str, *, prefix: bool = False) -> None:
    """Send this process's log to stderr. `prefix` puts the rank before every line, for use without our supervisor."""
    global _rank
    _rank = rank
    handler = LimitedHandler()
    if _format == "json":
        handler.setFormatter(_JsonFormatter())
    else:
        head = ("%(asctime)s " if _format == "text" else "") + (f"[rank {rank}] " if prefix else "")
        where = " %(name)s" if level == "debug" else ""
        handler.setFormatter(_TextFormatter(f"{head}%(levelname)s{where}: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def say(text: str) -> None:
    """Write a line to stderr. A full disk or a closed terminal must not cause a traceback."""
    if _format == "json":
        text = json.dumps({"time": _time(time.time()), "level": "info", "message": text})
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


class _TextFormatter(logging.Formatter):
    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return _time(record.created)


class _JsonFormatter(logging.Formatter):
    """Formats a record as an object with time, level, logger, rank and message; `request` and `exception` if any."""

    def format(self, record: logging.LogRecord) -> str:
        values = {
            "time": _time(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "rank": _rank,
            "message": record.getMessage(),
        }
        if (request := getattr(record, "request", None)) is not None:
            values["request"] = request
        if record.exc_info:
            values["exception"] = self.formatException(record.exc_info)
        return json.dumps(values)


def _time(seconds: float) -> str:
    """Return a Unix time as ISO 8601 in UTC, with milliseconds."""
    ms = int(seconds * 1000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(ms // 1000))}.{ms % 1000:03d}Z"
