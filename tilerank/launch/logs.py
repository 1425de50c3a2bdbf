"""Logging of the command and its ranks: short lines on stderr. Rank 0 alone logs what is the same on all ranks."""

import contextlib
import logging
import sys

_rank = 0


def configure(rank: int, level: str, *, prefix: bool = False) -> None:
    """Send this process's log to stderr. `prefix` puts the rank before every line, for use without our supervisor."""
    global _rank
    _rank = rank
    handler = logging.StreamHandler()
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
