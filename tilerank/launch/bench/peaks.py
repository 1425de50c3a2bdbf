"""`tilerank bench peaks`: the machine's peak rates, and the shares of them that other benchmarks report."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

from tilerank.parallel.cost import Work

from ..errors import LaunchError
from ..host.cpulist import format_cpulist, parse_cpulist
from ..host.topology import Topology, read_topology
from ..processes.process import die_with
from .harness import add_json_argument, check_json_argument, write_json

COMPUTE = (
    ("amx_bf16_tflops", "bf16", "TFLOP/s"),
    ("amx_int8_tops", "int8", "TOP/s"),
    ("vector_fp32_tflops", "fp32", "TFLOP/s"),
    ("vector_bf16_tflops", "bf16", "TFLOP/s"),
    ("vector_int8_tops", "int8", "TOP/s"),
)
"""Compute peaks: name in `Peaks` and in JSON, type of the operands, unit."""

T = TypeVar("T")
Rates = dict[str, float]
"""Some fields of `Peaks`, by name."""

BUSY_LOAD_AVERAGE = 0.5  # above this, a note on the load average is printed


@dataclass(frozen=True)
class Peaks:
    """The peak rates of a set of cores.

    stream_read_gbs: reading memory with all cores, GB/s.
    amx_bf16_tflops, amx_int8_tops: AMX tile products; None unless `isa` is "amx".
    core_to_core_ns: one-way latency between the two closest cores; None for a single core.
    first_touch_gbs: writing freshly allocated memory for the first time, GB/s.
    load_average: of the machine, before the measurement.
    isa: the newest rung of the hardware, whichever ones are in use: limits are those of the hardware.
    vector_fp32_tflops, vector_bf16_tflops, vector_int8_tops: vector products on the rung that is fastest at them; None
    for "amx" and "reference".
    stream_update_gbs: reading and writing memory in place with all cores, GB/s of both together; None unless it was
    measured.
    """

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
    stream_update_gbs: float | None = None

    def stream_share(self, work: Work, seconds: float) -> float:
        """Return the share of the memory bandwidth that `work` uses if it takes `seconds`."""
        return self._memory_seconds(work) / seconds

    def amx_share(self, work: Work, seconds: float) -> float | None:
        """Return `compute_share` if the hardware has AMX, else None."""
        return self.compute_share(work, seconds) if self.isa == "amx" else None

    def compute_share(self, work: Work, seconds: float) -> float | None:
        """Return the share of the compute peaks, AMX or vector, that `work` uses if it takes `seconds`.

        None if no operation of `work` has a known peak, such as fp32 with AMX.
        """
        return self._compute_seconds(work) / seconds or None

    def shares(self, work: Work, seconds: float) -> dict[str, Any]:
        """Return the fields of a JSON row for `work` that takes `seconds`, with these peaks."""
        return {
            "bytes": work.nbytes + work.updated,
            "flops": work.flops,
            "stream_share": self.stream_share(work, seconds),
            "amx_share": self.amx_share(work, seconds),
            "compute_share": self.compute_share(work, seconds),
            "limit_share": self.limit_seconds(work) / seconds,
            "peaks": self.as_json(),
        }

    def limit_seconds(self, work: Work) -> float:
        """Return the time of `work` at the roofline: max(time to move its bytes, time to compute its operations)."""
        return max(self._memory_seconds(work), self._compute_seconds(work))

    def _memory_seconds(self, work: Work) -> float:
        seconds = work.nbytes / (self.stream_read_gbs * 1e9)
        if work.updated:
            assert self.stream_update_gbs is not None
            seconds += work.updated / (self.stream_update_gbs * 1e9)
        return seconds

    def _compute_seconds(self, work: Work) -> float:
        parts = [
            (work.fp32, self.vector_fp32_tflops),
            (work.bf16, self.amx_bf16_tflops or self.vector_bf16_tflops),
            (work.int8, self.amx_int8_tops or self.vector_int8_tops),
        ]
        return sum(operations / (peak * 1e12) for operations, peak in parts if peak is not None)

    def with_rates(self, rates: Rates) -> Peaks:
        """Return a copy with some rates replaced by those measured together with a figure."""
        return Peaks(**asdict(self) | rates)

    def text(self) -> str:
        """Return one line for the user, and a note on a second line if the machine was busy."""
        compute = ", ".join(compute_peak_texts(self.as_json())) or "no compute peak"
        latency = "" if self.core_to_core_ns is None else f", {self.core_to_core_ns:.0f} ns core to core"
        busy = f"\n{load_note(self.load_average)}" if self.load_average > BUSY_LOAD_AVERAGE else ""
        return f"peaks: {self.stream_read_gbs:.1f} GB/s read, {compute}{latency}{busy}"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class RateProbe:
    """Measures the rates that limit some work on `cores` in a fraction of a second, just before and after the work.

    On a virtual machine, neighbours may halve a rate from one second to the next; a share is meaningful only against
    the rates of that moment.
    """

    def __init__(self, cores: Sequence[int]) -> None:
        from tilerank.kernels.peaks import MemoryStream

        self._cores = list(cores)
        self._stream = MemoryStream(len(self._cores), self._cores)

    def measure(self, work: Work) -> Rates:
        """Measure the read rate, the update rate and the compute rates that limit `work`. Takes about 0.1 s."""
        from tilerank.kernels import core

        found = {"stream_read_gbs": self._stream.read_gbs()}
        if work.updated:
            found["stream_update_gbs"] = self._stream.update_gbs()
        for name, kind, _ in COMPUTE:
            if getattr(work, kind) and _has_peak(core.hardware_isa(), name):
                found[name] = _compute_peak(name, kind, len(self._cores), self._cores)
        return found

    def around(self, work: Work, run: Callable[[], T]) -> tuple[T, Rates]:
        """Return the result of `run`, and the rates that limit `work`: the mean of those just before and after it."""
        before = self.measure(work)
        result = run()
        return result, mean_rates(before, self.measure(work))


def mean_rates(before: Rates, after: Rates) -> Rates:
    """Return the mean of each rate, for a figure that was measured between them."""
    return {name: (rate + after[name]) / 2 for name, rate in before.items()}


def _has_peak(isa: str, name: str) -> bool:
    """Return whether the compute peak `name` limits hardware whose newest rung is `isa`: tiles for "amx", else vectors.

    The rung "reference", a machine without the compiled core, has no compute peak.
    """
    return isa != "reference" and name.startswith("amx") == (isa == "amx")


def _compute_peak(name: str, kind: str, threads: int, cores: Sequence[int]) -> float:
    from tilerank.kernels import peaks

    return (peaks.amx_tflops if name.startswith("amx") else peaks.vector_tflops)(kind, threads, cores)


def compute_unit(isa: str) -> str:
    """Return a name for the execution unit of the rung `isa`, for titles."""
    return {"amx": "AMX", "avx2": "AVX2", "reference": "torch"}.get(isa, "AVX-512")


def share_text(share: float | None) -> str:
    """Format a share with two digits; "-" for None."""
    return "-" if share is None else f"{share:.2f}"


def compute_peak_texts(peaks: Mapping[str, Any]) -> list[str]:
    """Return a text for each compute peak in `Peaks.as_json`: "0.30 TFLOP/s AVX-512 fp32", "1.20 TOP/s int8"."""
    known = [(peaks[name], kind, unit) for name, kind, unit in COMPUTE if peaks[name] is not None]
    titles = [f"{compute_unit(peaks['isa'])} ", *[""] * len(known)]
    return [f"{rate:.2f} {unit} {title}{kind}" for title, (rate, kind, unit) in zip(titles, known, strict=False)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cores", type=_cores, metavar="LIST", help='CPUs to measure, "0-39" (default: one of each core)'
    )
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Measure the peaks of this machine and print them."""
    check_json_argument(args)
    topology = read_topology()
    if args.cores is not None and (wrong := set(args.cores) - set(topology.allowed_cpus)):
        raise LaunchError(
            f"--cores: expected CPUs that this process may use ({format_cpulist(topology.allowed_cpus)}), "
            f"found {min(wrong)}"
        )
    load = os.getloadavg()[0]
    report = measure_peaks(topology, args.cores)
    if load > BUSY_LOAD_AVERAGE:
        print(load_note(load))
    print("\n".join(_text(report)))
    write_json(args, report)
    return 0


