"""The base of all benchmarks: repeated runs and their median, tables, and the files of `--json` and `--chart`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..errors import LaunchError
from ..options.arguments import whole_number

Row = dict[str, Any]
R = TypeVar("R", bound=Mapping[str, Any])


def add_repeat_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--repeat", type=whole_number(1), default=3, metavar="N", help="runs, of which the median is used (default: 3)"
    )


def median_by(runs: Sequence[R], key: str) -> R:
    """Return the run whose `key` is the median, the lower one of two. All figures of a row belong to the same run."""
    return sorted(runs, key=lambda run: float(run[key]))[(len(runs) - 1) // 2]


@dataclass(frozen=True)
class Column:
    """A column of a table: its title, its width, and the text of a row in it. A negative width aligns to the right."""

    title: str
    width: int
    text: Callable[[Row], str]


def header(columns: Sequence[Column]) -> str:
    """Return the line of the titles."""
    return "".join(_cell(column.title, column.width) for column in columns).rstrip()


def line(columns: Sequence[Column], row: Row) -> str:
    """Return the line of a row."""
    return "".join(_cell(column.text(row), column.width) for column in columns).rstrip()


def table(columns: Sequence[Column], rows: Sequence[Row]) -> list[str]:
    """Return the lines of a table."""
    return [header(columns), *(line(columns, row) for row in rows)]


def _cell(text: str, width: int) -> str:
    return f"{text:<{width}}" if width >= 0 else f"{text:>{-width}}"


STDOUT = Path("-")
"""The value of --json without a file."""


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


def is_writable(path: Path) -> bool:
    """Return whether `path` can be written. Checked before a benchmark runs, so that no results are lost."""
    return not path.is_dir() and os.access(path if path.exists() else path.absolute().parent, os.W_OK)


def write_file(flag: str, path: Path, text: str) -> None:
    """Write `text` to `path`. LaunchError that names `flag` if the file cannot be written."""
    try:
        path.write_text(text)
    except OSError as e:
        raise LaunchError(f"{flag}: {path} cannot be written: {e.strerror}") from e
