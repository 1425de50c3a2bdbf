"""The `--json` option of the benchmarks: prints the figures as JSON instead of text, or writes them to a file."""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

from ..errors import LaunchError
from .output_file import is_writable, write_file

STDOUT = Path("-")


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        type=Path,
        nargs="?",
        const=STDOUT,
        metavar="FILE",
        help="print JSON, and the text on stderr; with FILE, print the text and write the JSON to FILE",
    )


def check_json_argument(args: argparse.Namespace) -> None:
    if args.json not in (None, STDOUT) and not is_writable(args.json):
        raise LaunchError(f"--json: expected a file in a writable directory, found {args.json}")


def run_with_json(run: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Run a benchmark; if its JSON goes to stdout, redirect its text to stderr."""
    if getattr(args, "json", None) != STDOUT:
        return run(args)
    args.json_out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        return run(args)


def write_json(args: argparse.Namespace, report: object) -> None:
    """Write `report` where --json says; without --json, do nothing."""
    text = json.dumps(report, indent=2) + "\n"
    if args.json == STDOUT:
        args.json_out.write(text)
    elif args.json:
        write_file("--json", args.json, text)
