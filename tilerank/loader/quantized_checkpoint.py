"""Quantised checkpoints: where the codes, scales and zero points of a weight are stored, and how they are packed.

A model declares rectangles of X.weight. Here each becomes rectangles of the tensors that the checkpoint has in place of
X.weight (quantization_config.py). Codes are written unchanged. Only weights that the model holds as floats, and GPTQ
weights whose groups are permuted (desc_act), are dequantised.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from tilerank.kernels.weight_formats.byte_codes import BlockFormat, ByteCodesWeight
from tilerank.kernels.weight_formats.int4 import Int4, Int4Weight
from tilerank.kernels.weight_formats.int8 import Int8Weight
from tilerank.parallel.parameters import Rectangle, WeightParameter

from .checkpoint import Checkpoint
from .errors import CheckpointError
from .quantization_config import Layout, QuantizationConfig
from .rectangle import EXPONENTS, FLOATS, Read, StoredRectangle, place_of, read_floats, scales_of

_NIBBLES = 8  # codes in an int32


def encoding_of(config: QuantizationConfig, checkpoint: Checkpoint) -> WeightEncoding:
    """Return what reads a checkpoint of this layout."""
    kinds: dict[Layout, type[WeightEncoding]] = {
        "awq": AWQ,
        "gptq": GPTQ,
        "fp8": Fp8Blocks,
        "int8": Int8Channels,
        "block_int8": Int8Blocks,
    }
    return kinds[config.layout](config, checkpoint)


class WeightEncoding(ABC):
    """How a checkpoint stores its quantised weights."""

    def __init__(self, config: QuantizationConfig, checkpoint: Checkpoint) -> None:
        self.config = config
        self._checkpoint = checkpoint

    def reads(self, rectangle: Rectangle) -> Iterator[Read]:
        """Yield what to read for a rectangle; stored rectangles are empty where it is."""
        parameter = rectangle.parameter
        if isinstance(parameter, WeightParameter) and parameter.is_quantised:
            yield from self.encoded(rectangle, parameter)
        else:
            yield self.floats(rectangle)

    @abstractmethod
    def encoded(self, rectangle: Rectangle, parameter: WeightParameter) -> Iterator[Read]:
        """Yield what to read for a rectangle of a weight that is held in the checkpoint's format."""

    def floats(self, rectangle: Rectangle) -> Read:
        """Return what to read for a rectangle that is held as floats."""
        return read_floats(rectangle, place_of(rectangle, self._checkpoint))

    def leaves_out(self, name: str) -> bool:
        """Return whether a tensor that the model does not use has no effect."""
        return False

    def refusal(self, name: str, expected: str) -> CheckpointError:
        return CheckpointError(f"{self._checkpoint.info(name).file}: tensor {name}: expected {expected}")


class ByteEncoding(WeightEncoding):
    """weight [n, k], codes of a byte, and a tensor of their scales.

    A weight that the model holds as floats, such as a router, is dequantised.
    """

    dtype: str
    """The dtype of the codes, as safetensors names it."""

    def floats(self, rectangle: Rectangle) -> Read:
        tensors = self._checkpoint.tensors
        if rectangle.name not in tensors or tensors[rectangle.name].dtype != self.dtype:
            return super().floats(rectangle)
        stored = (self.codes(rectangle), self.scales(rectangle))
        return Read(stored, rectangle.parameter, rectangle.row, partial(self._dequantised, rectangle))

    def codes(self, rectangle: Rectangle) -> StoredRectangle:
        return StoredRectangle(rectangle.name, rectangle.shape, (self.dtype,), rectangle.index)

    @abstractmethod
    def scales(self, rectangle: Rectangle) -> StoredRectangle:
        """Return the scales of the rectangle's codes."""

    @abstractmethod
    def spread(self, rectangle: Rectangle, scales: Tensor, rows: int, columns: int) -> Tensor:
        """Return a scale for each block of `rows` x `columns` elements of the rectangle, or one that broadcasts."""

    def _dequantised(self, rectangle: Rectangle, codes: Tensor, scales: Tensor) -> Tensor:
        return codes.float() * self.spread(rectangle, scales, 1, 1)


