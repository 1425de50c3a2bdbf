"""The `tilerank` command: finds the subcommand, and turns the errors we raise on purpose into one sentence.

A subcommand's module is imported only when it runs, and none imports torch to parse its arguments.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence

from .errors import SPOKEN_ERRORS

COMMANDS = {
    "generate": "generate text from a Hugging Face directory",
    "plan": "say how a model would be cut and placed, without loading it",
    "doctor": "say what this machine offers and what is wrong with it",
    "bench": "measure this machine and the model on it",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (default: this process's) and returns its exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(
        prog="tilerank", description="Tensor-parallel runtime for large language and multimodal models on CPU servers."
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, purpose in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=purpose, description=purpose[0].upper() + purpose[1:] + ".")
        if argv[:1] == [name]:
            command = importlib.import_module(f".{name}", __package__)
            command.add_arguments(subparser)
    args = parser.parse_args(argv)
    args.argv = argv  # for the ranks, which are started with the same command line
    try:
        return int(command.run(args))
    except SPOKEN_ERRORS as e:
        print(f"tilerank: error: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