def measure_peaks(topology: Topology, cores: Sequence[int] | None = None) -> dict[str, Any]:
    """Return all peaks of `cores` (default: one hardware thread of each core) as JSON.

    Rates are by the number of cores, latencies by the pair of cores. Units: GB/s, TFLOP/s, TOP/s for int8, ns.
    """
    # Imported here since torch takes seconds to import, and `tilerank --help` builds every parser.
    from tilerank.kernels import core, peaks

    own = bench_cores(topology) if cores is None else list(cores)
    counts = sorted({1, len(own)})
    report: dict[str, Any] = {
        "cores": own,
        # Measured first: the other measurements free memory, which this one would get back without a page fault.
        "first_touch_gbs": {str(len(own)): peaks.first_touch_gbs(len(own), own)},
        "stream_read_gbs": {str(count): peaks.stream_read_gbs(count, own) for count in counts},
        "stream_update_gbs": {str(count): peaks.stream_update_gbs(count, own) for count in counts},
    }
    report["isa"] = core.hardware_isa()
    if report["isa"] != "amx":
        report["amx"] = f"not available: {core.isa_report()[0].reason}"
    for name, kind, _ in COMPUTE:
        if _has_peak(report["isa"], name):
            report[name] = {str(count): _compute_peak(name, kind, count, own) for count in counts}
    report["core_to_core_ns"] = {
        f"{a}-{b}": peaks.core_to_core_ns(a, b) for a, b in itertools.combinations(_representatives(topology, own), 2)
    }
    return report


