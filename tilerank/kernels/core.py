"""The compiled core: instruction sets, threads and memory of the kernels.

The function of a kernel runs in plain torch (`reference/`) if `isa()` is "reference"; otherwise it launches the
compiled kernel, on the rung of its kind (`kind_of`, `rung_of`).
"""

import atexit
import errno
import hashlib
import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

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

HUGE_PAGE = 2 << 20
"""Bytes."""
_ALIGNMENT = 64
_PAGE = 4096

_isa: str | None = None
_rungs: dict[str, str] = {}  # by kind of kernel; kinds that are missing run on _isa
_DTYPES = {getattr(torch, name): code for code, name in enumerate(_C.dtypes())} if _C else {}


class _GivenMemory(threading.local):
    """The memory that `alloc` takes parts of: what is left of it."""

    rest: Tensor | None = None


_given = _GivenMemory()


@dataclass(frozen=True)
class Rung:
    """One rung of the ISA ladder: whether it can be used, and the reason if not (empty if it can).

    emulated: its instructions are emulated, in a build of the core for tests (`make test-amx`).
    """

    name: str
    usable: bool
    reason: str
    emulated: bool = False


def isa_report() -> list[Rung]:
    """Return every rung, best first. TILERANK_ISA makes the rungs above it unusable.

    Raises KernelError if TILERANK_ISA names a rung that does not exist or that this machine cannot run.
    """
    obstacles = dict(_C.obstacles()) if _C else dict.fromkeys(ISAS[:-1], _not_built)
    obstacles["reference"] = ""
    cap = given_isa()
    if cap is not None:
        if obstacles[cap]:
            raise KernelError(f"TILERANK_ISA: expected a rung this machine can run, found {cap}: {obstacles[cap]}")
        for name in ISAS[: ISAS.index(cap)]:
            obstacles[name] = obstacles[name] or f"capped by TILERANK_ISA={cap}"
    emulated = {"amx"} if _C and _C.emulates_amx else set()
    return [Rung(name, not obstacles[name], obstacles[name], name in emulated) for name in ISAS]


def given_isa() -> str | None:
    """Return the rung that TILERANK_ISA names, or None. Raises KernelError if there is no such rung."""
    cap = os.environ.get("TILERANK_ISA")
    if cap is not None and cap not in ISAS:
        raise KernelError(f"TILERANK_ISA: expected one of {', '.join(ISAS)}, found {cap!r}")
    return cap


def hardware_isa() -> str:
    """Return the newest rung of this CPU, whether or not TILERANK_ISA allows it. Emulated tiles do not count."""
    obstacles = _C.obstacles() if _C else []
    rungs = [name for name, obstacle in obstacles if not obstacle and not (name == "amx" and _C.emulates_amx)]
    return rungs[0] if rungs else "reference"


def isa() -> str:
    """Return the rung in force, one of ISAS: the newest usable one, unless TILERANK_ISA or `force_isa` select another.

    `use_rungs` may have chosen older ones for some kinds of kernels.
    Raises KernelError if TILERANK_ISA names a rung that does not exist or that this machine cannot run.
    """
    if _isa is None:
        report = isa_report()
        best = next(rung for rung in report if rung.usable)
        _use(best.name)
        if best.name == "reference":
            log.warning("kernels run in plain torch, slowly: %s", report[-2].reason)
        if best.emulated:
            log.warning("kernels run on emulated AMX tiles, slowly: this build of the core is for tests")
    assert _isa is not None
    return _isa


def force_isa(name: str) -> None:
    """Run all kernels on the rung `name`. Raises KernelError if the rung is unknown or unusable."""
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
    use_rungs({})


def kind_of(kernel: str) -> str:
    """Return the kind of a compiled kernel: the set of kernels that run on the same rung.

    It is the format of the weights for products (Layout.format), "attention" for attention, and "" or another name that
    `use_rungs` does not get for kernels that always run on `isa()`. Experts of all types of GGUF files run as those of
    4 bits.
    """
    if kernel in ("attention", "latent_attention"):
        return "attention"
    prefixes = ("linear_", "head_linear_", "moe_", "convolve_")
    kind = next((kernel.removeprefix(prefix) for prefix in prefixes if kernel.startswith(prefix)), "")
    return {"gguf": "gguf_u4", "gguf_a8": "gguf_u4_a8"}.get(kind, kind)


