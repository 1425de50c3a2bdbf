"""Reads the header of one GGUF file: metadata and descriptions of tensors. No torch.

The file is untrusted. Every count and length is checked against the bytes that remain before anything is allocated, so
that time and memory are bounded by the size of the header, which is bounded itself. Strings of arrays are skipped here
and decoded when they are asked for.
"""

import mmap
import struct
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from ..errors import CheckpointError, show
from ..lfs_pointer import refuse_pointer
from .block_types import BLOCK_TYPES, UNREAD_TYPES, BlockType

MAGIC = b"GGUF"
MAX_HEADER = 1 << 28
"""Bytes. The largest header in public use, of a vocabulary of 262,144 tokens, has 15 MB."""
_MAX_COUNT = 1 << 20
_MAX_TENSOR_NAME = 63
_MAX_DIMS = 4
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

Scalar = bool | int | float | str


@dataclass(frozen=True)
class ArrayValue:
    """An array of the metadata, which is decoded by `Header.items`: the type and number of its items, and where the
    first of them is in the file."""

    type: int
    count: int
    begin: int


@dataclass(frozen=True)
class TensorDescription:
    """A tensor of a file: shape in the order of numpy, and the bytes of the file that hold its blocks, row by row."""

    name: str
    type: BlockType
    shape: tuple[int, ...]
    begin: int
    nbytes: int


