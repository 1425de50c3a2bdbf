"""`tilerank bench kernels`: each kernel's time as a share of reading memory or of the AMX peak, and against torch."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any

from .bench_job import whole_numbers
from .bench_peaks import Peaks, add_json_argument, bench_cores, check_json_argument, peaks_of, write_json
from .bench_work import Work
from .topology import read_topology

if TYPE_CHECKING:
    import torch

COLD_BYTES, MOST_COPIES = 1 << 30, 64
"""Weights and cached tokens take turns in copies that are this large together, which few last-level caches hold: in a
model, too, they come from memory."""
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
DECODE_BATCH = 8
NORM_ROWS, NORM_WIDTH = (1, 32, 1024), 4096
M = [1, 4, 16, 64, 256, 1024]
KERNELS = ("linear", "attention", "norm")

Call = Callable[[int], object]


@dataclass(frozen=True)
class Entry:
    """One kernel on one shape. `run` and `torch`, which does the same if it can, get the number of the call."""

    kernel: str
    shape: str
    dtype: str
    work: Work
    run: Call
    torch: Call | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", type=_kernels, default=KERNELS, metavar="NAME,NAME", help=f"of {', '.join(KERNELS)}")
    parser.add_argument("--m", type=whole_numbers(1), default=M, metavar="M,M", help="rows of x")
    parser.add_argument(
        "--shape",
        type=_shapes,
        default=[(4096, 4096), (24576, 4096), (4096, 12288)],
        metavar="NxK,NxK",
        help="outputs and inputs of the weights (default: 4096x4096,24576x4096,4096x12288)",
    )
    parser.add_argument("--dtype", type=_dtypes, default=("bfloat16", "float32"), metavar="NAME,NAME", help="of linear")
    parser.add_argument(
        "--cached-tokens", type=whole_numbers(1), default=[1024, 4096, 8192], metavar="T,T", help="of decode"
    )
    parser.add_argument("--new-tokens", type=whole_numbers(1), default=[2048], metavar="T,T", help="of extend")
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
    print(
        f"{'kernel':<18}{'shape':<22}{'dtype':<10}{'us':>11}{'of limit':>10}{'of read':>9}{'of AMX':>8}{'torch us':>12}"
        f"{'times':>7}"
    )
    rows = []
    for entry in entries(args):
        ours = seconds_per_call(entry.run, args.seconds)
        theirs = None if entry.torch is None else seconds_per_call(entry.torch, args.seconds)
        rows.append(row_of(entry, ours, theirs, peaks, core.isa()))
        print(_text(rows[-1]), flush=True)
    write_json(args, rows)
    return 0


def entries(args: argparse.Namespace) -> Iterator[Entry]:
    """Each is built when its turn comes, and let go after it."""
    if "linear" in args.only:
        for dtype in args.dtype:
            for n, k in args.shape:
                yield from _linear(dtype, n, k, args.m)
    if "attention" in args.only:
        for cached in args.cached_tokens:
            yield _attention("decode attention", DECODE_BATCH, cached - 1, 1)
        for new in args.new_tokens:
            for prefix in (0, new):
                yield _attention("extend attention", 1, prefix, new)
    if "norm" in args.only:
        for rows in NORM_ROWS:
            yield from _norms(rows, NORM_WIDTH)


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


def row_of(entry: Entry, seconds: float, torch_seconds: float | None, peaks: Peaks, isa: str) -> dict[str, Any]:
    """A row for JSON. amx_share: for bfloat16 only, there are no fp32 tiles. torch_ratio: how often ours runs in the
    time of torch's."""
    half = entry.dtype == "bfloat16"
    work = entry.work
    flops = work.flops if half else 0.0
    return {
        "kernel": entry.kernel,
        "shape": entry.shape,
        "dtype": entry.dtype,
        "isa": isa,
        "seconds": seconds,
        "bytes": work.nbytes,
        "flops": work.flops,
        "stream_share": peaks.stream_share(work.nbytes, seconds),
        "amx_share": peaks.amx_share(flops, seconds) if half else None,
        "limit_share": peaks.least_seconds(work.nbytes, flops) / seconds,
        "torch_seconds": torch_seconds,
        "torch_ratio": None if torch_seconds is None else torch_seconds / seconds,
        "peaks": peaks.as_json(),
    }


