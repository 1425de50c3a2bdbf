"""`--json` of the benchmarks: the figures as JSON instead of text, as `plan` and `doctor` print them, or in a file."""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

from .bench_file import is_writable, write_file
from .errors import LaunchError

STDOUT = Path("-")


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        type=Path,
        nargs="?",
        const=STDOUT,
        metavar="FILE",
        help="print JSON instead of text (which goes to stderr); with FILE, write it there beside the text",
    )


def check_json_argument(args: argparse.Namespace) -> None:
    if args.json not in (None, STDOUT) and not is_writable(args.json):
        raise LaunchError(f"--json: expected a file in a directory that can be written, found {args.json}")


def with_json(run: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Runs a benchmark whose text must not mix with its JSON."""
    if getattr(args, "json", None) != STDOUT:
        return run(args)
    args.json_out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        return run(args)


def write_json(args: argparse.Namespace, report: object) -> None:
    text = json.dumps(report, indent=2) + "\n"
    if args.json == STDOUT:
        args.json_out.write(text)
    elif args.json:
        write_file("--json", args.json, text)
