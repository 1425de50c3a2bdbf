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
from typing import TextIO

from .errors import USER_ERRORS
from .logs import drain, never_block, say
from .options.arguments import Parser, UsageError, parse, with_config
from .options.hub import find_model
from .options.mmproj import find_mmproj
from .version import own_version

COMMANDS = {
    "generate": "generate text from a Hugging Face directory",
    "serve": "serve a model over the OpenAI API",
    "chat": "talk with a model in the terminal",
    "batch": "answer the requests of a file, in the format of OpenAI's batches",
    "calibrate": "measure the inputs of a model's projections, by which quantising weighs errors",
    "plan": "show how a model would be sharded and placed, without loading it",
    "doctor": "report what this machine offers and what is wrong with it",
    "bench": "measure this machine and the model on it",
}
INTERNAL = "engine"
"""The command with which a process starts ranks for itself. Lists of commands leave it out."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` and return its exit status. By default it is this process's: stderr then never
    blocks, and success ends the process at once."""
    _occupy_standard_streams()
    if argv is not None:
        return _run(list(argv))
    never_block()
    status = _run(sys.argv[1:])
    if status == 0:
        # Everything is written. The interpreter would now take the modules of torch apart, for about a second.
        drain()
        os._exit(0)
    return status


def _run(argv: list[str]) -> int:
    try:
        command, args = parse_command(argv)
        status = int(command.run(args))
        if sys.stdout is not None:
            sys.stdout.flush()  # here an error becomes a sentence; at exit the interpreter would print a traceback
        return status
    except UsageError as e:
        say(f"tilerank: error: {e}")
        return 2
    except USER_ERRORS as e:
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


def parse_command(argv: list[str]) -> tuple[ModuleType, argparse.Namespace]:
    """Return the subcommand's module and its arguments, in which an id on the hub has become a directory. Raises
    LaunchError for those that cannot be used."""
    parser = _parser(argv[:1])
    argv = with_config(argv, parser)
    for argument in argv:
        if argument.startswith("--") and argument.endswith("=--"):  # argparse would silently drop such a value
            parser.error(f"argument {argument.removesuffix('=--')}: expected a value, found '--'")
    args = parse(parser, argv)
    args.argv = argv  # for the ranks, which are started with the same command line
    find_model(args)
    find_mmproj(args)
    return _module(args.command), args


def _parser(commands: Sequence[str]) -> Parser:
    """Return the parser. Only the subcommands in `commands` have their arguments, so that no other is imported."""
    parser = Parser(
        prog="tilerank", description="Tensor-parallel runtime for large language and multimodal models on CPU servers."
    )
    parser.add_argument("--version", action="version", version=f"tilerank {own_version()}")
    parser.add_argument(
        "--print-completion", action=_PrintCompletion, help="print a script that completes this command in a shell"
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, purpose in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=purpose, description=purpose[0].upper() + purpose[1:] + ".")
        if name in commands:
            subparser.add_argument(
                "--config", metavar="FILE", help="YAML with options, which the command line overrides"
            )
            _module(name).add_arguments(subparser)
    if INTERNAL in commands:
        _module(INTERNAL).add_arguments(subparsers.add_parser(INTERNAL))
    return parser


class _PrintCompletion(argparse.Action):
    """Prints the completion script of a shell and exits."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest, choices=("bash", "zsh", "fish", "tcsh"), help=help)

    def __call__(self, *arguments: object) -> None:
        import shtab

        print(shtab.complete(_parser(list(COMMANDS)), str(arguments[2])))
        raise SystemExit(0)


def _module(command: str) -> ModuleType:
    return importlib.import_module(".bench.command" if command == "bench" else f".commands.{command}", __package__)


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
