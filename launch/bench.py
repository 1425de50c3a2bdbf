"""`tilerank bench`: `bench peaks` measures what the machine can do at best; every other figure is a share of that."""

import argparse
import itertools
import json
import os
from pathlib import Path
from typing import Any

from .errors import LaunchError
from .topology import Topology, read_topology


def add_arguments(parser: argparse.ArgumentParser) -> None:
    benches = parser.add_subparsers(dest="bench", required=True, metavar="WHAT")
    peaks = benches.add_parser(
        "peaks", help="memory bandwidth, AMX peak and core-to-core latency of the cores this process may use"
    )
    peaks.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")


def run(args: argparse.Namespace) -> int:
    """Prints the figures, median of several rounds each."""
    if args.json and not os.access(args.json.parent, os.W_OK):
        raise LaunchError(f"--json: expected a file in a directory that can be written, found {args.json}")
    load = os.getloadavg()[0]
    report = measure_peaks(read_topology())
    if load > 0.5:
        print(f"note: the load average was {load:.1f} before the start: what else runs here lowers the figures")
    print("\n".join(_text(report)))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def measure_peaks(topology: Topology) -> dict[str, Any]:
    """All peaks, on one hardware thread of each core, ready for JSON: GB/s, TFLOP/s (TOP/s for int8), ns."""
    # Here, not above: torch takes seconds to import, and `tilerank --help` builds every parser.
    from tilerank.kernels import core, peaks

    allowed = set(topology.allowed_cpus)
    own = [next(cpu for cpu in one.threads if cpu in allowed) for one in topology.cores if allowed & set(one.threads)]
    counts = sorted({1, len(own)})
    report: dict[str, Any] = {
        "cores": own,
        "stream_read_gbs": {str(count): peaks.stream_read_gbs(count, own) for count in counts},
    }
    amx = core.isa_report()[0]
    if amx.usable:
        report["amx_bf16_tflops"] = {str(count): peaks.amx_tflops("bf16", count, own) for count in counts}
        report["amx_int8_tops"] = {str(count): peaks.amx_tflops("int8", count, own) for count in counts}
    else:
        report["amx"] = f"not available: {amx.reason}"
    report["core_to_core_ns"] = {
        f"{a}-{b}": peaks.core_to_core_ns(a, b) for a, b in itertools.combinations(_representatives(topology), 2)
    }
    return report


def _representatives(topology: Topology) -> list[int]:
    """The hardware threads between which latency is worth knowing: of each node two cores."""
    allowed = set(topology.allowed_cpus)
    chosen: list[int] = []
    for node in topology.nodes:
        first = [one.threads[0] for one in topology.cores if one.node == node.id and one.threads[0] in allowed]
        chosen += first[:2]
    return chosen


def _text(report: dict[str, Any]) -> list[str]:
    rows = [
        ("stream read", "stream_read_gbs", "GB/s"),
        ("AMX bf16", "amx_bf16_tflops", "TFLOP/s"),
        ("AMX int8", "amx_int8_tops", "TOP/s"),
    ]
    lines = [
        f"{title:<14}{'1 core' if count == '1' else count + ' cores':<10}{figure:10.2f} {unit}"
        for title, key, unit in rows
        for count, figure in report.get(key, {}).items()
    ]
    if "amx" in report:
        lines.append(f"{'AMX':<14}{report['amx']}")
    latencies = [
        f"{'core to core':<14}{pair:<10}{figure:10.0f} ns, one way"
        for pair, figure in report["core_to_core_ns"].items()
    ]
    return lines + latencies
