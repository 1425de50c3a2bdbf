"""What the comparisons share: a benchmark of `tilerank bench`, run with more options beside other systems."""

import argparse
import importlib
import sys
from collections.abc import Callable

from tilerank.launch.bench import command
from tilerank.launch.errors import USER_ERRORS
from tilerank.launch.logs import say
from tilerank.launch.options.arguments import Parser
from tilerank.launch.options.hub import find_model

AddArguments = Callable[[argparse.ArgumentParser], None]


def parse(bench: str, add_own: AddArguments, argv: list[str], description: str | None = None) -> argparse.Namespace:
    """Parse the options of `tilerank bench BENCH` and those that `add_own` adds.

    `args.argv` is the command line of the ranks, which are started as by `tilerank bench BENCH`.
    """
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_own(own)
    parser = Parser(description=description, parents=[own], allow_abbrev=False)
    importlib.import_module(f"tilerank.launch.bench.{bench}").add_arguments(parser)
    args = parser.parse_args(argv)
    args.argv = ["bench", bench, *own.parse_known_args(argv)[1]]
    return args


def main(bench: str, add_own: AddArguments, compare: Callable[[argparse.Namespace], int], description: str) -> int:
    """Run a comparison with this process's command line and return its exit status."""
    try:
        args = parse(bench, add_own, sys.argv[1:], description)
        find_model(args)
        args.run_bench = compare
        return command.run(args)
    except USER_ERRORS as e:
        say(f"tilerank: error: {e}")
        return 1
    except KeyboardInterrupt:
        return 130
