"""The `tilerank` command: runs the subcommand, and prints each intentional error as one sentence.

A subcommand's module is imported only when it runs, and none imports torch to parse its arguments.
"""

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn, TextIO

from .errors import SPOKEN_ERRORS
from .logs import say

COMMANDS = {
    "generate": "generate text from a Hugging Face directory",
    "serve": "serve a model over the OpenAI API",
    "plan": "show how a model would be sharded and placed, without loading it",
    "doctor": "report what this machine offers and what is wrong with it",
    "bench": "measure this machine and the model on it",
}
MODULES = {"bench": ".bench.command", "plan": ".planning.plan"}
"""Module of each subcommand whose module is not named like it."""


class _Parser(argparse.ArgumentParser):
    """Prints one sentence for an error. The usage of a command with many options would hide it."""

    def error(self, message: str) -> NoReturn:
        say(f"tilerank: error: {message} ({self.prog} --help)")
        raise SystemExit(2)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's) and return its exit status."""
    _occupy_standard_streams()
    try:
        return _run(sys.argv[1:] if argv is None else list(argv))
    finally:
        try:
            if sys.stderr is not None:
                sys.stderr.flush()
        except OSError:
            _discard(sys.stderr)  # otherwise the interpreter flushes again at exit and changes the exit status


def _run(argv: list[str]) -> int:
    try:
        command, args = _parse(argv)
        status = int(command.run(args))
        if sys.stdout is not None:
            sys.stdout.flush()  # here an error becomes a sentence; at exit the interpreter would print a traceback
        return status
    except SPOKEN_ERRORS as e:
        say(f"tilerank: error: {e}")
        return 1
    except BrokenPipeError:
        _discard(sys.stdout)
        say("tilerank: error: the output was closed by its reader")
        return 1
    except OSError as e:
        if e.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO) or e.filename is not None:
            raise
        _discard(sys.stdout)
        say(f"tilerank: error: the output cannot be written: {e.strerror}")
        return 1
    except KeyboardInterrupt:
        return 130


def _parse(argv: list[str]) -> tuple[ModuleType, argparse.Namespace]:
    """Return the subcommand's module and its arguments."""
    parser = _Parser(
        prog="tilerank", description="Tensor-parallel runtime for large language and multimodal models on CPU servers."
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, purpose in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=purpose, description=purpose[0].upper() + purpose[1:] + ".")
        if argv[:1] == [name]:
            command = importlib.import_module(MODULES.get(name, f".{name}"), __package__)
            command.add_arguments(subparser)
    for argument in argv:
        if argument.startswith("--") and argument.endswith("=--"):  # argparse would silently drop such a value
            parser.error(f"argument {argument.removesuffix('=--')}: expected a value, found '--'")
    args = parser.parse_args(argv)
    args.argv = argv  # for the ranks, which are started with the same command line
    return command, args


def _occupy_standard_streams() -> None:
    """Open /dev/null for each standard stream that the shell closed (`>&-`), so that no socket gets its number."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def _discard(stream: TextIO) -> None:
    """Redirect `stream` to /dev/null, so that its unwritten rest is not written again at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