def use_rungs(rungs: Mapping[str, str]) -> None:
    """Run the kernels of some kinds on other rungs than `isa()`. rungs: by kind; they replace earlier ones.

    All ranks must use the same rungs, because the bits of a result depend on them. Graphs that were recorded before
    keep theirs. Raises KernelError for a rung that this machine cannot run.
    """
    global _rungs
    default = isa()
    for name in _C.kernels() if _C else ():
        _C.choose_isa(name, rungs.get(kind_of(name), default))
    _rungs = dict(rungs)


def rungs() -> dict[str, str]:
    """Return what `use_rungs` was called with last."""
    return dict(_rungs)


def rung_of(kind: str) -> str:
    """Return the rung on which the kernels of a kind run."""
    return _rungs.get(kind) or isa()


def isa_text() -> str:
    """Return the rungs of products and attention for reports, newest first, such as "avx512_bf16+avx512"."""
    used = set(_rungs.values()) or {isa()}
    return "+".join(name for name in ISAS if name in used)


def build_digest() -> str:
    """Return a digest of the compiled core, which changes whenever its kernels do. Empty without one."""
    return hashlib.sha256(Path(_C.__file__).read_bytes()).hexdigest() if _C else ""


def kernel(name: str, parameters: str | None = None) -> int:
    """Return the number of a compiled kernel, or -1 without the compiled core.

    parameters: their declarations in C++ (csrc/core/entry.h). Raises KernelError if the kernel was compiled with
    others.
    """
    if not _C:
        return -1
    number = _C.kernel(name)
    if parameters is not None and _C.parameters(number) != f"Team& team, {parameters}":
        raise KernelError(
            f"{name}: expected a kernel compiled with ({parameters}), found ({_C.parameters(number)}): the compiled "
            "core is of other sources than the Python code, build it again"
        )
    return number


def contract(name: str, operands: list[tuple[object, ...]]) -> "_C.Contract | None":
    """Return the compiled part of a contract (contract.py), or None without the compiled core."""
    return _C.Contract(name, operands) if _C else None


def dtype_bits(dtypes: Sequence[torch.dtype]) -> int:
    """Return a set of dtypes as csrc/core/contract.h has them."""
    return sum(1 << _DTYPES[dtype] for dtype in dtypes) if _C else 0


def start_pool(cores: Sequence[int] | None, threads: int = 1, *, spin: bool) -> None:
    """Start the thread pool of this process, replacing an earlier one. The calling thread is worker 0.

    cores: one core per worker; the calling thread is pinned to the first. None: `threads` workers without pinning.
    spin: idle threads spin for about 100 us before they sleep, which is right only if each has a core of its own.
    Without it they sleep at once, so that more ranks than cores make progress.
    Raises KernelError for a core that this process may not use. After a fork the child starts its own threads.
    """
    if _C:
        _C.start_pool([] if cores is None else list(cores), threads if cores is None else len(cores), spin)


def num_threads() -> int:
    """Return the number of threads that run a kernel together, the caller included."""
    return _C.num_threads() if _C else 1


def packs_per_thread(kind: str, rows: int) -> bool:
    """Return whether a product has so few rows that every thread packs all of them itself, to save a barrier."""
    return rows <= {"amx": 16, "avx2": 3}.get(rung_of(kind), 8)


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return an uninitialised contiguous tensor in the activation arena (huge pages, 64-byte aligned).

    At most 5 dimensions. Its memory returns to the arena when its last view is freed.
    """
    return _empty(shape, dtype, apart=False)


def empty_rows(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return an uninitialised tensor [m, ...] whose rows are an odd number of cache lines apart.

    For the inputs and outputs of products with many rows: the rows of a tile then spread over all cache sets and memory
    channels and need not be packed (csrc/linear/gemm_amx-inl.h). Each row is contiguous; otherwise as `empty`.
    """
    return _empty(shape, dtype, apart=True)