def _linear(dtype_name: str, n: int, k: int, ms: Sequence[int]) -> Iterator[Entry]:
    """Bytes are those of the packed weight alone: what is left when M is small."""
    import torch
    from torch.nn import functional

    from tilerank.kernels.linear import PackedWeight, linear

    dtype: torch.dtype = getattr(torch, dtype_name)
    nbytes = PackedWeight.nbytes(n, k, dtype)
    copies = _copies(nbytes)
    plain = [torch.empty(n, k, dtype=dtype).normal_(0, 0.02) for _ in range(copies)]
    packed = []
    for weight in plain:
        packed.append(PackedWeight.empty(n, k, dtype))
        packed[-1].write(weight)
    for m in ms:
        x = torch.randn(m, k).to(dtype)
        yield Entry(
            "linear",
            f"{m} x {n} x {k}",
            dtype_name,
            Work(nbytes, 2 * m * n * k),
            lambda number, x=x: linear(x, packed[number % copies]),  # type: ignore[misc]
            lambda number, x=x: functional.linear(x, plain[number % copies]),  # type: ignore[misc]
        )


def _attention(kernel: str, batch: int, prefix: int, new: int) -> Entry:
    """`new` tokens of each of `batch` sequences after `prefix` cached ones. Bytes are those of the cached tokens."""
    import torch

    from tilerank.kernels.attention import KV_BLOCK, KVLayer, attention, store_kv

    tokens = prefix + new
    pages = ceil(tokens / KV_BLOCK)
    dtype = torch.bfloat16
    nbytes = batch * tokens * 2 * KV_HEADS * HEAD_DIM * dtype.itemsize
    copies = _copies(nbytes) if new == 1 else 1
    caches = [KVLayer.empty(batch * pages, KV_HEADS, HEAD_DIM, dtype) for _ in range(copies)]
    slots = torch.arange(batch * pages * KV_BLOCK)
    for cache in caches:
        k, v = (torch.randn(len(slots), KV_HEADS, HEAD_DIM).to(dtype) for _ in range(2))
        store_kv(k, v, cache, slots)
    q = torch.randn(batch * new, HEADS, HEAD_DIM).to(dtype)
    tables = torch.arange(batch * pages, dtype=torch.int32).view(batch, pages)
    lengths = torch.full((batch,), tokens, dtype=torch.int32)
    starts = torch.arange(batch + 1, dtype=torch.int32) * new
    group = HEADS // KV_HEADS
    kv_map = torch.tensor([[head * group, group] for head in range(KV_HEADS)], dtype=torch.int32)
    pairs = new * prefix + new * (new + 1) // 2
    return Entry(
        kernel,
        f"{batch} x {new} after {prefix}",
        "bfloat16",
        Work(nbytes, 4 * batch * HEADS * HEAD_DIM * pairs),
        lambda number: attention(q, caches[number % copies], tables, lengths, starts, kv_map, HEAD_DIM**-0.5),
    )


def _norms(rows: int, width: int) -> Iterator[Entry]:
    """Bytes are those of the rows, read and written, though they stay in cache between layers."""
    import torch
    from torch.nn import functional

    from tilerank.kernels import ops

    x, residual = torch.randn(2, rows, width).to(torch.bfloat16)
    weight = torch.ones(width, dtype=torch.bfloat16)
    moved = x.nbytes
    yield Entry(
        "rms_norm",
        f"{rows} x {width}",
        "bfloat16",
        Work(2 * moved, 0),
        lambda _: ops.rms_norm(x, weight, 1e-6),
        lambda _: functional.rms_norm(x, (width,), weight, 1e-6),
    )
    yield Entry(
        "add_rms_norm",
        f"{rows} x {width}",
        "bfloat16",
        Work(4 * moved, 0),
        lambda _: ops.add_rms_norm(x, residual, weight, 1e-6),
    )


def _copies(nbytes: int) -> int:
    return min(ceil(COLD_BYTES / nbytes), MOST_COPIES)


def _text(row: dict[str, Any]) -> str:
    amx = "-" if row["amx_share"] is None else f"{row['amx_share']:.2f}"
    theirs = "" if row["torch_seconds"] is None else f"{1e6 * row['torch_seconds']:>12.1f}{row['torch_ratio']:>7.2f}"
    return (
        f"{row['kernel']:<18}{row['shape']:<22}{row['dtype']:<10}{1e6 * row['seconds']:>11.1f}"
        f"{row['limit_share']:>10.2f}{row['stream_share']:>9.2f}{amx:>8}{theirs}"
    )


def _kernels(text: str) -> tuple[str, ...]:
    return _names(text, KERNELS)


def _dtypes(text: str) -> tuple[str, ...]:
    return _names(text, ("bfloat16", "float32"))


def _names(text: str, known: Sequence[str]) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(known)}, found {unknown[0]!r}")
    return names


def _shapes(text: str) -> list[tuple[int, int]]:
    shapes = []
    for part in text.split(","):
        n, x, k = part.partition("x")
        if not (x and n.isdecimal() and k.isdecimal() and int(n) and int(k)):
            raise argparse.ArgumentTypeError(f"expected sizes like 4096x4096, found {part!r}")
        shapes.append((int(n), int(k)))
    return shapes