def bench_cores(topology: Topology) -> list[int]:
    """Return one hardware thread of each core that this process may use."""
    return [core.threads[0] for core in topology.usable_cores()]


def peaks_of(cores: Sequence[int]) -> Peaks:
    """Measure the peaks of `cores` in a separate process, so that this one, which starts ranks, does not import torch.

    LaunchError if that process fails.
    """
    command = [sys.executable, "-P", "-m", "tilerank", "bench", "peaks", "--json", "--cores", format_cpulist(cores)]
    load = os.getloadavg()[0]
    dies = partial(die_with, os.getpid())
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, preexec_fn=dies)
    if done.returncode != 0:
        raise LaunchError(f"measuring the peaks of cores {format_cpulist(cores)} failed: {done.stderr.strip()}")
    return peaks_from(json.loads(done.stdout), load)


def load_note(load: float) -> str:
    """Return the line that says how busy the machine was before a benchmark."""
    return f"note: the load average was {load:.1f} before the start; other processes lower the figures"


def peaks_from(report: dict[str, Any], load_average: float) -> Peaks:
    """Return the peaks of all cores together from a report of `measure_peaks`."""
    all_cores = str(len(report["cores"]))
    return Peaks(
        stream_read_gbs=report["stream_read_gbs"][all_cores],
        stream_update_gbs=report["stream_update_gbs"][all_cores],
        core_to_core_ns=min(report["core_to_core_ns"].values(), default=None),
        first_touch_gbs=report["first_touch_gbs"][all_cores],
        load_average=load_average,
        isa=report["isa"],
        **{name: report.get(name, {}).get(all_cores) for name, _, _ in COMPUTE},
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
    """Return up to two of `cores` on each node; latencies are measured between them."""
    chosen: list[int] = []
    for node in topology.nodes:
        threads = {cpu for core in topology.cores if core.node == node.id for cpu in core.threads}
        chosen += [cpu for cpu in cores if cpu in threads][:2]
    return chosen


def _text(report: dict[str, Any]) -> list[str]:
    rows = [
        ("stream read", "stream_read_gbs", "GB/s"),
        ("stream update", "stream_update_gbs", "GB/s"),
        ("first touch", "first_touch_gbs", "GB/s"),
        *((f"{compute_unit(report['isa'])} {kind}", name, unit) for name, kind, unit in COMPUTE),
    ]
    lines = [
        f"{title:<14}{'1 core' if count == '1' else count + ' cores':<10}{rate:10.2f} {unit}"
        for title, key, unit in rows
        for count, rate in report.get(key, {}).items()
    ]
    if "amx" in report:
        lines.append(f"{'AMX':<14}{report['amx']}")
    latencies = [
        f"{'core to core':<14}{pair:<10}{latency:10.0f} ns, one way"
        for pair, latency in report["core_to_core_ns"].items()
    ]
    return lines + latencies
