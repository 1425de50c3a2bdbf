"""The memory of a rank's packed weights, and the files that keep them for the next process.

All weights of a model lie in one piece of memory, in the order of its layers. A memory file, which a supervisor holds,
is that memory itself; a cache file has a copy. Both end with a mark that is written last and names what was packed.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from tilerank.kernels import core
from tilerank.parallel.parameters import Layer, Parameter, WeightParameter

from .calibration import Calibration
from .checkpoint import Checkpoint, file_states

log = logging.getLogger(__name__)

_NO_CHECKSUM = "0" * 64
_MARK = re.compile(rb"tilerank weights ([0-9a-f]{64}) ([0-9a-f]{64})\n")
_MARK_BYTES = 147
_CHUNK = 16 << 20
"""Bytes of a cache file that are read or written at a time."""
_PACKING_ROOMS = ("kernels", "parallel", "loader", "runtime/models")
"""The code that decides how weights are packed and in which order they lie."""


@dataclass(frozen=True)
class WeightFiles:
    """Where packed weights outlive this process.

    memory: the descriptor of a memory file that another process holds. cache: a directory.
    """

    memory: int | None = None
    cache: Path | None = None


NO_FILES = WeightFiles()


class PackedWeights:
    """The memory of all weights of `model`, from the files of an earlier process or new.

    digest: returns that of all that decides what the memory contains (`digest_of`); called if there are files.
    verbose: log what is found.
    """

    def __init__(self, model: Layer, files: WeightFiles, digest: Callable[[], str], *, verbose: bool) -> None:
        self._model, self._files, self._verbose = model, files, verbose
        self._digest = "" if files == NO_FILES else digest()
        self._used = sum(core.taken_bytes(each.nbytes()) for each in model.walk() if isinstance(each, Parameter))
        self._nbytes = max(-(-self._used // core.HUGE_PAGE), 1) * core.HUGE_PAGE
        self._path = None if files.cache is None else files.cache / f"{self._digest}.weights"
        self._shared = False
        """Whether the memory is that of the memory file."""
        self._memory: Tensor

    def restore(self) -> bool:
        """Allocate the model with the weights of a file. Returns False, and allocates nothing, if none has them."""
        if self._is_held():
            assert self._files.memory is not None
            self._allocate(core.old_file_memory(self._files.memory, self._nbytes))
            if self._verbose:
                log.info("%.3f GB of packed weights were still in memory", self._used / 1e9)
            return True
        return self._path is not None and self._read_cache(self._path)

    def allocate(self) -> None:
        """Allocate the model with zeros."""
        self._allocate(self._new_memory())

    def keep(self) -> None:
        """Keep the weights in the files, now that the model is complete."""
        self._mark_memory()
        if self._path is not None:
            self._write_cache(self._path)

    def _allocate(self, memory: Tensor) -> None:
        self._memory = memory
        with core.allocating_from(memory[: self._used]):
            self._model.allocate()

    def _new_memory(self) -> Tensor:
        file = self._files.memory
        if file is not None:
            os.ftruncate(file, 0)  # what an earlier process left would not be zeros
            os.ftruncate(file, self._nbytes)
            memory = core.new_file_memory(file, self._nbytes)
            if memory is not None:
                self._shared = True
                return memory
            os.ftruncate(file, 0)
            if self._verbose:
                log.info("weights are loaded again when ranks are started again: memory files have no huge pages here")
        return core.alloc(self._used, resident=True)

    def _is_held(self) -> bool:
        """Return whether the memory file has these weights."""
        file = self._files.memory
        if file is None or os.fstat(file).st_size != self._nbytes + _MARK_BYTES:
            return False
        return os.pread(file, _MARK_BYTES, self._nbytes) == self._mark(_NO_CHECKSUM)

    def _mark_memory(self) -> None:
        if self._shared:
            assert self._files.memory is not None
            core.protect(self._memory)
            os.pwrite(self._files.memory, self._mark(_NO_CHECKSUM), self._nbytes)

    def _mark(self, checksum: str) -> bytes:
        return f"tilerank weights {self._digest} {checksum}\n".encode()

    def _read_cache(self, path: Path) -> bool:
        """Allocate the model with the weights of a cache file; False if there is none, or a damaged one."""
        began = time.monotonic()
        try:
            with path.open("rb", buffering=0) as file:
                damage = self._copy(file.fileno())
        except FileNotFoundError:
            return False
        except OSError as failure:
            damage = f"cannot be read: {failure.strerror}"
        if damage is not None:
            log.warning("%s: %s; the weights are packed anew", path, damage)
            return False
        if self._verbose:
            seconds = time.monotonic() - began
            log.info("%s: %.3f GB of packed weights, read in %.1f s", path, self._used / 1e9, seconds)
        self._mark_memory()
        return True

    def _copy(self, file: int) -> str | None:
        """Allocate the model with the weights of a cache file; return what is wrong with it, if anything is."""
        size = os.fstat(file).st_size
        if size != self._used + _MARK_BYTES:
            return f"expected {self._used + _MARK_BYTES} bytes, found {size}"
        mark = _MARK.fullmatch(os.pread(file, _MARK_BYTES, self._used))
        if mark is None or mark[1].decode() != self._digest:
            return "expected the mark of complete weights at its end, found another"
        memory, checksum = self._new_memory(), hashlib.sha256()
        for chunk in _chunks(memory[: self._used]):
            _read(file, chunk)
            checksum.update(chunk)
        if checksum.hexdigest().encode() != mark[2]:
            return f"expected weights with the checksum {mark[2].decode()}, found {checksum.hexdigest()}"
        self._allocate(memory)
        return None

    def _write_cache(self, path: Path) -> None:
        """Write the cache file under another name first, so that an incomplete one is never taken for it."""
        partial = path.with_suffix(".partial")
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(os.open(partial, os.O_RDWR | os.O_CREAT, 0o600), "wb", buffering=0) as file:
                if not _lock(file.fileno(), partial):
                    return  # another rank, of a replica, writes the same
                file.truncate(0)
                checksum = hashlib.sha256()
                for chunk in _chunks(self._memory[: self._used]):
                    checksum.update(chunk)
                    _write(file.fileno(), chunk)
                _write(file.fileno(), memoryview(self._mark(checksum.hexdigest())))
                os.fsync(file.fileno())
                partial.replace(path)
        except OSError as failure:
            with suppress(OSError):
                partial.unlink()
            log.warning("%s: cannot be written: %s; the next start packs the weights again", path, failure.strerror)
            return
        if self._verbose:
            log.info("%s: %.3f GB of packed weights for the next start", path, self._used / 1e9)


def digest_of(model: Layer, checkpoint: Checkpoint, calibration: Calibration | None) -> str:
    """Return a digest of all that decides what this rank's memory of weights contains: the files that are read, the
    rectangles of them and where they land, formats, the code that packs, and the rung."""
    files = file_states(checkpoint, None if calibration is None else calibration.path)
    digest = hashlib.sha256()
    for part in (_code_digest(), core.isa(), *files, *_layout(model)):
        digest.update(f"{part!r}\n".encode())
    return digest.hexdigest()


def _layout(model: Layer) -> Iterator[object]:
    """Yield what the memory of a model has, in its order."""
    for parameter in model.walk():
        if isinstance(parameter, Parameter):
            held = parameter.format if isinstance(parameter, WeightParameter) else parameter.nbytes()
            yield type(parameter).__qualname__, parameter.shape, held
            for part in parameter.samples():
                yield part.name, part.shape, part.index, part.row, part.optional


@cache
def _code_digest() -> str:
    digest, package = hashlib.sha256(), Path(__file__).parents[1]
    for file in sorted(path for room in _PACKING_ROOMS for path in (package / room).rglob("*.py")):
        digest.update(f"{file.relative_to(package)}\n".encode() + file.read_bytes())
    return f"{core.build_digest()} {digest.hexdigest()} {torch.__version__}"


def _chunks(memory: Tensor) -> Iterator[memoryview]:
    whole = memory.numpy().data
    for start in range(0, len(whole), _CHUNK):
        yield whole[start : start + _CHUNK]


def _read(file: int, into: memoryview) -> None:
    """Fill `into` from the file; what is behind its end stays as it is."""
    while into and (count := os.readv(file, [into])):
        into = into[count:]


def _write(file: int, data: memoryview) -> None:
    while data:
        data = data[os.write(file, data) :]


def _lock(file: int, path: Path) -> bool:
    """Lock a file that this process has opened as `path`; False if another process has it, or has moved it away."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return path.exists() and path.stat().st_ino == os.fstat(file).st_ino
