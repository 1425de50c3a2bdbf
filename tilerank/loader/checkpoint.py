"""The tensors of a model directory's safetensors files, or of a GGUF file: headers are checked before data is read."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from .errors import CheckpointError, show
from .files import model_file
from .gguf.file import open_gguf
from .gguf.names import NamedTensor, named_tensors
from .gguf.parts import map_bytes, read_part
from .headers import INDEX as INDEX
from .headers import MAX_HEADER, listed_tensors
from .headers import SINGLE as SINGLE


@dataclass(frozen=True)
class TensorInfo:
    """The file, dtype and shape of a stored tensor; `dtype` is the code of the safetensors format, such as BF16, or the
    type of a GGUF file's blocks, such as Q4_K."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


class Checkpoint:
    """model.safetensors, the files that model.safetensors.index.json lists, or a GGUF file, each mapped once and read
    by slice.

    Tensors of a GGUF file have their names on the hub. The constructor raises CheckpointError unless every header
    describes its file to the last byte (the safetensors library checks this), the index and the files agree on every
    tensor, and all files lie inside the directory.
    """

    def __init__(self, model_dir: Path, folder: str = "") -> None:
        """folder: of the model directory, which has the files."""
        self.model_dir = model_dir
        self.tensors: dict[str, TensorInfo] = {}
        """By name, in storage order: file by file, by offset."""
        self._files: dict[Path, Any] = {}
        self.gguf: Mapping[str, NamedTensor] = {}
        """The tensors of a GGUF file, by name."""
        if model_dir.is_file():
            self._open_gguf()
            return
        listed = listed_tensors(model_dir / folder)
        for name in sorted(listed):
            self._open(model_file(model_dir, name, CheckpointError, folder), listed[name])

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """Return the rectangle `index` of a tensor as a view of the mapped file, which is read when the view is used.

        index: one slice of step 1 for each dimension, within the shape; columns of a tensor in blocks begin and end
        with one, and their bytes are returned, [..., blocks, bytes of a block] uint8. The view's pages may be dropped
        (kernels.core.drop_pages); the view must not be written to. Raises CheckpointError for any other index.
        """
        info = self.info(name)
        spans = zip(index, info.shape, strict=False)
        if len(index) != len(info.shape) or any(
            s.step not in (None, 1) or not 0 <= (s.start or 0) <= (size if s.stop is None else s.stop) <= size
            for s, size in spans
        ):
            raise CheckpointError(f"{info.file}: tensor {name} of shape {list(info.shape)} has no rectangle {index}")
        handle = self._files[info.file]
        if name in self.gguf:
            return read_part(self.gguf[name], handle, index)
        # A tensor without dimensions has nothing to slice.
        view: torch.Tensor = handle.get_slice(name)[index] if index else handle.get_tensor(name)
        return view

    def info(self, name: str) -> TensorInfo:
        """Return the file, dtype and shape of a tensor; raise CheckpointError if the checkpoint does not have it."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.model_dir}: tensor {name} is in none of the checkpoint's files")
        return self.tensors[name]

    def _open_gguf(self) -> None:
        self.gguf = named_tensors(open_gguf(self.model_dir))
        for name, one in self.gguf.items():
            self.tensors[name] = TensorInfo(one.stored.file, one.stored.type.name, one.shape)
            if one.stored.file not in self._files:
                self._files[one.stored.file] = map_bytes(one.stored.file)

    def _open(self, path: Path, listed: set[str] | None) -> None:
        handle = map_file(path)
        names = list(handle.offset_keys())
        if listed is not None:
            _agree(path, listed, set(names))
        for name in names:
            part = handle.get_slice(name)
            self.tensors[name] = TensorInfo(path, part.get_dtype(), tuple(part.get_shape()))
        self._files[path] = handle


def file_states(checkpoint: Checkpoint, calibration: Path | None) -> list[tuple[str, int, int, int]]:
    """Return what changes when a file that the weights depend on is replaced or written to: its name, size and times.

    The time of its last change cannot be set. Reading the files instead would take as long as loading.
    """
    files = {tensor.file for tensor in checkpoint.tensors.values()}
    if checkpoint.model_dir.is_dir():
        files |= {path for path in checkpoint.model_dir.glob("*.json") if path.is_file()}
    if calibration is not None:
        files.add(calibration)
    states = ((file.name, file.stat()) for file in files)
    return sorted((name, state.st_size, state.st_mtime_ns, state.st_ctime_ns) for name, state in states)


def _agree(path: Path, listed: set[str], held: set[str]) -> None:
    for names, problem in (
        (listed - held, f"{INDEX} puts it in this file, which does not hold it"),
        (held - listed, f"this file holds it, but {INDEX} does not list it here"),
    ):
        if names:
            raise CheckpointError(f"{path}: tensor {some(names)}: {problem}")


def some(names: set[str]) -> str:
    """Return the first of some names, and how many more there are."""
    first = show(min(names))[1:-1]
    return first if len(names) == 1 else f"{first} (and {len(names) - 1} more)"


def map_file(path: Path) -> Any:
    """Map a safetensors file; the library checks the header against the file's size."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
        if size < 8 or 8 + length > size:
            header = f"a header of {length} bytes in a file of {size}" if size >= 8 else f"{size} bytes"
            raise CheckpointError(
                f"{path}: expected a safetensors file, found {header} (truncated, or of another format)"
            )
        return safe_open(path, framework="pt")
    except OSError as failure:
        raise CheckpointError(f"{path}: cannot be read: {failure.strerror}") from failure
    except RuntimeError as failure:  # torch cannot map it: it has more bytes than the address space
        raise CheckpointError(f"{path}: a file of {size} bytes cannot be mapped: {failure}") from failure
    except SafetensorError as failure:
        raise CheckpointError(
            f"{path}: not a valid safetensors file: {_damage(path, size, length)}{failure}"
        ) from failure


def _damage(path: Path, size: int, length: int) -> str:
    """Return what the library's message lacks: the sizes, if the header is valid but the data is incomplete."""
    if length > MAX_HEADER:
        return f"expected a header of at most {MAX_HEADER} bytes, found {length}: "
    with path.open("rb") as file:
        file.seek(8)
        text = file.read(length)
    try:
        end = (
            8
            + length
            + max(entry["data_offsets"][1] for name, entry in json.loads(text).items() if name != "__metadata__")
        )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return ""
    return f"expected {end} bytes, found {size}: " if end != size else ""
