"""MXFP4 as gpt-oss stores its experts: blocks [experts, n, k / 32, 16], two codes in a byte, the first in the low bits,
and exponents scales [experts, n, k / 32]."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from tilerank.kernels.reference.weight_formats import E2M1
from tilerank.kernels.weight_formats.mxfp4 import Mxfp4Weight
from tilerank.parallel.parameters import FusedPlace, Rectangle, WeightParameter

from ..rectangle import EXPONENTS, Read, StoredRectangle, scales_of
from .weight_encoding import WeightEncoding, whole, write_codes

_BLOCK = 32  # columns


class Mxfp4Encoding(WeightEncoding):
    """Tensors X_blocks and X_scales, where X is that of the floats of all experts with the outputs first."""

    def encoded(self, rectangle: Rectangle, parameter: WeightParameter) -> Iterator[Read]:
        blocks, scales = self._stored(rectangle)
        row, groups = rectangle.row, -(-parameter.k // _BLOCK)
        yield Read((blocks,), parameter, row, partial(self._codes, rectangle), write_codes, parameter.k)
        exponents = partial(self._exponents, rectangle)
        yield Read((scales,), parameter, row, exponents, Mxfp4Weight.write_scales, groups)

    def floats(self, rectangle: Rectangle) -> Read:
        def dequantised(blocks: Tensor, scales: Tensor) -> Tensor:
            codes = self._codes(rectangle, blocks)
            by_column = scales_of(self._exponents(rectangle, scales)).repeat_interleave(_BLOCK, 1)
            return E2M1[codes.int()] * by_column[:, : codes.shape[1]]

        return Read(self._stored(rectangle), rectangle.parameter, rectangle.row, dequantised)

    def _stored(self, rectangle: Rectangle) -> tuple[StoredRectangle, StoredRectangle]:
        """Return the blocks and the exponents of the rectangle, with the rows of the other part between its own."""
        place, k = _place(rectangle), rectangle.shape[1]
        if k % _BLOCK or rectangle.index[1].start % _BLOCK:
            raise self.refusal(f"{place.name}_blocks", f"inputs in blocks of {_BLOCK}, found a weight of {k} inputs")
        *before, columns = place.index(rectangle.index)
        index, shape = (*before, whole(columns, _BLOCK)), (*place.shape[:-1], k // _BLOCK)
        blocks = StoredRectangle(
            f"{place.name}_blocks", (*shape, _BLOCK // 2), ("U8",), (*index, slice(0, _BLOCK // 2))
        )
        return blocks, StoredRectangle(f"{place.name}_scales", shape, EXPONENTS, index)

    def _codes(self, rectangle: Rectangle, blocks: Tensor) -> Tensor:
        """Return codes [rows, columns] uint8."""
        rows = blocks.flatten(0, 1)[:: _place(rectangle).step].flatten(1)
        columns = rectangle.index[1]
        return torch.stack([rows & 15, rows >> 4], -1).flatten(1)[:, : columns.stop - columns.start]

    def _exponents(self, rectangle: Rectangle, scales: Tensor) -> Tensor:
        """Return exponents [rows, blocks] uint8."""
        return scales.view(torch.uint8).flatten(0, 1)[:: _place(rectangle).step]


def _place(rectangle: Rectangle) -> FusedPlace:
    """Return the place of a weight in the tensor of all experts, outputs first."""
    return next(place for place in rectangle.places if not place.transposed)
