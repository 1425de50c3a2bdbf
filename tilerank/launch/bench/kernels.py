"""`tilerank bench kernels`: each kernel's time as a share of the machine's peaks, and against torch."""

import argparse
import importlib
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tilerank.parallel.cost import Work

from ..host.topology import read_topology
from ..options.arguments import whole_numbers
from ..ranks.agreed_rungs import use_fastest_rungs
from .entry import Calls, Entry
from .harness import Column, Row, add_json_argument, check_json_argument, header, line, median_by, write_json
from .peaks import (
    Peaks,
    RateProbe,
    Rates,
    bench_cores,
    compute_unit,
    mean_rates,
    peaks_of,
    share_text,
)

GROUPS = ("linear", "experts", "attention", "small", "vision")
"""Groups of kernels; the entries of each are in a module kernels_GROUP."""
FORMAT_NAMES = (
    "bfloat16",
    "float32",
    "int8",
    "token-int8",
    "int4",
    "int4-g32",
    "int4-a8",
    "int4-a8-g32",
    "mxfp4",
    "mxfp4-a8",
    "fp8",
    "channel-fp8",
    "fp8-g128",
    "block-int8",
    "group-int8",
)
"""The keys of formats.WEIGHT_FORMATS, repeated here because importing it imports torch."""
REPEATS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only",
        type=_names(GROUPS),
        default=GROUPS,
        metavar="NAME,NAME",
        help=f"groups of kernels: {_list(GROUPS)} (default: all)",
    )
    parser.add_argument(
        "--formats",
        type=_names(FORMAT_NAMES),
        default=FORMAT_NAMES,
        metavar="NAME,NAME",
        help=f"weight formats of linear and experts: {_list(FORMAT_NAMES)} (default: all)",
    )
    parser.add_argument(
        "--m",
        type=whole_numbers(1),
        default=[1, 4, 16, 64, 256, 1024],
        metavar="M,M",
        help="rows of linear (default: 1,4,16,64,256,1024)",
    )
    parser.add_argument(
        "--shape",
        type=_shapes,
        default=[(4096, 4096), (24576, 4096), (4096, 12288)],
        metavar="NxK,NxK",
        help="outputs and inputs of linear (default: 4096x4096,24576x4096,4096x12288)",
    )
    parser.add_argument(
        "--tokens",
        type=whole_numbers(1),
        default=[1, 8, 64, 512],
        metavar="T,T",
        help="tokens of experts (default: 1,8,64,512)",
    )
    parser.add_argument(
        "--cached-tokens",
        type=whole_numbers(1),
        default=[1024, 4096, 8192],
        metavar="T,T",
        help="cached tokens of decode attention (default: 1024,4096,8192)",
    )
    parser.add_argument(
        "--new-tokens",
        type=whole_numbers(1),
        default=[2048],
        metavar="T,T",
        help="new tokens of extend attention (default: 2048)",
    )
    parser.add_argument(
        "--rows",
        type=whole_numbers(1),
        default=[1, 32, 1024],
        metavar="M,M",
        help="rows of small kernels (default: 1,32,1024)",
    )
    parser.add_argument(
        "--seconds", type=float, default=0.3, metavar="S", help="measuring time of each figure (default: 0.3)"
    )
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    check_json_argument(args)
    cores = bench_cores(read_topology())
    peaks = peaks_of(cores)
    # torch's threads run on the same cores as our threads, one each. OpenMP reads this when torch is imported.
    os.environ |= {"OMP_NUM_THREADS": str(len(cores)), "GOMP_CPU_AFFINITY": " ".join(map(str, cores))}
    import torch

    from tilerank.kernels import core

    torch.set_num_threads(len(cores))
    torch.ones(1 << 20).add_(1.0)  # starts torch's threads before this thread is pinned: they inherit its affinity
    core.start_pool(cores, spin=True)
    use_fastest_rungs(cores, len(cores), spin=True)
    print(f"{core.isa_text()} on {len(cores)} cores; {peaks.text()}\n")
    columns = columns_of(peaks.isa)
    print(header(columns))
    rows = []
    probe = RateProbe(cores)
    for entry in entries(args):
        rows.append(row_of(entry, measure(entry, probe.measure, args.seconds), peaks, core.isa_text()))
        print(line(columns, rows[-1]), flush=True)
    write_json(args, rows)
    return 0