def _empty(shape: Sequence[int], dtype: torch.dtype, apart: bool) -> Tensor:
    if _isa is None:
        isa()
    return torch.empty(tuple(shape), dtype=dtype) if _isa == "reference" else _C.empty(shape, _DTYPES[dtype], apart)


def view(x: Tensor, shape: Sequence[int], strides: Sequence[int], first: int = 0) -> Tensor:
    """Return x.as_strided(shape, strides), beginning `first` elements after x. Bounds are not checked.

    Views of tensors in the arena are made without torch, whose views take longer than the launches of a step.
    """
    made = _C.view(x, shape, strides, first) if _C and _isa != "reference" else None
    return x.as_strided(shape, strides, x.storage_offset() + first) if made is None else made


def arena_bytes() -> tuple[int, int]:
    """Return (bytes of live tensors, bytes mapped) of the activation arena."""
    return _C.arena_bytes() if _C else (0, 0)


def alloc(nbytes: int, *, resident: bool = False) -> Tensor:
    """Return zeroed uint8 [nbytes], 64-byte aligned, in a mapping of its own (huge pages), or a part of the memory of
    `allocating_from`.

    A mapping is unmapped when its last view is freed. resident=False: its pages become resident when they are first
    written. resident=True: all threads touch the memory now, each its share, which matters on virtual machines where
    the first touch of memory is slow.
    """
    rest = _given.rest
    if rest is not None:
        if nbytes > len(rest):
            raise KernelError(f"alloc: expected at most {len(rest)} bytes, the rest of the memory, found {nbytes}")
        _given.rest = rest[taken_bytes(nbytes) :]
        return rest[:nbytes]
    if not _C or not nbytes:  # no memory of 0 bytes is mapped
        return torch.zeros(nbytes, dtype=torch.uint8)
    data: Tensor = _C.alloc(nbytes)
    if resident and isa() != "reference":
        _C.touch(data, _PAGE)
    return data


def taken_bytes(nbytes: int) -> int:
    """Return the bytes of given memory that `alloc` takes."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


@contextmanager
def allocating_from(memory: Tensor) -> Iterator[None]:
    """Within this context, `alloc` returns parts of memory[bytes] uint8, one after another, and touches none of them.

    memory: begins with a page.
    """
    _given.rest = memory
    try:
        yield
        rest = _given.rest
        if rest is not None and len(rest):
            raise KernelError(f"allocating_from: expected all memory to be taken, found {len(rest)} bytes left")
    finally:
        _given.rest = None


def new_file_memory(file: int, nbytes: int) -> Tensor | None:
    """Map a memory file (memfd_create) of `nbytes` zeros, a multiple of HUGE_PAGE. All threads touch it, each its part.

    Returns uint8 [nbytes], or None without huge pages for such files, which small pages would make slower to read than
    other memory, and where kernels run in plain torch.
    """
    if isa() == "reference":
        return None
    data: Tensor = _C.map_file(file, nbytes, True)
    _C.touch(data, HUGE_PAGE)  # one small page on the node of its thread, where the huge page will be
    if _C.join_pages(data) == errno.EINVAL:
        return None
    _C.touch(data, _PAGE)
    return data


def old_file_memory(file: int, nbytes: int) -> Tensor:
    """Map the first `nbytes` of a memory file that another process has filled, to be read only."""
    data: Tensor = _C.map_file(file, nbytes, False)
    return data


def protect(memory: Tensor) -> None:
    """Make the whole memory of a file read-only: a stray write then ends this process and does not outlive it."""
    _C.protect(memory)


def drop_pages(tensor: Tensor) -> None:
    """Release the resident memory of a tensor that views a file mapping; it is read from the file again when used.

    Only whole memory pages are released. Raises KernelError if the tensor is not in a file mapping.
    """
    if _C:
        _C.drop_pages(tensor)
