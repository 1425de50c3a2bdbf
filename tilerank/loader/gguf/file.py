"""A model in GGUF: one file, or the parts of a split one. No torch."""

import re
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ..errors import CheckpointError, show
from ..fields import Fields
from .block_types import BlockType
from .header import ArrayValue, Header, Scalar, TensorDescription

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_MAX_PARTS = 4096
_KINDS = {"model": "a model", "mmproj": "an mmproj file"}
"""The files that are read, by general.type, as errors name them."""


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor and the file that holds it."""

    header: Header
    description: TensorDescription

    @property
    def file(self) -> Path:
        return self.header.path

    @property
    def name(self) -> str:
        return self.description.name

    @property
    def type(self) -> BlockType:
        return self.description.type

    @property
    def shape(self) -> tuple[int, ...]:
        return self.description.shape


class GGUFFile:
    """The metadata and the tensors of a model, or of an mmproj file.

    path: the first part of a split file. tensors: by name, in storage order. mmproj: the file by which the model takes
    pictures, if it has one.
    """

    def __init__(self, path: Path, kind: str) -> None:
        """kind: a key of _KINDS."""
        self.path, *others = _parts(path)
        self.mmproj: GGUFFile | None = None
        self._first = Header(self.path)
        headers = [self._first, *map(Header, others)]
        _check_parts(headers)
        self.tensors: dict[str, GGUFTensor] = {}
        for header in headers:
            for description in header.tensors:
                if description.name in self.tensors:
                    other = self.tensors[description.name].file
                    raise CheckpointError(f"{header.path}: tensor {show(description.name)} is in {other} as well")
                self.tensors[description.name] = GGUFTensor(header, description)
        self.metadata: Mapping[str, Scalar | ArrayValue] = self._first.metadata
        # Older mmproj files have an architecture of their own, and no key for their type.
        usual = "mmproj" if self.metadata.get("general.architecture") == "clip" else "model"
        if (found := self.metadata.get("general.type", usual)) != kind:
            raise CheckpointError(f"{self.path}: general.type: expected {_KINDS[kind]}, found {show(found)}")

    @property
    def architecture(self) -> str:
        return self.fields("general.").text("architecture")

    def fields(self, prefix: str) -> Fields:
        """Return the scalars whose keys begin with `prefix`, by the rest of their keys."""
        found = {
            key.removeprefix(prefix): value
            for key, value in self.metadata.items()
            if key.startswith(prefix) and not isinstance(value, ArrayValue)
        }
        return Fields(self.path, found, prefix)

    def has_items(self, key: str) -> bool:
        """Return whether the metadata have an array of this key."""
        return isinstance(self.metadata.get(key), ArrayValue)

    def items(self, key: str) -> list[Scalar]:
        """Return the items of an array. Raises CheckpointError if there is none of this key."""
        return self._first.items(key)

    def texts(self, key: str) -> list[str]:
        """Return the items of an array of strings. Raises CheckpointError for any other."""
        items = self.items(key)
        texts = [item for item in items if isinstance(item, str)]
        if len(texts) < len(items):
            raise CheckpointError(f"{self.path}: {key}: expected strings, found numbers")
        return texts

    def numbers(self, key: str) -> list[int | float]:
        """Return the items of an array of numbers. Raises CheckpointError for any other."""
        items = self.items(key)
        numbers = [item for item in items if not isinstance(item, str)]
        if len(numbers) < len(items):
            raise CheckpointError(f"{self.path}: {key}: expected numbers, found strings")
        return numbers


_MMPROJ_FILES: dict[Path, Path | None] = {}
"""By the path of a model: the mmproj file by which this process gives it pictures."""


def use_mmproj(model: Path, mmproj: Path | None) -> None:
    """Make `open_gguf` return a model together with an mmproj file, or without, from now on in this process."""
    _MMPROJ_FILES[model] = mmproj


def has_mmproj(model: Path) -> bool:
    return _MMPROJ_FILES.get(model) is not None


def open_gguf(path: Path) -> GGUFFile:
    """Return the model in a file or in the parts of a split file, of which `path` is any, with its mmproj file.

    Raises CheckpointError for a file that is no GGUF, damaged, or of types that are not read.
    """
    gguf, mmproj = _opened(path, "model", _version(path)), _MMPROJ_FILES.get(path)
    return gguf if mmproj is None else _with_mmproj(gguf, open_mmproj(mmproj))


def open_mmproj(path: Path) -> GGUFFile:
    """Return an mmproj file. Raises CheckpointError, also for a file that is none."""
    return _opened(path, "mmproj", _version(path))


def _version(path: Path) -> tuple[int, int]:
    """Return what differs once a file has changed."""
    try:
        stat = path.stat()
    except OSError as failure:
        raise CheckpointError(f"{path}: cannot be read: {failure.strerror}") from failure
    return stat.st_mtime_ns, stat.st_size


@lru_cache(maxsize=4)
def _opened(path: Path, kind: str, _: tuple[int, int]) -> GGUFFile:
    return GGUFFile(path, kind)


@lru_cache(maxsize=2)
def _with_mmproj(gguf: GGUFFile, mmproj: GGUFFile) -> GGUFFile:
    found = copy(gguf)
    found.mmproj = mmproj
    return found


def _parts(path: Path) -> list[Path]:
    """Return all parts of a split file, by the name of one of them; the path alone for any other name."""
    found = _PART.fullmatch(path.name)
    count = int(found[3]) if found else 1
    if found is None or count > _MAX_PARTS:
        return [path]
    return [path.with_name(f"{found[1]}-{number:05}-of-{found[3]}.gguf") for number in range(1, count + 1)]


def _check_parts(headers: list[Header]) -> None:
    """Raise CheckpointError unless every part has its number and all parts together have all tensors."""
    first = headers[0]
    for number, header in enumerate(headers):
        for key, expected in (("split.no", number), ("split.count", len(headers))):
            found = header.metadata.get(key, expected if len(headers) == 1 else None)
            if found != expected and not (len(headers) == 1 and found == 0):
                raise CheckpointError(f"{header.path}: {key}: expected {expected}, found {show(found)}")
    total = sum(len(header.tensors) for header in headers)
    if len(headers) > 1 and first.metadata.get("split.tensors.count") != total:
        found = first.metadata.get("split.tensors.count")
        raise CheckpointError(f"{first.path}: split.tensors.count: expected {total}, found {show(found)}")
