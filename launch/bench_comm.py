"""`tilerank bench comm`: what adding up and gathering over the ranks takes, in shared memory and over gloo.

What counts is a collective in a recorded graph, as a decode step has it: its share of one run of many of them. Beside
it stand calls from Python, which a prefill makes, and those over gloo, which cannot be recorded.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import TYPE_CHECKING, Any

from . import bench_job
from .bench_job import whole_numbers
from .bench_json import add_json_argument, check_json_argument, write_json
from .bench_peaks import Peaks, peaks_of
from .errors import LaunchError
from .placement import auto_ranks
from .start import whole_number
from .topology import read_topology

if TYPE_CHECKING:
    from collections.abc import Callable

    from tilerank.parallel.group import Group
    from tilerank.parallel.join import Team

    from .placement import Placement, RankPlacement

OPERATIONS = ("all_reduce", "all_gather")
WARM_UP = 10
RECORDED = 32  # collectives in a graph


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--bytes",
        type=whole_numbers(2),
        default=[8 << 10, 64 << 10, 1 << 20],
        metavar="N,N",
        help="of a rank's bf16 operand (default: 8 KiB, 64 KiB, 1 MiB)",
    )
    parser.add_argument("--repeat", type=whole_number(1), default=100, metavar="N", help="calls; the median counts")
    add_json_argument(parser)
    bench_job.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if bench_job.is_rank(args):
        return bench_job.run_as_rank(args, CommJob(args))
    check_json_argument(args)
    if args.collectives != "auto":
        raise LaunchError(f"bench comm measures shared memory and gloo; found --collectives {args.collectives}")
    most = args.tp or max(2, auto_ranks(read_topology()))
    if most < 2:
        raise LaunchError("bench comm needs two ranks or more; found --tp 1")
    rows: list[dict[str, Any]] = []
    for ranks in range(2, most + 1):
        placement, cores = bench_job.placement_of(args, ranks)
        if not rows:
            peaks = peaks_of(cores)
            print(f"{peaks.text()}\n\n{_HEAD}")
        # Each in processes of its own, as `generate` starts them; the later --collectives counts.
        shared, gloo = (
            bench_job.run_ranks(args, [*args.argv, "--collectives", how, "--log-level", "warning"], ranks)
            for how in ("auto", "gloo")
        )
        for row in rows_of(shared, gloo, ranks, placement.oversubscribed, peaks):
            rows.append(row)
            print(_text(row), flush=True)
    write_json(args, rows)
    return 0


def rows_of(
    shared: list[dict[str, Any]], gloo: list[dict[str, Any]], ranks: int, oversubscribed: bool, peaks: Peaks
) -> list[dict[str, Any]]:
    """A row for JSON an operation and size. seconds: in a graph, where there are graphs. gloo_ratio: how many times
    faster than gloo that is. latency_ratio: how many one-way core-to-core latencies it takes."""
    latency = None if peaks.core_to_core_ns is None else peaks.core_to_core_ns * 1e-9
    return [
        {
            "operation": ours["operation"],
            "ranks": ranks,
            "oversubscribed": oversubscribed,
            "bytes": ours["bytes"],
            "seconds": ours["seconds"],
            "eager_seconds": ours["eager_seconds"],
            "gloo_seconds": theirs["seconds"],
            "gloo_ratio": theirs["seconds"] / ours["seconds"],
            "latency_ratio": None if latency is None else ours["seconds"] / latency,
            "peaks": peaks.as_json(),
        }
        for ours, theirs in zip(shared, gloo, strict=True)
    ]


class CommJob:
    """All ranks make the same calls; rank 0 takes the time."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args

    def prepare(self) -> None:
        return

    def memory_refusal(self, size: int, here: range, placement: Placement) -> str | None:
        return None

    def build(self, team: Team, own: RankPlacement) -> Calls:
        return Calls(team.group, self._args.bytes, self._args.repeat)

    def lead(self, calls: Calls, size: int, placement: Placement) -> None:
        self._args.result.write_text(json.dumps(calls.measure()))


class Calls:
    """The calls of one rank, in an order that all know."""

    def __init__(self, group: Group, sizes: list[int], repeat: int) -> None:
        self._group = group
        self._sizes = sizes
        self._repeat = repeat

    def follow(self) -> None:
        self.measure()

    def stop(self) -> None:
        return

    def measure(self) -> list[dict[str, Any]]:
        rows = []
        for operation in OPERATIONS:
            for nbytes in self._sizes:
                eager = self._eager(operation, nbytes)
                seconds = self._recorded(operation, nbytes)
                rows.append(
                    {
                        "operation": operation,
                        "bytes": nbytes,
                        "seconds": eager if seconds is None else seconds,
                        "eager_seconds": eager,
                    }
                )
        return rows

    def _eager(self, operation: str, nbytes: int) -> float:
        import torch

        call = getattr(self._group, operation)
        x = torch.zeros(nbytes // torch.bfloat16.itemsize, dtype=torch.bfloat16)
        return self._median(lambda: call(x), self._repeat)

    def _recorded(self, operation: str, nbytes: int) -> float | None:
        """None where collectives cannot be recorded. Each operand but the first is what the call before left: in the
        cache of the core that works on it, as the output of a kernel is."""
        import torch

        from tilerank.kernels import core, ops
        from tilerank.kernels.graph import Graph
        from tilerank.parallel.group import RecordableGroup

        group = self._group
        if core.isa() == "reference" or not isinstance(group, RecordableGroup):
            return None
        call = getattr(group, operation)

        def step() -> torch.Tensor:
            x = ops.repeat_row(None, 1, nbytes // torch.bfloat16.itemsize, torch.bfloat16)
            for _ in range(RECORDED):
                gathered = call(x)
            return x if operation == "all_reduce" else gathered

        graph = Graph(step)
        return self._median(lambda: group.replay(graph.run), self._repeat) / RECORDED

    def _median(self, call: Callable[[], object], repeat: int) -> float:
        """Seconds of a call that all ranks begin together."""
        seconds = []
        for _ in range(WARM_UP + repeat):
            self._group.barrier()
            begin = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - begin)
        return statistics.median(seconds[WARM_UP:])


_HEAD = (
    f"{'operation':<12}{'ranks':>6}{'bytes':>9}{'us':>11}{'latencies':>11}{'eager us':>11}{'gloo us':>11}{'times':>8}"
)


def _text(row: dict[str, Any]) -> str:
    latencies = "-" if row["latency_ratio"] is None else f"{row['latency_ratio']:.0f}"
    return (
        f"{row['operation']:<12}{row['ranks']:>6}{row['bytes']:>9}{1e6 * row['seconds']:>11.1f}{latencies:>11}"
        f"{1e6 * row['eager_seconds']:>11.1f}{1e6 * row['gloo_seconds']:>11.1f}{row['gloo_ratio']:>8.1f}"
        f"{'  more ranks than cores' if row['oversubscribed'] else ''}"
    )