def entries(args: argparse.Namespace) -> Iterator[Entry]:
    """Yield the chosen entries. Each is built when it is needed, so that only one is in memory."""
    for group in args.only:
        yield from importlib.import_module(f".kernels_{group}", __package__).entries(args)


@dataclass(frozen=True)
class Measurement:
    """Median seconds of a call of the kernel and of its torch equivalent, and the machine's rates at the time."""

    seconds: float
    torch_seconds: float | None
    rates: Rates


def measure(entry: Entry, measure_rates: Callable[[Work], Rates], budget_s: float) -> list[Measurement]:
    """Time the kernel and its torch equivalent, each for `budget_s` seconds in `REPEATS` parts.

    The rates of each part are the mean of those before and after it.
    """
    found: list[Measurement] = []
    before = measure_rates(entry.work)
    for _ in range(REPEATS):
        seconds = seconds_per_call(entry.calls, budget_s / REPEATS)
        torch_seconds = seconds_per_call(entry.torch_calls, budget_s / REPEATS) if entry.torch_calls else None
        after = measure_rates(entry.work)
        found.append(Measurement(seconds, torch_seconds, mean_rates(before, after)))
        before = after
    return found


def seconds_per_call(calls: Calls, budget_s: float) -> float:
    """Return the median time of a call, from three or more calls in `budget_s`, after a warm-up of `budget_s` / 5."""
    following = itertools.cycle(calls)
    warm_up_end = time.perf_counter() + budget_s / 5
    next(following)()
    while time.perf_counter() < warm_up_end:
        next(following)()
    seconds: list[float] = []
    end = time.perf_counter() + budget_s
    while len(seconds) < 3 or time.perf_counter() < end:
        call = next(following)
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def row_of(entry: Entry, measurements: Sequence[Measurement], peaks: Peaks, isa: str) -> Row:
    """Return the JSON row of the measurement with the median limit_share.

    *_share: as in `Peaks`, against the rates of that measurement, which `peaks` in the row has as well. stream_rate:
    the name of the one that stream_share is a share of.
    torch_ratio: torch_seconds / seconds.
    """
    return median_by([_row_of_one(entry, one, peaks.with_rates(one.rates), isa) for one in measurements], "limit_share")


def _row_of_one(entry: Entry, measurement: Measurement, peaks: Peaks, isa: str) -> Row:
    work, seconds = entry.work, measurement.seconds
    return {
        "kernel": entry.kernel,
        "shape": entry.shape,
        "format": entry.format,
        "isa": isa,
        "seconds": seconds,
        **peaks.shares(work, seconds),
        "stream_rate": "stream_update_gbs" if work.updated else "stream_read_gbs",
        "torch_seconds": measurement.torch_seconds,
        "torch_ratio": None if measurement.torch_seconds is None else measurement.torch_seconds / seconds,
    }


def columns_of(isa: str) -> list[Column]:
    """Return the columns of the table, whose limits are those of hardware with the rung `isa`."""
    compute = f"of {compute_unit(isa)}"
    return [
        Column("kernel", 18, lambda row: row["kernel"]),
        Column("shape", 22, lambda row: row["shape"]),
        Column("format", 10, lambda row: row["format"]),
        Column("us", -11, lambda row: f"{1e6 * row['seconds']:.1f}"),
        Column("of limit", -10, lambda row: f"{row['limit_share']:.2f}"),
        Column("of read", -9, lambda row: f"{row['stream_share']:.2f}"),
        Column("at GB/s", -9, lambda row: f"{row['peaks'][row['stream_rate']]:.1f}"),
        Column(compute, -2 - len(compute), lambda row: share_text(row["compute_share"])),
        Column("torch us", -12, lambda row: "" if row["torch_ratio"] is None else f"{1e6 * row['torch_seconds']:.1f}"),
        Column("ratio", -7, lambda row: "" if row["torch_ratio"] is None else f"{row['torch_ratio']:.2f}"),
    ]


def _list(names: Sequence[str]) -> str:
    return ", ".join(names)


def _names(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Return an argparse type for names in `known`, separated by commas."""

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
