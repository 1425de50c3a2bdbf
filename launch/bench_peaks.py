"""`tilerank bench peaks`: what the machine can do at best, and the shares of it that every other figure is given as."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from .bench_json import add_json_argument, check_json_argument, write_json
from .bench_work import Work
from .cpulist import format_cpulist, parse_cpulist
from .errors import LaunchError
from .process import die_with
from .topology import Topology, read_topology

COMPUTE = (
    ("amx_bf16_tflops", "bf16", "TFLOP/s"),
    ("amx_int8_tops", "int8", "TOP/s"),
    ("vector_fp32_tflops", "fp32", "TFLOP/s"),
    ("vector_bf16_tflops", "bf16", "TFLOP/s"),
    ("vector_int8_tops", "int8", "TOP/s"),
)
"""Peaks of computing: their names here and in JSON, what is multiplied, and units."""

Rates = dict[str, float]
"""Some of the figures of `Peaks`, by their names."""

BUSY = 0.5  # load average from which figures are in doubt


@dataclass(frozen=True)
class Peaks:
    """The machine at its best on the cores of a run: GB/s read by all of them, TFLOP/s of AMX bf16 and TOP/s of AMX
    int8 (None without AMX), ns one way between the two closest cores (None if there is one), GB/s of memory that nobody
    had before; the load average before, of whatever else runs; the rung in force, and TFLOP/s (TOP/s) of its vectors
    (None with AMX, where nobody asks, and in plain torch)."""

    stream_read_gbs: float
    amx_bf16_tflops: float | None
    amx_int8_tops: float | None
    core_to_core_ns: float | None
    first_touch_gbs: float
    load_average: float = 0.0
    isa: str = "amx"
    vector_fp32_tflops: float | None = None
    vector_bf16_tflops: float | None = None
    vector_int8_tops: float | None = None

    def stream_share(self, work: Work, seconds: float) -> float:
        """What part of the read bandwidth moving the bytes of `work` in `seconds` takes."""
        return self._reading(work) / seconds

    def amx_share(self, work: Work, seconds: float) -> float | None:
        """What part of the AMX peaks computing `work` in `seconds` takes. None without AMX, or where it is not used."""
        return self.compute_share(work, seconds) if self.isa == "amx" else None

    def compute_share(self, work: Work, seconds: float) -> float | None:
        """What part of the peaks of the rung in force, AMX or vectors, computing `work` in `seconds` takes. None where
        it computes nothing of which a peak is known (fp32 beside AMX)."""
        return self._computing(work) / seconds or None

    def least_seconds(self, work: Work) -> float:
        """How long `work` takes at the limit: reading or computing, whichever takes longer."""
        return max(self._reading(work), self._computing(work))

    def _reading(self, work: Work) -> float:
        return work.nbytes / (self.stream_read_gbs * 1e9)

    def _computing(self, work: Work) -> float:
        parts = [
            (work.fp32, self.vector_fp32_tflops),
            (work.bf16, self.amx_bf16_tflops or self.vector_bf16_tflops),
            (work.int8, self.amx_int8_tops or self.vector_int8_tops),
        ]
        return sum(operations / (peak * 1e12) for operations, peak in parts if peak is not None)

    def at(self, rates: Rates) -> Peaks:
        """With the rates that were measured beside a figure."""
        return Peaks(**asdict(self) | rates)

    def text(self) -> str:
        computing = ", ".join(compute_figures(self.as_json())) or "no compute peak"
        latency = "" if self.core_to_core_ns is None else f", {self.core_to_core_ns:.0f} ns core to core"
        busy = f"\n{load_note(self.load_average)}" if self.load_average > BUSY else ""
        return f"peaks: {self.stream_read_gbs:.1f} GB/s read, {computing}{latency}{busy}"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Gauge:
    """Measures the rates that work is limited by on `cores` again, beside a figure: neighbours of a virtual machine may
    halve them from one second to the next, and a share is then worth something only of the rate beside it."""

    def __init__(self, cores: Sequence[int]) -> None:
        from tilerank.kernels.peaks import StreamRead

        self._cores = list(cores)
        self._read = StreamRead(len(self._cores), self._cores)

    def rates(self, work: Work) -> Rates:
        """Of reading, and of what is multiplied in `work`. Takes some 0.1 s."""
        from tilerank.kernels import core

        found = {"stream_read_gbs": self._read.gbs()}
        for name, kind, _ in COMPUTE:
            if getattr(work, kind) and _is_of(name, core.isa()):
                found[name] = _compute_peak(name, kind, len(self._cores), self._cores)
        return found


def between(before: Rates, after: Rates) -> Rates:
    return {name: (rate + after[name]) / 2 for name, rate in before.items()}


def _is_of(name: str, isa: str) -> bool:
    """Whether a rung multiplies with what this peak is of: tiles, or vectors; plain torch with neither."""
    return isa != "reference" and name.startswith("amx") == (isa == "amx")


def _compute_peak(name: str, kind: str, threads: int, cores: Sequence[int]) -> float:
    from tilerank.kernels import peaks

    return (peaks.amx_tflops if name.startswith("amx") else peaks.vector_tflops)(kind, threads, cores)


def median_row(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of rows of the same thing the one with the median share of its limit, whose figures are of one moment."""
    return sorted(rows, key=lambda row: float(row["limit_share"]))[(len(rows) - 1) // 2]


def compute_title(isa: str) -> str:
    """What computes on a rung."""
    return {"amx": "AMX", "avx2": "AVX2", "reference": "torch"}.get(isa, "AVX-512")


def share_text(share: float | None) -> str:
    return "-" if share is None else f"{share:.2f}"


def compute_figures(peaks: Mapping[str, Any]) -> list[str]:
    """Those of `Peaks.as_json` that there are: "0.30 TFLOP/s AVX-512 fp32", "1.20 TOP/s int8"."""
    known = [(peaks[name], kind, unit) for name, kind, unit in COMPUTE if peaks[name] is not None]
    titles = [f"{compute_title(peaks['isa'])} ", *[""] * len(known)]
    return [f"{figure:.2f} {unit} {title}{kind}" for title, (figure, kind, unit) in zip(titles, known, strict=False)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cores", type=_cores, metavar="LIST", help='only these, "0-39" (default: one hardware thread of each core)'
    )
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Prints the figures, median of several rounds each."""
    check_json_argument(args)
    topology = read_topology()
    if args.cores is not None and (wrong := set(args.cores) - set(topology.allowed_cpus)):
        raise LaunchError(
            f"--cores: expected cores that may be used ({format_cpulist(topology.allowed_cpus)}), found {min(wrong)}"
        )
    load = os.getloadavg()[0]
    report = measure_peaks(topology, args.cores)
    if load > BUSY:
        print(load_note(load))
    print("\n".join(_text(report)))
    write_json(args, report)
    return 0


def measure_peaks(topology: Topology, cores: Sequence[int] | None = None) -> dict[str, Any]:
    """All peaks of `cores`, by default one hardware thread of each, for JSON: GB/s, TFLOP/s (TOP/s for int8), ns."""
    # Here, not above: torch takes seconds to import, and `tilerank --help` builds every parser.
    from tilerank.kernels import core, peaks

    own = bench_cores(topology) if cores is None else list(cores)
    counts = sorted({1, len(own)})
    report: dict[str, Any] = {
        "cores": own,
        # First of all: what others give back is not fresh.
        "first_touch_gbs": {str(len(own)): peaks.first_touch_gbs(len(own), own)},
        "stream_read_gbs": {str(count): peaks.stream_read_gbs(count, own) for count in counts},
    }
    rungs = core.isa_report()
    report["isa"] = next(rung.name for rung in rungs if rung.usable)
    if report["isa"] != "amx":
        report["amx"] = f"not available: {rungs[0].reason}"
    for name, kind, _ in COMPUTE:
        if _is_of(name, report["isa"]):
            report[name] = {str(count): _compute_peak(name, kind, count, own) for count in counts}
    report["core_to_core_ns"] = {
        f"{a}-{b}": peaks.core_to_core_ns(a, b) for a, b in itertools.combinations(_representatives(topology, own), 2)
    }
    return report


def bench_cores(topology: Topology) -> list[int]:
    """One hardware thread of each core that this process may use."""
    allowed = set(topology.allowed_cpus)
    return [next(cpu for cpu in one.threads if cpu in allowed) for one in topology.cores if allowed & set(one.threads)]


def peaks_of(cores: Sequence[int]) -> Peaks:
    """Measures in a process of its own, since this one is about to start ranks and stays small. LaunchError if not."""
    command = [sys.executable, "-P", "-m", "tilerank", "bench", "peaks", "--json", "--cores", format_cpulist(cores)]
    load = os.getloadavg()[0]
    dies = partial(die_with, os.getpid())
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, preexec_fn=dies)
    if done.returncode != 0:
        raise LaunchError(f"the peaks of cores {format_cpulist(cores)} could not be measured: {done.stderr.strip()}")
    return peaks_from(json.loads(done.stdout), load)


def load_note(load: float) -> str:
    return f"note: the load average was {load:.1f} before the start: what else runs here lowers the figures"


def peaks_from(report: dict[str, Any], load_average: float) -> Peaks:
    """What a report of `measure_peaks` says of all its cores together."""
    everywhere = str(len(report["cores"]))
    return Peaks(
        stream_read_gbs=report["stream_read_gbs"][everywhere],
        core_to_core_ns=min(report["core_to_core_ns"].values(), default=None),
        first_touch_gbs=report["first_touch_gbs"][everywhere],
        load_average=load_average,
        isa=report["isa"],
        **{name: report.get(name, {}).get(everywhere) for name, _, _ in COMPUTE},
    )


def _cores(text: str) -> tuple[int, ...]:
    try:
        cores = parse_cpulist(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from e
    if not cores:
        raise argparse.ArgumentTypeError("expected at least one core")
    return cores


def _representatives(topology: Topology, cores: Sequence[int]) -> list[int]:
    """The hardware threads between which latency is worth knowing: of each node two cores."""
    chosen: list[int] = []
    for node in topology.nodes:
        threads = {cpu for one in topology.cores if one.node == node.id for cpu in one.threads}
        chosen += [cpu for cpu in cores if cpu in threads][:2]
    return chosen


def _text(report: dict[str, Any]) -> list[str]:
    rows = [
        ("stream read", "stream_read_gbs", "GB/s"),
        ("first touch", "first_touch_gbs", "GB/s"),
        *((f"{compute_title(report['isa'])} {kind}", name, unit) for name, kind, unit in COMPUTE),
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
