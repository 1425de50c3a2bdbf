"""The `tilerank` command: finds the subcommand, and turns the errors we raise on purpose into one sentence.

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
    "plan": "say how a model would be cut and placed, without loading it",
    "doctor": "say what this machine offers and what is wrong with it",
    "bench": "measure this machine and the model on it",
}
MODULES = {"bench": ".bench.command"}
"""Of the commands that are not a module here by their name."""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence: the usage of a command with many options would bury it."""

    def error(self, message: str) -> NoReturn:
        say(f"tilerank: error: {message} ({self.prog} --help)")
        raise SystemExit(2)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (default: this process's) and returns its exit status."""
    _occupy_standard_streams()
    try:
        return _run(sys.argv[1:] if argv is None else list(argv))
    finally:
        try:
            if sys.stderr is not None:
                sys.stderr.flush()
        except OSError:
            _discard(sys.stderr)  # else the interpreter, which tries again, ends with a status of its own


def _run(argv: list[str]) -> int:
    try:
        command, args = _parse(argv)
        status = int(command.run(args))
        if sys.stdout is not None:
            sys.stdout.flush()  # while an error can still be told: at its end the interpreter has words of its own
        return status
    except SPOKEN_ERRORS as e:
        say(f"tilerank: error: {e}")
        return 1
    except BrokenPipeError:
        _discard(sys.stdout)
        say("tilerank: error: whoever read the output is gone")
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
    """The subcommand's module, and its arguments."""
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
        if argument.startswith("--") and argument.endswith("=--"):  # argparse drops such a value and goes on without
            parser.error(f"argument {argument.removesuffix('=--')}: expected a value, found '--'")
    args = parser.parse_args(argv)
    args.argv = argv  # for the ranks, which are started with the same command line
    return command, args


def _occupy_standard_streams() -> None:
    """Where the shell closed one (`>&-`) it leads nowhere, so that no socket of ours takes its number."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def _discard(stream: TextIO) -> None:
    """What could not be written must not be tried again at the end."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
