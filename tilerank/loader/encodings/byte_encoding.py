"""Weights with a code in a byte: weight [n, k], and weight_scale or weight_scale_inv.

One number for each block, at the edges of smaller ones, for each output, or for the whole weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import Tensor

from tilerank.kernels.weight_formats import BlockFormat, OutputScaledFormat
from tilerank.kernels.weight_formats.byte_codes import ByteCodesWeight
from tilerank.kernels.weight_formats.int8 import Int8Weight
from tilerank.kernels.weight_formats.output_scaled import OutputScaledWeight
from tilerank.parallel.parameters import Rectangle, WeightParameter

from ..rectangle import EXPONENTS, FLOATS, Read, StoredRectangle, place_of, read_plain, scales_of
from .weight_encoding import WeightEncoding, module_of, repeated, unless_empty, whole, write_codes

_DTYPES = {"fp8": "F8_E4M3", "int8": "I8"}


class ByteEncoding(WeightEncoding):
    """fp8 (e4m3) and int8."""

    def encoded(self, rectangle: Rectangle, parameter: WeightParameter) -> Iterator[Read]:
        held, row, columns = parameter.format, rectangle.row, parameter.k
        turn = _transposed if parameter.transposed else None
        if isinstance(held, BlockFormat):
            yield Read((self._codes(rectangle),), parameter, row, turn, write_codes, columns)
            if self.scheme.layout == "fp8" or all(self.scheme.block):  # else the model reads the scales for itself
                yield self._block_scales(rectangle, parameter, held)
        elif isinstance(held, OutputScaledFormat):
            yield Read((self._codes(rectangle),), parameter, row, None, write_codes, columns)
            scales = partial(self._spread, rectangle, 1, 0)
            yield Read((self._scales(rectangle),), parameter, row, scales, OutputScaledWeight.write_scales, 1)
        else:
            stored = (self._codes(rectangle), self._scales(rectangle))
            yield Read(stored, parameter, row, part=partial(self._write_int8, rectangle), columns=columns)

    def floats(self, rectangle: Rectangle) -> Read:
        tensors = self.checkpoint.tensors
        if rectangle.name not in tensors or tensors[rectangle.name].dtype in FLOATS:
            return read_plain(rectangle, place_of(rectangle, self.checkpoint))
        stored = (self._codes(rectangle), self._scales(rectangle))
        return Read(stored, rectangle.parameter, rectangle.row, partial(self._dequantised, rectangle))

    def scales_alone(self, rectangle: Rectangle) -> Read:
        (rows, _), shape = rectangle.index, (rectangle.shape[0], 1)
        of_weight = Rectangle(f"{module_of(rectangle)}.weight", shape, (rows, slice(0, 1)), rectangle.parameter)
        scales = partial(self._spread, of_weight, 1, 0)
        return Read((self._scales(of_weight),), rectangle.parameter, rectangle.row, scales)

    def _codes(self, rectangle: Rectangle) -> StoredRectangle:
        return StoredRectangle(rectangle.name, rectangle.shape, (_DTYPES[self.scheme.layout],), rectangle.index)

    def _scales(self, rectangle: Rectangle) -> StoredRectangle:
        """Return the scales of the rectangle's codes."""
        module, tensors = module_of(rectangle), self.checkpoint.tensors
        usual, other = "weight_scale", "weight_scale_inv"
        if all(self.scheme.block):
            usual, other = other, usual
        name = f"{module}.{other}" if f"{module}.{other}" in tensors else f"{module}.{usual}"
        (n, k), (rows, columns), (block_n, block_k) = rectangle.shape, rectangle.index, self.scheme.block
        shape: tuple[int, ...] = (-(-n // block_n) if block_n else 1, -(-k // block_k) if block_k else 1)
        index = unless_empty(rectangle, whole(rows, block_n), whole(columns, block_k))
        if name in tensors and not block_k:  # one column, which files may leave out
            found = tensors[name].shape
            dims = len(found) if found in ((), shape[:1]) and (found or not block_n) else 2
            shape, index = shape[:dims], index[:dims] if rectangle.elements else index
        dtypes = (*FLOATS, *EXPONENTS) if all(self.scheme.block) else FLOATS
        return StoredRectangle(name, shape, dtypes, index)

    def _spread(self, rectangle: Rectangle, rows: int, columns: int, scales: Tensor) -> Tensor:
        """Return a scale for each block of `rows` x `columns` elements (0: all) of the rectangle."""
        (own_rows, own_columns), (block_n, block_k) = rectangle.index, self.scheme.block
        scales = scales_of(scales).float().reshape(scales.shape[0] if scales.ndim else 1, -1)
        scales = repeated(scales, 0, own_rows, block_n, rows)
        return repeated(scales, 1, own_columns, block_k, columns).contiguous()

    def _block_scales(self, rectangle: Rectangle, parameter: WeightParameter, held: BlockFormat) -> Read:
        rows, columns = (held.block_k, held.block_n) if parameter.transposed else (held.block_n, held.block_k)

        def spread(scales: Tensor) -> Tensor:
            found = self._spread(rectangle, rows, columns, scales)
            return _transposed(found) if parameter.transposed else found

        blocks = -(-parameter.k // held.block_k)
        return Read((self._scales(rectangle),), parameter, rectangle.row, spread, _write_scales, blocks)

    def _write_int8(self, rectangle: Rectangle, weight: Int8Weight, codes: Tensor, scales: Tensor, row: int) -> None:
        weight.write_codes(codes, self._spread(rectangle, 1, 0, scales).flatten(), row)

    def _dequantised(self, rectangle: Rectangle, codes: Tensor, scales: Tensor) -> Tensor:
        return codes.float() * self._spread(rectangle, 1, 1, scales)


def _write_scales(weight: ByteCodesWeight, scales: Tensor, row: int) -> None:
    weight.write_scales(scales, row // weight.format.block_n)


def _transposed(matrix: Tensor) -> Tensor:
    return matrix.T.contiguous()
