"""What this machine can do at best; every other figure is read as a share of these.

Each function starts pinned threads of its own on the first of `cores` (default: the cores this process may use, in
order) and returns the median of several rounds, unless it says otherwise. Raises KernelError where the machine or the
cores do not allow it.
"""

import os
import statistics
from collections.abc import Sequence
from pathlib import Path

from . import core
from .errors import KernelError

try:
    from . import _C
except ImportError:
    _C = None  # type: ignore[assignment]

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "int8": "int8"}


class StreamRead:
    """Reading memory with `threads` cores at once, each out of huge pages of its own node, more than the last-level
    cache holds. They are kept, so that the rate can be measured again at any time."""

    def __init__(self, threads: int, cores: Sequence[int] | None = None) -> None:
        _check_compiled()
        self._cores = _first(threads, cores)
        each = min(max(2 * _last_level_cache_bytes() // threads, 64 << 20), 1 << 30)
        self._memory = [core.alloc(each) for _ in self._cores]

    def gbs(self) -> float:
        """GB/s (1e9 bytes), in about 30 ms."""
        return statistics.median(_C.measure_read(self._cores, self._memory)) / 1e9


def stream_read_gbs(threads: int, cores: Sequence[int] | None = None) -> float:
    """The rate of `StreamRead`, once."""
    return StreamRead(threads, cores).gbs()


def first_touch_gbs(threads: int, cores: Sequence[int] | None = None) -> float:
    """GB/s at which `threads` cores at once make the system hand out memory, in huge pages: what loading can reach. Of
    one round: the second time it is no longer fresh, which a virtual machine's host makes slow."""
    _check_compiled()
    return float(_C.measure_first_touch(_first(threads, cores), min(256 << 20, (8 << 30) // threads))) / 1e9


def amx_tflops(kind: str, threads: int, cores: Sequence[int] | None = None) -> float:
    """1e12 operations a second (a product and a sum are two) of AMX tile products, bf16 or int8, on `threads` cores at
    once."""
    _check_compiled()
    if kind not in ("bf16", "int8"):
        raise KernelError(f"amx_tflops: kind: expected bf16 or int8, found {kind!r}")
    return statistics.median(_C.measure_amx(_first(threads, cores), kind == "int8")) / 1e12


def vector_tflops(kind: str, threads: int, cores: Sequence[int] | None = None) -> float:
    """The same of what the rung in force multiplies vectors of fp32, bf16 or int8 with. Where bf16 is widened to fp32
    first that is the same for both."""
    _check_compiled()
    if kind not in _DTYPES:
        raise KernelError(f"vector_tflops: kind: expected one of {', '.join(_DTYPES)}, found {kind!r}")
    core.isa()
    dtype = _C.dtypes().index(_DTYPES[kind])
    return statistics.median(_C.measure_vectors(_first(threads, cores), dtype)) / 1e12


def core_to_core_ns(core_a: int, core_b: int) -> float:
    """Nanoseconds that a write on one core takes to be seen on another: half of a round trip of one cache line."""
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
