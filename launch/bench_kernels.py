"""`tilerank bench kernels`: each kernel's time as a share of reading memory or of computing, and against torch."""

import argparse
import importlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .bench_entry import Call, Entry
from .bench_job import whole_numbers
from .bench_json import add_json_argument, check_json_argument, write_json
from .bench_peaks import (
    Gauge,
    Peaks,
    Rates,
    bench_cores,
    between,
    compute_title,
    median_row,
    peaks_of,
    share_text,
)
from .bench_work import Work
from .topology import read_topology

GROUPS = ("linear", "experts", "attention", "small")
"""Of kernels: the entries of each are in a module of its own, bench_kernels_NAME."""
FORMATS = ("bfloat16", "float32", "int8", "int4", "int4-g32", "fp8")
"""Names of bench_formats.FORMATS, which is not imported before something runs: it needs torch."""
TURNS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", type=_names(GROUPS), default=GROUPS, metavar="NAME,NAME", help=f"of {_list(GROUPS)}")
    parser.add_argument(
        "--formats",
        type=_names(FORMATS),
        default=FORMATS,
        metavar="NAME,NAME",
        help=f"of the weights of linear and experts: {_list(FORMATS)}",
    )
    parser.add_argument(
        "--m", type=whole_numbers(1), default=[1, 4, 16, 64, 256, 1024], metavar="M,M", help="rows of linear"
    )
    parser.add_argument(
        "--shape",
        type=_shapes,
        default=[(4096, 4096), (24576, 4096), (4096, 12288)],
        metavar="NxK,NxK",
        help="outputs and inputs of linear (default: 4096x4096,24576x4096,4096x12288)",
    )
    parser.add_argument(
        "--tokens", type=whole_numbers(1), default=[1, 8, 64, 512], metavar="T,T", help="that go to experts"
    )
    parser.add_argument(
        "--cached-tokens", type=whole_numbers(1), default=[1024, 4096, 8192], metavar="T,T", help="of decode attention"
    )
    parser.add_argument(
        "--new-tokens", type=whole_numbers(1), default=[2048], metavar="T,T", help="of extend attention"
    )
    parser.add_argument("--rows", type=whole_numbers(1), default=[1, 32, 1024], metavar="M,M", help="of small kernels")
    parser.add_argument("--seconds", type=float, default=0.3, metavar="S", help="that each figure is measured for")
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    check_json_argument(args)
    cores = bench_cores(read_topology())
    peaks = peaks_of(cores)
    # torch's threads get the same cores as ours, one each; its library reads this when torch is imported.
    os.environ |= {"OMP_NUM_THREADS": str(len(cores)), "GOMP_CPU_AFFINITY": " ".join(map(str, cores))}
    import torch

    from tilerank.kernels import core

    torch.set_num_threads(len(cores))
    torch.ones(1 << 20).add_(1.0)  # starts its threads before the calling one is pinned, which they would inherit
    core.start_pool(cores, spin=True)
    print(f"{core.isa()} on {len(cores)} cores; {peaks.text()}\n")
    computing = f"  of {compute_title(peaks.isa)}"
    print(
        f"{'kernel':<18}{'shape':<22}{'format':<10}{'us':>11}{'of limit':>10}{'of read':>9}{'at GB/s':>9}{computing}"
        f"{'torch us':>12}{'times':>7}"
    )
    rows = []
    gauge = Gauge(cores)
    for entry in entries(args):
        rows.append(row_of(entry, turns_of(entry, gauge.rates, args.seconds), peaks, core.isa()))
        print(_text(rows[-1], len(computing)), flush=True)
    write_json(args, rows)
    return 0


def entries(args: argparse.Namespace) -> Iterator[Entry]:
    """Each is built when its turn comes, and let go after it."""
    for group in args.only:
        yield from importlib.import_module(f".bench_kernels_{group}", __package__).entries(args)


@dataclass(frozen=True)
class Turn:
    """Of some calls in a row the median, in seconds, of as many of torch's beside them, and the rates meanwhile."""

    seconds: float
    torch_seconds: float | None
    rates: Rates


def turns_of(entry: Entry, rates: Callable[[Work], Rates], budget_s: float) -> list[Turn]:
    turns: list[Turn] = []
    before = rates(entry.work)
    for _ in range(TURNS):
        ours = seconds_per_call(entry.run, budget_s / TURNS)
        theirs = None if entry.torch is None else seconds_per_call(entry.torch, budget_s / TURNS)
        after = rates(entry.work)
        turns.append(Turn(ours, theirs, between(before, after)))
        before = after
    return turns


def seconds_per_call(call: Call, budget_s: float) -> float:
    """The median of single calls within `budget_s`, at least three, after a warm-up of a fifth of it."""
    number = 0
    warm = time.perf_counter() + budget_s / 5
    while number == 0 or time.perf_counter() < warm:
        call(number)
        number += 1
    seconds: list[float] = []
    end = time.perf_counter() + budget_s
    while len(seconds) < 3 or time.perf_counter() < end:
        begin = time.perf_counter()
        call(number)
        seconds.append(time.perf_counter() - begin)
        number += 1
    return statistics.median(seconds)


def row_of(entry: Entry, turns: Sequence[Turn], peaks: Peaks, isa: str) -> dict[str, Any]:
    """A row for JSON, of the turn with the median share of its limit. amx_share: None where no tiles are used.
    compute_share: of the peaks of the rung in force. torch_ratio: how often ours runs in the time of torch's. peaks:
    with the rates of that turn."""
    return median_row([_row_of_turn(entry, turn, peaks.at(turn.rates), isa) for turn in turns])


def _row_of_turn(entry: Entry, turn: Turn, peaks: Peaks, isa: str) -> dict[str, Any]:
    work, seconds = entry.work, turn.seconds
    return {
        "kernel": entry.kernel,
        "shape": entry.shape,
        "format": entry.format,
        "isa": isa,
        "seconds": seconds,
        "bytes": work.nbytes,
        "flops": work.flops,
        "stream_share": peaks.stream_share(work, seconds),
        "amx_share": peaks.amx_share(work, seconds),
        "compute_share": peaks.compute_share(work, seconds),
        "limit_share": peaks.least_seconds(work) / seconds,
        "torch_seconds": turn.torch_seconds,
        "torch_ratio": None if turn.torch_seconds is None else turn.torch_seconds / seconds,
        "peaks": peaks.as_json(),
    }


def _text(row: dict[str, Any], computing_width: int) -> str:
    computing, read = share_text(row["compute_share"]), row["peaks"]["stream_read_gbs"]
    theirs = "" if row["torch_seconds"] is None else f"{1e6 * row['torch_seconds']:>12.1f}{row['torch_ratio']:>7.2f}"
    return (
        f"{row['kernel']:<18}{row['shape']:<22}{row['format']:<10}{1e6 * row['seconds']:>11.1f}"
        f"{row['limit_share']:>10.2f}{row['stream_share']:>9.2f}{read:>9.1f}{computing:>{computing_width}}{theirs}"
    )


def _list(names: Sequence[str]) -> str:
    return ", ".join(names)


def _names(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """An argparse type: some of `known`, separated by commas."""

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"expected some of {_list(known)}, found {unknown[0]!r}")
        return names

    return parse


def _shapes(text: str) -> list[tuple[int, int]]:
    shapes = []
    for part in text.split(","):
        n, x, k = part.partition("x")
        if not (x and n.isdecimal() and k.isdecimal() and int(n) and int(k)):
            raise argparse.ArgumentTypeError(f"expected sizes like 4096x4096, found {part!r}")
        shapes.append((int(n), int(k)))
    return shapes
