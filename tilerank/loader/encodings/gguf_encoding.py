"""What to read of a GGUF file for a rectangle of a weight: floats, or blocks of codes, scales and minimums.

Where a file has the rows of a rotation as adjacent pairs, whole rows are moved so that pairs lie in halves of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilerank.kernels.weight_formats.gguf import GgufWeight
from tilerank.kernels.weight_formats.mxfp4 import Mxfp4Weight
from tilerank.parallel.parameters import Rectangle, WeightParameter

from ..checkpoint import Checkpoint
from ..gguf.blocks import decode, dequantise
from ..gguf.names import NamedTensor
from ..rectangle import Read, StoredRectangle, read_floats


class GGUFReads:
    """What reads the weights of a GGUF file, with the methods of QuantizedCheckpoint.

    Blocks are written as they are to weights of their format. All other weights are written as values, which a weight
    of another format quantises.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._tensors = checkpoint.gguf

    def reads(self, rectangle: Rectangle) -> Iterator[Read]:
        """Yield what to read for a rectangle; stored rectangles are empty where it is."""
        tensor = self._tensors.get(rectangle.name)
        if tensor is None:
            yield read_floats(rectangle)
            return
        stored, parameter = _stored(rectangle, tensor), rectangle.parameter
        holds_codes = isinstance(parameter, WeightParameter) and parameter.is_quantised
        if holds_codes and not tensor.stored.type.is_float:
            columns = stored.index[1]
            blocks = (columns.stop - columns.start) // tensor.stored.type.block
            part = partial(_write, rectangle, tensor, stored)
            yield Read((stored,), parameter, rectangle.row, part=part, columns=blocks)
        else:
            yield Read((stored,), parameter, rectangle.row, partial(_floats, rectangle, tensor, stored))

    def leaves_out(self, name: str) -> bool:
        """Return whether a tensor that the model does not use has no effect."""
        return False


def _stored(rectangle: Rectangle, tensor: NamedTensor) -> StoredRectangle:
    """Return the rows of a file that have all rows of the rectangle, and columns in whole blocks."""
    rows, *columns = rectangle.index
    if tensor.heads and rows.stop > rows.start:
        size = tensor.shape[0] // tensor.heads
        rows = slice(rows.start // size * size, -(-rows.stop // size) * size)
    block = tensor.stored.type.block
    if columns:
        *between, last = columns
        columns = [*between, slice(last.start // block * block, -(-last.stop // block) * block)]
    return StoredRectangle(
        rectangle.name, rectangle.shape, (tensor.stored.type.name,), (rows, *columns), rectangle.optional
    )


def _chosen_rows(rectangle: Rectangle, tensor: NamedTensor, stored: StoredRectangle, part: Tensor) -> Tensor:
    """Return the rows of the rectangle, from those of the file in which they lie as adjacent pairs of each head."""
    rows, first = rectangle.index[0], stored.index[0].start
    if not tensor.heads:
        return part
    size = tensor.shape[0] // tensor.heads
    numbers = torch.arange(rows.start, rows.stop)
    within = numbers % size
    return part[numbers - within - first + within % (size // 2) * 2 + within // (size // 2)]


def _floats(rectangle: Rectangle, tensor: NamedTensor, stored: StoredRectangle, part: Tensor) -> Tensor:
    """Return the values of a rectangle."""
    part = _chosen_rows(rectangle, tensor, stored, part)
    if not tensor.stored.type.is_float:
        columns, first = rectangle.index[1], stored.index[1].start
        part = dequantise(tensor.stored.type.name, part)[:, columns.start - first : columns.stop - first]
    return part - 1 if tensor.plus_one else part


def _write(
    rectangle: Rectangle, tensor: NamedTensor, stored: StoredRectangle, weight: Any, part: Tensor, row: int
) -> None:
    """Write the codes and scales of a rectangle to a weight, whose blocks may be parts of those of the file."""
    type, file_block = tensor.stored.type.name, tensor.stored.type.block
    found = decode(type, _chosen_rows(rectangle, tensor, stored, part))
    columns, first = rectangle.index[1], rectangle.index[1].start - stored.index[1].start
    count = columns.stop - columns.start
    codes = found.codes[:, first : first + count]
    if isinstance(weight, Mxfp4Weight):
        weight.write_codes(codes, row)
        weight.write_scales(found.scales[:, first // file_block : -(-(first + count) // file_block)], row)
        return
    assert isinstance(weight, GgufWeight)
    blocks = torch.arange(first, first + count, weight.format.block) // file_block
    group = weight.format.parts.group
    groups = slice(first // group, -(-(first + count) // group))

    def of_blocks(scales: Tensor) -> Tensor:
        return scales[:, blocks]

    def of_groups(factors: Tensor | None) -> Tensor | None:
        return None if factors is None else factors[:, groups]

    weight.write_codes(codes, row)
    weight.write_scales(
        row,
        of_blocks(found.scales),
        of_groups(found.subscales),
        None if found.minimums is None else of_blocks(found.minimums),
        of_groups(found.subminimums),
    )
