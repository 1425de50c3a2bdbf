"""`tilerank doctor --machine FILE`: the rates of this machine, and the shares of them that kernels reach, as a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from functools import partial
from typing import Any

from ..errors import LaunchError
from ..host.kept_rates import cpu_fields
from ..host.placement import auto_ranks
from ..host.topology import Topology
from ..planning.prediction.machine import Exchange, Machine, Point, Shares
from ..processes.process import die_with
from .harness import Row
from .peaks import Peaks, bench_cores, peaks_from

KERNELS = (
    *("--only", "linear,attention,small", "--seconds", "0.1", "--m", "1,4,8,16,64,256,2048", "--shape", "2048x2048"),
    *("--formats", "bfloat16,int8,token-int8,int4,int4-a8,mxfp4,mxfp4-a8,fp8,channel-fp8,block-int8,group-int8"),
    *("--cached-tokens", "1024", "--new-tokens", "256,1024", "--rows", "512"),
)
"""The options of `bench kernels` whose rows become the shares: a format of each layout."""
ELEMENTWISE = ("add_rms_norm", "norm_rotary_")
"""The kernels between products whose bytes and seconds together are the rate of all of them."""
SUMS = (8 << 10, 1 << 20)
"""Bytes of the sums over two ranks from which a latency and a rate follow."""
STEP_US, SEQUENCE_US, LAYER_US = 600.0, 60.0, 5.0
"""The time outside of kernels, and of starting them: of `bench model` of Qwen3-0.6B on the Xeon without AMX of
docs/performance.md."""


def measure_machine(topology: Topology) -> Machine:
    """Measure this machine, which takes some minutes. Raises LaunchError if a benchmark fails."""
    nodes, cores = auto_ranks(topology), bench_cores(topology)
    peaks = peaks_from(_bench("peaks"), os.getloadavg()[0])
    kernels = _bench("kernels", *KERNELS)
    sums = _bench("comm", "--tp", "2", "--bytes", ",".join(map(str, SUMS))) if len(cores) > 1 else []
    memory = sum(topology.node(node).memory_total for node in topology.allowed_mems)
    model = cpu_fields().get("model name", "unknown CPU")
    return Machine(
        name=f"{len(cores)} cores of {model}",
        source="measured by `tilerank doctor --machine`",
        nodes=nodes,
        cores=len(cores) // nodes,
        memory_gib=memory / nodes / (1 << 30),
        **_rates(peaks, nodes),
        shares=shares_of_rows(kernels, len(cores)),
        between_nodes=exchange_of(sums),
    )


def _rates(peaks: Peaks, nodes: int) -> dict[str, Any]:
    """Return the rates of a node by the fields of Machine. Raises LaunchError on a machine without a compiled core."""
    bf16, int8 = peaks.amx_bf16_tflops or peaks.vector_bf16_tflops, peaks.amx_int8_tops or peaks.vector_int8_tops
    if bf16 is None or int8 is None or peaks.stream_update_gbs is None:
        raise LaunchError("--machine: expected the compiled core, whose peaks can be measured, found plain torch")
    fp32 = peaks.vector_fp32_tflops
    return {
        "read_gbs": peaks.stream_read_gbs / nodes,
        "update_gbs": peaks.stream_update_gbs / nodes,
        "bf16_tflops": bf16 / nodes,
        "int8_tops": int8 / nodes,
        "fp32_tflops": None if fp32 is None else fp32 / nodes,
    }


def shares_of_rows(rows: Iterable[Row], cores: int) -> Shares:
    """Return the shares of the limit in rows of `bench kernels` on `cores` cores, by format and balance.

    Prompts attend to a cache of int8 codes as to one of bfloat16, which alone is measured.
    """
    from .formats import WEIGHT_FORMATS

    products: dict[str, dict[str, list[Row]]] = {}
    decode: dict[str, list[Row]] = {"bfloat16": [], "int8": []}
    extend: list[Row] = []
    elementwise: list[Row] = []
    for row in rows:
        if row["kernel"] == "linear":
            # Formats that differ in the size of their groups alone have one layout; the first one stands for all.
            products.setdefault(WEIGHT_FORMATS[row["format"]].layout.format, {}).setdefault(row["format"], []).append(
                row
            )
        elif row["kernel"] == "decode attention":
            decode[row["format"]].append(row)
        elif row["kernel"] == "extend attention":
            extend.append(row)
        elif row["kernel"] in ELEMENTWISE:
            elementwise.append(row)
    rate = sum(row["bytes"] for row in elementwise) / sum(row["seconds"] for row in elementwise)
    return Shares(
        source="measured by `tilerank bench kernels` on this machine; the times outside of kernels are those "
        "of Qwen3-0.6B on a Xeon (docs/performance.md)",
        products={layout: _points(next(iter(by_format.values()))) for layout, by_format in products.items()},
        attention={cache: _points([*found, *extend]) for cache, found in decode.items()},
        elementwise_gbs=float(f"{rate / cores / 1e9:.4g}"),
        step_us=STEP_US,
        sequence_us=SEQUENCE_US,
        layer_us=LAYER_US,
    )


def _points(rows: Iterable[Row]) -> list[Point]:
    """Return (balance, share of the limit) of each row, in order of balance, which is compute_share / stream_share."""
    points = {row["compute_share"] / row["stream_share"]: row["limit_share"] for row in rows}
    return [(float(f"{balance:.4g}"), float(f"{share:.4g}")) for balance, share in sorted(points.items())]


def exchange_of(rows: Iterable[Row]) -> Exchange | None:
    """Return the latency and the rate of a sum over two ranks from rows of `bench comm`; None without rows."""
    seconds = {row["bytes"]: row["seconds"] for row in rows if row["operation"] == "all_reduce"}
    if not seconds:
        return None
    (small, first), (large, last) = sorted(seconds.items())
    rate = (large - small) / max(last - first, 1e-9)
    return Exchange(max(first - small / rate, 1e-7) * 1e6, rate / 1e9)


def _bench(name: str, *options: str) -> Any:
    """Return the JSON of a benchmark, which runs in a process of its own, because it pins its threads."""
    command = [sys.executable, "-P", "-m", "tilerank", "bench", name, *options, "--json"]
    dies = partial(die_with, os.getpid())
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, preexec_fn=dies)
    if done.returncode != 0:
        raise LaunchError(f"`tilerank bench {name}` failed: {done.stderr.strip()}")
    return json.loads(done.stdout)
