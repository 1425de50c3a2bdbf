"""`tilerank bench comm`: the latency of all-reduce and all-gather over the ranks, in shared memory and over gloo.

The main figure is the time of a collective inside a recorded graph, as in a decode step: the time of a graph of
`RECORDED` collectives, divided by their number. Each row also has the time of a call from Python, and the time over
gloo, which cannot be recorded.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import TYPE_CHECKING

from ..errors import LaunchError
from ..host.placement import auto_ranks
from ..host.topology import read_topology
from ..options.arguments import whole_number, whole_numbers
from .harness import Column, Row, add_json_argument, check_json_argument, header, line, write_json
from .peaks import Peaks, peaks_of
from .rank_job import add_rank_arguments, is_rank, placement_of, run_as_rank, run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from tilerank.parallel.group import Group
    from tilerank.parallel.join import Team

    from ..host.placement import Placement, RankPlacement

OPERATIONS = ("all_reduce", "all_gather")
WARM_UP = 10
RECORDED = 32  # collectives in one graph
COLUMNS = [
    Column("operation", 12, lambda row: row["operation"]),
    Column("ranks", -6, lambda row: str(row["ranks"])),
    Column("bytes", -9, lambda row: str(row["bytes"])),
    Column("us", -11, lambda row: f"{1e6 * row['seconds']:.1f}"),
    Column("latencies", -11, lambda row: "-" if row["latency_ratio"] is None else f"{row['latency_ratio']:.0f}"),
    Column("eager us", -11, lambda row: f"{1e6 * row['eager_seconds']:.1f}"),
    Column("gloo us", -11, lambda row: f"{1e6 * row['gloo_seconds']:.1f}"),
    Column("ratio", -8, lambda row: f"{row['gloo_ratio']:.1f}"),
    Column("", 0, lambda row: "  more ranks than cores" if row["oversubscribed"] else ""),
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--bytes",
        type=whole_numbers(2),
        default=[8 << 10, 64 << 10, 1 << 20],
        metavar="N,N",
        help="size of a rank's bf16 operand (default: 8 KiB, 64 KiB, 1 MiB)",
    )
    parser.add_argument(
        "--repeat", type=whole_number(1), default=100, metavar="N", help="calls, of which the median is used"
    )
    add_json_argument(parser)
    add_rank_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if is_rank(args):
        return run_as_rank(args, CommJob(args))
    check_json_argument(args)
    if args.collectives != "auto":
        raise LaunchError(
            f"bench comm measures both shared memory and gloo; expected no --collectives, found {args.collectives}"
        )
    max_ranks = args.tp or max(2, auto_ranks(read_topology()))
    if max_ranks < 2:
        raise LaunchError("bench comm needs two ranks or more; found --tp 1")
    rows: list[Row] = []
    for ranks in range(2, max_ranks + 1):
        placement, cores = placement_of(args, ranks)
        if not rows:
            peaks = peaks_of(cores)
            print(f"{peaks.text()}\n\n{header(COLUMNS)}")
        # Each kind runs in processes of its own, as `generate` starts them. The last --collectives takes effect.
        shared, gloo = (
            run_ranks(args, [*args.argv, "--collectives", kind, "--log-level", "warning"], ranks)
            for kind in ("auto", "gloo")
        )
        for row in rows_of(shared, gloo, ranks, placement.oversubscribed, peaks):
            rows.append(row)
            print(line(COLUMNS, row), flush=True)
    write_json(args, rows)
    return 0


def rows_of(shared: list[Row], gloo: list[Row], ranks: int, oversubscribed: bool, peaks: Peaks) -> list[Row]:
    """Return one JSON row for each operation and size.

    seconds: inside a recorded graph, or of a call from Python if collectives cannot be recorded.
    gloo_ratio: gloo_seconds / seconds. latency_ratio: seconds / one-way core-to-core latency.
    """
    latency = None if peaks.core_to_core_ns is None else peaks.core_to_core_ns * 1e-9
    return [
        {
            "operation": row["operation"],
            "ranks": ranks,
            "oversubscribed": oversubscribed,
            "bytes": row["bytes"],
            "seconds": row["seconds"],
            "eager_seconds": row["eager_seconds"],
            "gloo_seconds": gloo_row["seconds"],
            "gloo_ratio": gloo_row["seconds"] / row["seconds"],
            "latency_ratio": None if latency is None else row["seconds"] / latency,
            "peaks": peaks.as_json(),
        }
        for row, gloo_row in zip(shared, gloo, strict=True)
    ]


class CommJob:
    """Runs the same collectives on all ranks and writes the times of rank 0."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args

    def prepare(self) -> None:
        return

    def memory_refusal(self, size: int, here: range, placement: Placement) -> str | None:
        return None

    def build(self, team: Team, own: RankPlacement) -> CollectiveTimer:
        return CollectiveTimer(team.group, self._args.bytes, self._args.repeat)

    def lead(self, timer: CollectiveTimer, size: int, placement: Placement) -> None:
        self._args.result.write_text(json.dumps(timer.measure()))


class CollectiveTimer:
    """Times the collectives of one rank; all ranks make the same calls in the same order."""

    def __init__(self, group: Group, sizes: list[int], repeat: int) -> None:
        self._group = group
        self._sizes = sizes
        self._repeat = repeat

    def follow(self) -> None:
        self.measure()

    def stop(self) -> None:
        return

    def measure(self) -> list[Row]:
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
        """Return the seconds of one collective called from Python."""
        import torch

        call = getattr(self._group, operation)
        x = torch.zeros(nbytes // torch.bfloat16.itemsize, dtype=torch.bfloat16)
        return self._median(lambda: call(x), self._repeat)

    def _recorded(self, operation: str, nbytes: int) -> float | None:
        """Return the seconds of one collective in a recorded graph, or None if collectives cannot be recorded.

        The collectives share one operand, so that it is in the core's cache, as the output of a kernel is.
        """
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
        """Return the median seconds of a call that follows a barrier."""
        seconds = []
        for _ in range(WARM_UP + repeat):
            self._group.barrier()
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds[WARM_UP:])