class Int8Channels(ByteEncoding):
    """weight [n, k] int8 and weight_scale [n, 1]."""

    dtype = "I8"

    def encoded(self, rectangle: Rectangle, parameter: WeightParameter) -> Iterator[Read]:
        if parameter.transposed:  # the scales belong to inputs, and the model reads them for itself
            codes = (self.codes(rectangle),)
            yield Read(codes, parameter, rectangle.row, _transposed, ByteCodesWeight.write_codes, parameter.k)
            return
        stored = (self.codes(rectangle), self.scales(rectangle))
        yield Read(stored, parameter, rectangle.row, part=_write_int8, columns=parameter.k)

    def scales(self, rectangle: Rectangle) -> StoredRectangle:
        index = _unless_empty(rectangle, rectangle.index[0], slice(0, 1))
        return StoredRectangle(f"{rectangle.name}_scale", (rectangle.shape[0], 1), FLOATS, index)

    def spread(self, rectangle: Rectangle, scales: Tensor, rows: int, columns: int) -> Tensor:
        return scales.float()


def _write_int8(weight: Int8Weight, codes: Tensor, scales: Tensor, row: int) -> None:
    weight.write_codes(codes, scales.float().flatten(), row)


class BlockEncoding(ByteEncoding):
    """weight [n, k] and weight_scale_inv, one number for each block; blocks at the edges are smaller."""

    def encoded(self, rectangle: Rectangle, parameter: WeightParameter) -> Iterator[Read]:
        held, row = parameter.format, rectangle.row
        assert isinstance(held, BlockFormat)
        turn = _transposed if parameter.transposed else None
        yield Read((self.codes(rectangle),), parameter, row, turn, ByteCodesWeight.write_codes, parameter.k)
        rows, columns = (held.block_k, held.block_n) if parameter.transposed else (held.block_n, held.block_k)

        def spread(scales: Tensor) -> Tensor:
            found = self.spread(rectangle, scales, rows, columns)
            return _transposed(found) if parameter.transposed else found

        blocks = -(-parameter.k // held.block_k)
        yield Read((self.scales(rectangle),), parameter, row, spread, _write_scales, blocks)

    def scales(self, rectangle: Rectangle) -> StoredRectangle:
        (n, k), (rows, columns), (block_n, block_k) = rectangle.shape, rectangle.index, self.config.block
        index = _unless_empty(rectangle, _whole(rows, block_n), _whole(columns, block_k))
        shape = (-(-n // block_n), -(-k // block_k))
        return StoredRectangle(f"{rectangle.name}_scale_inv", shape, (*FLOATS, *EXPONENTS), index)

    def spread(self, rectangle: Rectangle, scales: Tensor, rows: int, columns: int) -> Tensor:
        (own_rows, own_columns), (block_n, block_k) = rectangle.index, self.config.block
        scales = _repeated(scales_of(scales).float(), 0, own_rows, block_n, rows)
        return _repeated(scales, 1, own_columns, block_k, columns).contiguous()


class Fp8Blocks(BlockEncoding):
    dtype = "F8_E4M3"


class Int8Blocks(BlockEncoding):
    dtype = "I8"


def _write_scales(weight: ByteCodesWeight, scales: Tensor, row: int) -> None:
    weight.write_scales(scales, row // weight.format.block_n)


class PackedInt4(WeightEncoding):
    """qweight, int32 of eight codes each; qzeros [groups, n / 8], packed along the outputs; scales [groups, n].

    The dequantised weight is weight[o, i] = (code[o, i] - zero[g, o]) * scale[g, o] with g = i // group.
    """

    order: tuple[int, ...]
    """For each nibble of an int32, from the lowest, which of the eight outputs (or inputs) it holds."""

    def encoded(self, rectangle: Rectangle, parameter: WeightParameter) -> Iterator[Read]:
        n, k = rectangle.shape
        if n % _NIBBLES or k % _NIBBLES:
            name = f"{_module(rectangle)}.qweight"
            raise self.refusal(name, f"sizes in multiples of {_NIBBLES}, found a weight [{n}, {k}]")
        held, row = parameter.format, rectangle.row
        assert isinstance(held, Int4)
        codes = partial(self.codes, rectangle)
        yield Read(self.stored_codes(rectangle), parameter, row, codes, Int4Weight.write_codes, parameter.k)
        groups = -(-parameter.k // held.group)
        scales = partial(self.scales, rectangle, held.group)
        zeros, stored_scales = self.stored_zeros(rectangle), self.stored_scales(rectangle)
        if held.zero_points:
            held_zeros = partial(self.held_zeros, rectangle, held.group)
            yield Read((zeros,), parameter, row, held_zeros, Int4Weight.write_zeros, groups)
        of_scales = (stored_scales,) if held.zero_points else (stored_scales, zeros)
        yield Read(of_scales, parameter, row, scales, Int4Weight.write_scales, groups)

    @abstractmethod
    def stored_codes(self, rectangle: Rectangle) -> tuple[StoredRectangle, ...]:
        """Return the tensors that `codes` takes."""

    @abstractmethod
    def codes(self, rectangle: Rectangle, packed: Tensor) -> Tensor:
        """Return codes [rows, columns] uint8 of the rectangle."""

    def stored_zeros(self, rectangle: Rectangle) -> StoredRectangle:
        (n, k), (rows, columns) = rectangle.shape, rectangle.index
        groups = _whole(columns, self.group(k))
        index = _unless_empty(rectangle, groups, _whole(rows, _NIBBLES))
        return StoredRectangle(f"{_module(rectangle)}.qzeros", (-(-k // self.group(k)), n // _NIBBLES), ("I32",), index)

    def stored_scales(self, rectangle: Rectangle) -> StoredRectangle:
        (n, k), (rows, columns) = rectangle.shape, rectangle.index
        index = _unless_empty(rectangle, _whole(columns, self.group(k)), rows)
        return StoredRectangle(f"{_module(rectangle)}.scales", (-(-k // self.group(k)), n), FLOATS, index)

    def group(self, k: int) -> int:
        """Return how many of `k` columns share a scale."""
        return self.config.group or k

    def held_zeros(self, rectangle: Rectangle, group: int, packed: Tensor) -> Tensor:
        """Return zero points [rows, groups of `group` columns]."""
        return self._regrouped(self.zeros(rectangle, packed), rectangle, group)

    def scales(self, rectangle: Rectangle, group: int, scales: Tensor, packed_zeros: Tensor | None = None) -> Tensor:
        """Return scales [rows, groups of `group` columns]; checks the zero points of a symmetric quantisation."""
        if packed_zeros is not None:
            self.zeros(rectangle, packed_zeros)
        return self._regrouped(scales.T, rectangle, group)

    def zeros(self, rectangle: Rectangle, packed: Tensor) -> Tensor:
        """Return the zero points [rows, stored groups] uint8 of the rectangle."""
        return _nibbles(packed, self.order)[_trim(rectangle.index[0])]

    def _regrouped(self, by_group: Tensor, rectangle: Rectangle, group: int) -> Tensor:
        return _repeated(by_group, 1, rectangle.index[1], self.group(rectangle.shape[1]), group).contiguous()


class AWQ(PackedInt4):
    """Activation-aware weight quantisation (arXiv 2306.00978) as AutoAWQ's "gemm" files: qweight [k, n / 8]."""

    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def stored_codes(self, rectangle: Rectangle) -> tuple[StoredRectangle, ...]:
        (n, k), (rows, columns) = rectangle.shape, rectangle.index
        index = _unless_empty(rectangle, columns, _whole(rows, _NIBBLES))
        return (StoredRectangle(f"{_module(rectangle)}.qweight", (k, n // _NIBBLES), ("I32",), index),)

    def codes(self, rectangle: Rectangle, packed: Tensor) -> Tensor:
        return _nibbles(packed, self.order)[_trim(rectangle.index[0])]


class GPTQ(PackedInt4):
    """GPTQ (arXiv 2210.17323) as AutoGPTQ and GPTQModel write it: qweight [k / 8, n], g_idx [k]: the group of a column.

    If config.json announces that groups are permuted (desc_act), weights are dequantised.
    """

    order = (0, 1, 2, 3, 4, 5, 6, 7)

    def stored_codes(self, rectangle: Rectangle) -> tuple[StoredRectangle, ...]:
        groups = self._stored_groups(rectangle)
        packed = self._stored_packed(rectangle)
        return (packed, groups) if groups.name in self._checkpoint.tensors else (packed,)

    def codes(self, rectangle: Rectangle, packed: Tensor, groups: Tensor | None = None) -> Tensor:
        columns = rectangle.index[1]
        if groups is not None:
            in_order = torch.arange(columns.start, columns.stop) // self.group(rectangle.shape[1])
            if not torch.equal(groups, in_order):
                raise self.refusal(
                    self._stored_groups(rectangle).name,
                    "columns in the order of their groups, found another order, without desc_act in config.json",
                )
        return self._unpacked(rectangle, packed).contiguous()

    def floats(self, rectangle: Rectangle) -> Read:
        module = _module(rectangle)
        if not self.config.act_order or f"{module}.qweight" not in self._checkpoint.tensors:
            return super().floats(rectangle)
        # Columns of a rank have parts of all groups.
        (n, k), (rows, _) = rectangle.shape, rectangle.index
        count = -(-k // self.group(k))
        every, eights = slice(0, count), _whole(rows, _NIBBLES)
        zeros = StoredRectangle(
            f"{module}.qzeros", (count, n // _NIBBLES), ("I32",), _unless_empty(rectangle, every, eights)
        )
        scales = StoredRectangle(f"{module}.scales", (count, n), FLOATS, _unless_empty(rectangle, every, rows))
        stored = (self._stored_packed(rectangle), zeros, scales, self._stored_groups(rectangle))
        return Read(stored, rectangle.parameter, rectangle.row, partial(self._dequantised, rectangle))

    def _dequantised(
        self, rectangle: Rectangle, packed: Tensor, packed_zeros: Tensor, scales: Tensor, groups: Tensor
    ) -> Tensor:
        count = len(scales)
        if not ((groups >= 0) & (groups < count)).all():
            name = self._stored_groups(rectangle).name
            raise self.refusal(name, f"groups from 0 to {count - 1}, found others")
        codes = self._unpacked(rectangle, packed).float()
        zeros = self.zeros(rectangle, packed_zeros).float()
        return (codes - zeros[:, groups]) * scales.T.float()[:, groups]

    def _stored_packed(self, rectangle: Rectangle) -> StoredRectangle:
        (n, k), (rows, columns) = rectangle.shape, rectangle.index
        index = _unless_empty(rectangle, _whole(columns, _NIBBLES), rows)
        return StoredRectangle(f"{_module(rectangle)}.qweight", (k // _NIBBLES, n), ("I32",), index)

    def _stored_groups(self, rectangle: Rectangle) -> StoredRectangle:
        index = _unless_empty(rectangle, rectangle.index[1])
        return StoredRectangle(f"{_module(rectangle)}.g_idx", rectangle.shape[1:], ("I32",), index)

    def _unpacked(self, rectangle: Rectangle, packed: Tensor) -> Tensor:
        return _nibbles(packed.T, self.order).T[:, _trim(rectangle.index[1])]

    def zeros(self, rectangle: Rectangle, packed: Tensor) -> Tensor:
        """Return the zero points.

        Some writers of symmetric files claim to store zero points less one and do not; they are 8 in any case.
        """
        stored = super().zeros(rectangle, packed)
        if self.config.symmetric:
            if not (torch.all(stored == 7) or torch.all(stored == 8)):
                name = self.stored_zeros(rectangle).name
                raise self.refusal(name, "zero points 8 (stored as 8, or less one as 7) of a symmetric quantisation")
            return torch.full_like(stored, 8)
        return (stored + int(self.config.zeros_minus_one)) & 15

    def leaves_out(self, name: str) -> bool:
        """Return True for a bias of zeros, which some writers add to every module."""
        module, _, last = name.rpartition(".")
        if last != "bias" or f"{module}.qweight" not in self._checkpoint.tensors:
            return False
        info = self._checkpoint.info(name)
        return not self._checkpoint.read(name, tuple(slice(0, size) for size in info.shape)).any()


def _transposed(matrix: Tensor) -> Tensor:
    return matrix.T.contiguous()


def _module(rectangle: Rectangle) -> str:
    return rectangle.name.removesuffix(".weight")


def _unless_empty(rectangle: Rectangle, *index: slice) -> tuple[slice, ...]:
    """Return `index`, or an empty one where the rectangle is empty."""
    return index if rectangle.elements else tuple(slice(0, 0) for _ in index)


def _whole(part: slice, unit: int) -> slice:
    """Return the items that serve any element of `part`, if each item serves `unit` elements."""
    return slice(part.start // unit, -(-part.stop // unit))


def _trim(part: slice) -> slice:
    """Return where `part` lies within the elements of its whole int32s."""
    first = part.start % _NIBBLES
    return slice(first, first + part.stop - part.start)


def _repeated(scales: Tensor, dim: int, part: slice, stored: int, held: int) -> Tensor:
    """Return scales along `dim` for blocks of `held` elements of `part`, from those of the `stored` ones around it."""
    starts = torch.arange(part.start, part.stop, held)
    return scales.index_select(dim, starts // stored - part.start // stored)


def _nibbles(packed: Tensor, order: tuple[int, ...]) -> Tensor:
    """Unpack int32 [r, c] to codes uint8 [8 * c, r]; nibble j of packed[r, c] becomes codes[8 * c + order[j], r]."""
    rows, columns = packed.shape
    pairs = packed.T.reshape(-1).view(torch.uint8).view(columns, rows, _NIBBLES // 2)  # little-endian: lowest first
    codes = torch.empty(columns, _NIBBLES, rows, dtype=torch.uint8)
    for byte in range(_NIBBLES // 2):
        codes[:, order[2 * byte]] = pairs[..., byte] & 15
        codes[:, order[2 * byte + 1]] = pairs[..., byte] >> 4
    return codes.view(columns * _NIBBLES, rows)
