"""The compiled core: which instructions run, on which threads, in which memory.

Every kernel face asks `isa()`: "reference" means that it runs in plain torch (`reference.py`), anything else that it
may `launch` a compiled kernel.
"""

import atexit
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import KernelError

try:
    from . import _C
except ImportError as error:
    _C = None  # type: ignore[assignment]
    _not_built = f"the compiled core cannot be imported ({error})"
else:
    _not_built = ""
    _C.attach(Tensor, [getattr(torch, name) for name in _C.dtypes()], KernelError)
    atexit.register(_C.stop_pool)

log = logging.getLogger(__name__)

ISAS = ("amx", "avx512_bf16", "avx512", "avx2", "reference")

_isa: str | None = None
_DTYPES = {getattr(torch, name): code for code, name in enumerate(_C.dtypes())} if _C else {}


@dataclass(frozen=True)
class Rung:
    """One rung of the ISA ladder, and why it cannot be used (empty if it can)."""

    name: str
    usable: bool
    reason: str


def isa_report() -> list[Rung]:
    """Every rung, best first. TILERANK_ISA makes the rungs above it unusable."""
    obstacles = dict(_C.obstacles()) if _C else dict.fromkeys(ISAS[:-1], _not_built)
    obstacles["reference"] = ""
    cap = os.environ.get("TILERANK_ISA")
    if cap is not None:
        if cap not in ISAS:
            raise KernelError(f"TILERANK_ISA: expected one of {', '.join(ISAS)}, found {cap!r}")
        if obstacles[cap]:
            raise KernelError(f"TILERANK_ISA: expected a rung this machine can run, found {cap}: {obstacles[cap]}")
        for name in ISAS[: ISAS.index(cap)]:
            obstacles[name] = obstacles[name] or f"capped by TILERANK_ISA={cap}"
    return [Rung(name, not obstacles[name], obstacles[name]) for name in ISAS]


def isa() -> str:
    """The rung in force: one of ISAS.

    The best usable one unless TILERANK_ISA or `force_isa` says otherwise. Raises KernelError for a TILERANK_ISA that is
    unknown or not usable.
    """
    if _isa is None:
        report = isa_report()
        _use(next(rung.name for rung in report if rung.usable))
        if _isa == "reference":
            log.warning("kernels run in plain torch, slowly: %s", report[-2].reason)
    assert _isa is not None
    return _isa


def force_isa(name: str) -> None:
    """Switches the rung of this process; for tests. Raises KernelError if the rung is unknown or not usable."""
    for rung in isa_report():
        if rung.name == name:
            if not rung.usable:
                raise KernelError(f"force_isa: expected a usable rung, found {name}: {rung.reason}")
            _use(name)
            return
    raise KernelError(f"force_isa: expected one of {', '.join(ISAS)}, found {name!r}")


def _use(name: str) -> None:
    global _isa
    _isa = name
    if _C:
        _C.set_isa(name)


def kernel(name: str) -> int:
    """The number of a compiled kernel, for `launch`; -1 without the compiled core."""
    return _C.kernel(name) if _C else -1


def launch(
    kernel: int,
    tensors: tuple[Tensor | None, ...],
    ints: tuple[int, ...] = (),
    floats: tuple[float, ...] = (),
) -> None:
    """Runs a compiled kernel on all threads of the pool; `isa()` must not be "reference".

    The kernel sees the tensors as they are (any strides, up to 5 dims; None = absent); the caller has checked them.
    """
    _C.launch(kernel, tensors, ints, floats)


def start_pool(cores: Sequence[int] | None, threads: int = 1, *, spin: bool) -> None:
    """Starts the process's threads, replacing earlier ones; the calling thread is worker 0.

    cores: one core per worker, the calling thread is pinned to the first; None: `threads` workers that are not pinned.
    spin: waiting threads spin about 100 us before they sleep. Right only if each has a core of its own; without it they
    sleep at once, so that more ranks than cores make progress.
    Raises KernelError for a core that this process may not use. After a fork the child starts its own threads.
    """
    if _C:
        _C.start_pool([] if cores is None else list(cores), threads if cores is None else len(cores), spin)


def num_threads() -> int:
    """Threads that run a kernel together, the caller included."""
    return _C.num_threads() if _C else 1


def packed_alone(rows: int) -> bool:
    """Whether a product has so few rows that every thread packs them for itself, which costs less than to wait for the
    others."""
    return rows <= {"amx": 16, "avx2": 3}.get(isa(), 8)


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialised contiguous tensor out of the activation arena (huge pages, 64-byte aligned).

    Its block returns to the arena when the last view of it dies. At most 5 dims.
    """
    return _empty(shape, dtype, apart=False)


def empty_rows(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The same for rows [m, ...] that a product of many rows writes or will read: an odd number of cache lines apart,
    so that the columns of a block of it do not meet in the same few sets of caches or channels of memory, and it need
    not pack them (csrc/gemm_amx.h). Each row is contiguous.
    """
    return _empty(shape, dtype, apart=True)


def _empty(shape: Sequence[int], dtype: torch.dtype, apart: bool) -> Tensor:
    if _isa is None:
        isa()
    return torch.empty(tuple(shape), dtype=dtype) if _isa == "reference" else _C.empty(shape, _DTYPES[dtype], apart)


def view(x: Tensor, shape: Sequence[int], strides: Sequence[int], first: int = 0) -> Tensor:
    """x.as_strided(shape, strides), beginning `first` elements further on; inside of x, which is not checked.

    Of what the arena holds it is made without torch, whose views cost a recording more than the launches do.
    """
    made = _C.view(x, shape, strides, first) if _C and _isa != "reference" else None
    return x.as_strided(shape, strides, x.storage_offset() + first) if made is None else made


def fits(value: Tensor, shape: tuple[int | None, ...], dtype: torch.dtype | tuple[torch.dtype, ...]) -> bool:
    """Surely what `check.tensor` wants? If not, it finds out."""
    return _C.fits(value, shape, dtype) if _C else False


def arena_bytes() -> tuple[int, int]:
    """(bytes of living tensors, bytes mapped) of the activation arena."""
    return _C.arena_bytes() if _C else (0, 0)


_TOUCH = kernel("touch")


def alloc(nbytes: int, *, resident: bool = False) -> Tensor:
    """Zeroed uint8 [nbytes], 64-byte aligned, in a mapping of its own (huge pages), unmapped when the last view dies.

    Nothing is resident before it is written, or else all of it: for what will be written at once, because a virtual
    machine may hand out memory at less than a GB/s, and only here all threads wait for as much of it.
    """
    if not _C:
        return torch.zeros(nbytes, dtype=torch.uint8)
    data: Tensor = _C.alloc(nbytes)
    if resident and isa() != "reference":
        launch(_TOUCH, (data,))
    return data


def drop_pages(tensor: Tensor) -> None:
    """Takes the whole pages of a tensor that views a file mapping out of resident memory; they can be read again.

    Raises KernelError if the tensor is not in a file mapping, whose pages would be lost.
    """
    if _C:
        _C.drop_pages(tensor)
