"""Logging of the command and of its ranks: short lines on stderr; what holds for all ranks is said once, by rank 0."""

import contextlib
import logging
import sys

_rank = 0


def configure(rank: int, level: str, *, prefix: bool = False) -> None:
    """Sends this process's log to stderr. `prefix` names the rank in every line, where no supervisor does it."""
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
    """Writes a line to stderr. A full disk or a terminal that is gone must not end in a traceback."""
    with contextlib.suppress(OSError, AttributeError):  # AttributeError: stderr was closed from the start
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def log_info_on_rank0(logger: logging.Logger, message: str, *args: object) -> None:
    if _rank == 0:
        logger.info(message, *args)


def log_debug_on_rank0(logger: logging.Logger, message: str, *args: object) -> None:
    if _rank == 0:
        logger.debug(message, *args)