class Header:
    """The header of a file. The constructor raises CheckpointError unless the file is whole and consistent.

    metadata: by key, each a scalar or an ArrayValue. tensors: in the order of the file, without gaps between them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            refuse_pointer(path, CheckpointError)
            with path.open("rb") as file:
                self._size = file.seek(0, 2)
                if self._size < 24:
                    raise self._fail(f"a GGUF file, found {self._size} bytes")
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as failure:
            raise CheckpointError(f"{path}: cannot be read: {failure.strerror}") from failure
        self._limit = min(self._size, MAX_HEADER)
        tensors, keys = self._read_counts()
        self._at = 24
        self.metadata: Mapping[str, Scalar | ArrayValue] = self._read_metadata(keys)
        self.tensors: list[TensorDescription] = self._read_tensors(tensors)

    def items(self, key: str) -> list[Scalar]:
        """Return the items of an array of the metadata."""
        value = self.metadata.get(key)
        if not isinstance(value, ArrayValue):
            raise self._fail(f"an array, found {'no such key' if value is None else show(value)}", key)
        if value.type != _STRING:
            numbers = array(_SCALARS[value.type].replace("?", "B"))
            numbers.frombytes(self._bytes[value.begin : value.begin + value.count * numbers.itemsize])
            return [bool(item) for item in numbers] if value.type == 7 else list(numbers)
        self._at = value.begin
        return self._strings(key, value.count)

    def data(self, tensor: TensorDescription) -> bytes:
        """Return the bytes of a small tensor."""
        return self._bytes[tensor.begin : tensor.begin + tensor.nbytes]

    def _fail(self, expected: str, what: str = "") -> CheckpointError:
        """Return an error. what: the part of the file, whose name may have any characters."""
        where = f"{show(what)[1:-1]}: " if what else ""
        return CheckpointError(f"{self.path}: {where}expected {expected}")

    def _read_counts(self) -> tuple[int, int]:
        magic, version, tensors, keys = struct.unpack_from("<4sIQQ", self._bytes)
        if magic != MAGIC:
            raise self._fail(f"a GGUF file, found one that begins with {show(magic)}")
        if version in (2 << 24, 3 << 24):
            raise self._fail("a little-endian file, found a big-endian one")
        if version not in (2, 3):
            raise self._fail(f"version 2 or 3 of GGUF, found {version}")
        for count, what in ((tensors, "tensors"), (keys, "metadata keys")):
            if count > _MAX_COUNT:
                raise self._fail(f"at most {_MAX_COUNT} {what}, found {count}")
        return tensors, keys

    def _take(self, format: str, what: str) -> tuple[int, ...]:
        """Return the numbers at the current place and go on behind them."""
        end = self._at + struct.calcsize(format)
        if end > self._limit:
            raise self._short(end, what)
        found = struct.unpack_from(format, self._bytes, self._at)
        self._at = end
        return found

    def _short(self, end: int, what: str) -> CheckpointError:
        if end > self._size:
            return self._fail(f"{end} bytes or more, found {self._size} (truncated)", what)
        return self._fail(f"a header of at most {MAX_HEADER} bytes", what)

    def _string(self, what: str) -> str:
        (length,) = self._take("<Q", what)
        begin, end = self._at, self._at + length
        if end > self._limit:
            raise self._short(end, what)
        self._at = end
        try:
            return self._bytes[begin:end].decode()
        except UnicodeDecodeError:
            raise self._fail(f"UTF-8, found {show(self._bytes[begin : min(end, begin + 40)])}", what) from None

    def _strings(self, what: str, count: int) -> list[Scalar]:
        """Return strings of an array, whose lengths have been checked. Vocabularies have hundreds of thousands."""
        read, data, at = struct.Struct("<Q").unpack_from, self._bytes, self._at
        found: list[Scalar] = []
        for _ in range(count):
            begin = at + 8
            end = begin + read(data, at)[0]
            try:
                found.append(data[begin:end].decode())
            except UnicodeDecodeError:
                raise self._fail(f"UTF-8, found {show(data[begin : min(end, begin + 40)])}", what) from None
            at = end
        return found

    def _read_metadata(self, count: int) -> dict[str, Scalar | ArrayValue]:
        found: dict[str, Scalar | ArrayValue] = {}
        for _ in range(count):
            key = self._string("the metadata")
            if not key or key in found:
                raise self._fail(f"keys that differ and are not empty, found {show(key)} a second time or empty")
            (kind,) = self._take("<I", key)
            if kind == _STRING:
                found[key] = self._string(key)
            elif kind == _ARRAY:
                found[key] = self._skip_array(key)
            elif kind in _SCALARS:
                found[key] = self._take("<" + _SCALARS[kind], key)[0]
            else:
                raise self._fail(f"one of the 13 types of GGUF, found {kind}", key)
        return found

    def _skip_array(self, key: str) -> ArrayValue:
        kind, count = self._take("<IQ", key)
        value = ArrayValue(kind, count, self._at)
        if kind == _STRING:
            least, step = 8, 0
        elif kind in _SCALARS:
            least = step = struct.calcsize("<" + _SCALARS[kind])
        else:
            found = "arrays in an array" if kind == _ARRAY else f"type {kind}"
            raise self._fail(f"an array of numbers or strings, found {found}", key)
        if self._at + count * least > self._limit:
            raise self._short(self._at + count * least, key)
        self._at += count * step
        if kind == _STRING:
            read, at, limit = struct.Struct("<Q").unpack_from, self._at, self._limit - 8
            for _ in range(count):
                if at > limit:
                    raise self._short(at + 8, key)
                at += 8 + read(self._bytes, at)[0]
            if at > self._limit:
                raise self._short(at, key)
            self._at = at
        return value

    def _read_tensors(self, count: int) -> list[TensorDescription]:
        described = [self._describe() for _ in range(count)]
        if len({name for name, _, _, _ in described}) < count:
            raise self._fail("tensors with names that differ, found one twice")
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise self._fail(f"a power of two from 8 to {1 << 20}, found {show(alignment)}", "general.alignment")
        data = -(-self._at // alignment) * alignment
        tensors, end = [], 0
        for name, kind, shape, offset in described:
            if offset != end:
                raise self._fail(
                    f"its data at offset {end}, behind that of the tensor before it, found {offset}", f"tensor {name}"
                )
            nbytes = prod(shape) // kind.block * kind.nbytes
            if data + offset + nbytes > self._size:
                raise self._fail(
                    f"{data + offset + nbytes} bytes or more, found {self._size} (truncated)", f"tensor {name}"
                )
            tensors.append(TensorDescription(name, kind, shape, data + offset, nbytes))
            end += -(-nbytes // alignment) * alignment
        return tensors

    def _describe(self) -> tuple[str, BlockType, tuple[int, ...], int]:
        """Return the name, type, shape and offset of the next tensor."""
        name = self._string("the tensors")
        if not name or len(name.encode()) > _MAX_TENSOR_NAME:
            raise self._fail(f"tensors with names of 1 to {_MAX_TENSOR_NAME} bytes, found {show(name)}")
        what = f"tensor {name}"
        (dims,) = self._take("<I", what)
        if not 1 <= dims <= _MAX_DIMS:
            raise self._fail(f"1 to {_MAX_DIMS} dimensions, found {dims}", what)
        shape = self._take(f"<{dims}Q", what)[::-1]  # innermost first in the file
        number, offset = self._take("<IQ", what)
        kind = BLOCK_TYPES.get(number)
        if kind is None:
            known = ", ".join(known.name for known in BLOCK_TYPES.values())
            raise self._fail(f"one of {known}, found {UNREAD_TYPES.get(number, f'type {number}')}", what)
        if 0 in shape or prod(shape) > self._size * kind.block:
            raise self._fail(f"a shape that fits into the file of {self._size} bytes, found {list(shape)}", what)
        if shape[-1] % kind.block:
            raise self._fail(f"rows of whole blocks of {kind.block} values in {kind.name}, found {list(shape)}", what)
        return name, kind, shape, offset
