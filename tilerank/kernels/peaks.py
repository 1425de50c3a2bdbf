"""Peak rates of this machine: memory bandwidth, FLOP/s and core-to-core latency. Benchmarks report shares of these.

Each measurement runs on threads of its own, pinned to the first `threads` of `cores` (default: the cores this process
may use, in order), and returns the median of several rounds unless stated otherwise. It raises KernelError if the
machine or the cores do not support it.
"""

import os
import statistics
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from . import core
from .errors import KernelError

try:
    from . import _C
except ImportError:
    _C = None  # type: ignore[assignment]

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "int8": "int8"}


class MemoryStream:
    """Measures the memory bandwidth of `threads` cores together.

    Each core passes over huge pages on its own NUMA node; together they exceed the last-level cache. The memory stays
    allocated, so that rates can be measured repeatedly.
    """

    def __init__(self, threads: int, cores: Sequence[int] | None = None) -> None:
        _check_compiled()
        self._cores = _first(threads, cores)
        each = min(max(2 * _last_level_cache_bytes() // threads, 64 << 20), 1 << 30)
        self._memory = [core.alloc(each) for _ in self._cores]

    def read_gbs(self) -> float:
        """Return the bandwidth of reading in GB/s (1e9 bytes); takes about 30 ms."""
        return statistics.median(_C.measure_read(self._cores, self._memory)) / 1e9

    def update_gbs(self) -> float:
        """Return the bandwidth of reading and writing in place, in GB/s of both together; takes about 50 ms."""
        return statistics.median(_C.measure_update(self._cores, self._memory)) / 1e9


def stream_read_gbs(threads: int, cores: Sequence[int] | None = None) -> float:
    """Return the GB/s that `threads` cores together read from memory; see `MemoryStream`."""
    return MemoryStream(threads, cores).read_gbs()


def stream_update_gbs(threads: int, cores: Sequence[int] | None = None) -> float:
    """Return the GB/s that `threads` cores together read from memory and write in place; see `MemoryStream`."""
    return MemoryStream(threads, cores).update_gbs()


def first_touch_gbs(threads: int, cores: Sequence[int] | None = None) -> float:
    """Return the GB/s at which `threads` cores together write fresh huge pages, an upper bound of the loading rate.

    Measured in one round only: in a second round the memory would no longer be fresh, and a virtual machine's host
    provides fresh memory more slowly.
    """
    _check_compiled()
    return float(_C.measure_first_touch(_first(threads, cores), min(256 << 20, (8 << 30) // threads))) / 1e9


def amx_tflops(kind: str, threads: int, cores: Sequence[int] | None = None) -> float:
    """Return the rate of AMX tile products on `threads` cores together, in 1e12 operations per second.

    kind: "bf16" or "int8". A multiplication and an addition are two operations.
    """
    _check_compiled()
    if kind not in ("bf16", "int8"):
        raise KernelError(f"amx_tflops: kind: expected bf16 or int8, found {kind!r}")
    return statistics.median(_C.measure_amx(_first(threads, cores), kind == "int8")) / 1e12


def vector_tflops(kind: str, threads: int, cores: Sequence[int] | None = None) -> float:
    """Return the rate of vector products on `threads` cores, in 1e12 operations per second.

    It is that of the fastest rung of this CPU, whichever is in force.

    kind: "fp32", "bf16" or "int8". Rungs without bf16 products widen bf16 to fp32, which is faster on some CPUs.
    """
    _check_compiled()
    if kind not in _DTYPES:
        raise KernelError(f"vector_tflops: kind: expected one of {', '.join(_DTYPES)}, found {kind!r}")
    own = _first(threads, cores)
    return _vector_rate(_fastest_vectors(kind, own[0]), kind, own) / 1e12


@cache
def _fastest_vectors(kind: str, cpu: int) -> str:
    """Return the rung with the highest rate of vector products. Measured once: it is that of the CPU model."""
    rungs = [
        rung for rung, obstacle in _C.obstacles() if not obstacle and rung != "amx"
    ]  # amx has those of avx512_bf16
    if not rungs:
        raise KernelError(f"vector_tflops: expected a CPU with AVX2 or newer: {_C.obstacles()[-1][1]}")
    return max(rungs, key=lambda rung: _vector_rate(rung, kind, [cpu]))


def _vector_rate(rung: str, kind: str, cores: list[int]) -> float:
    return statistics.median(_C.measure_vectors(cores, rung, _C.dtypes().index(_DTYPES[kind])))


def core_to_core_ns(core_a: int, core_b: int) -> float:
    """Return the nanoseconds until a write on one core is visible on another: half the round trip of a cache line."""
    _check_compiled()
    if core_a == core_b:
        raise KernelError(f"core_to_core_ns: expected two different cores, found {core_a} twice")
    return statistics.median(_C.measure_core_to_core(core_a, core_b)) * 1e9


def _check_compiled() -> None:
    if not _C:
        raise KernelError(f"peaks are not available: {core.isa_report()[0].reason}")


def _first(threads: int, cores: Sequence[int] | None) -> list[int]:
    allowed = sorted(os.sched_getaffinity(0)) if cores is None else list(cores)
    if not 1 <= threads <= len(allowed):
        raise KernelError(f"peaks: threads: expected 1 to {len(allowed)}, one for each core, found {threads}")
    return allowed[:threads]


def _last_level_cache_bytes() -> int:
    sizes = [
        int(file.read_text().strip().rstrip("K")) * 1024
        for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    ]
    return max(sizes, default=64 << 20)
