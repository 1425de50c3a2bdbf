"""Reads rectangles of weights from a GGUF file: floats, or blocks of codes, scales and minimums.

Rows and columns that a file has in another order than the hub are moved whole, so that blocks keep their values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilerank.kernels.weight_formats.gguf import GgufWeight
from tilerank.kernels.weight_formats.gguf_blocks import decode
from tilerank.kernels.weight_formats.mxfp4 import Mxfp4Weight
from tilerank.parallel.parameters import Rectangle, WeightParameter

from ..checkpoint import Checkpoint
from ..errors import CheckpointError
from ..gguf.architecture import Order
from ..gguf.blocks import dequantise
from ..gguf.names import NamedTensor
from ..rectangle import Read, StoredRectangle, place_of, read_plain


class GGUFReads:
    """Yields the reads of a GGUF file's weights, with the methods of QuantizedCheckpoint.

    Weights of the format of the file take its blocks as they are. Other weights take values, and quantise them if they
    have another format.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._tensors = checkpoint.gguf

    def reads(self, rectangle: Rectangle) -> Iterator[Read]:
        """Yield what to read for a rectangle. The stored rectangles of an empty one are empty, too."""
        tensor = self._tensors.get(rectangle.name)
        if tensor is None:
            joined = _joined(rectangle, self._tensors)
            yield read_plain(rectangle, place_of(rectangle, self._checkpoint)) if joined is None else joined
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
    """Return the smallest stored rectangle that has all of `rectangle`: whole blocks of the type and of the order."""
    rows, *columns = rectangle.index
    rows = _covering(tensor.order_of(columns=False), rows)
    if columns:
        *between, last = columns
        last, block = _covering(tensor.order_of(columns=True), last), tensor.stored.type.block
        columns = [*between, slice(last.start // block * block, -(-last.stop // block) * block)]
    return StoredRectangle(
        rectangle.name, rectangle.shape, (tensor.stored.type.name,), (rows, *columns), rectangle.optional
    )


def _covering(order: Order | None, part: slice) -> slice:
    """Return the items of a file that include the items `part` of the hub: whole blocks of the order."""
    if order is None or part.start == part.stop:
        return part
    size, first = order.outer * order.inner * order.width, order.first
    start, stop = part.start, part.stop
    if start > first:
        start = first + (start - first) // size * size
    if stop > first:
        stop = first - (first - stop) // size * size
    return slice(start, stop)


def _positions(order: Order, part: slice) -> Tensor:
    """Return the position in the file of each of the items `part` of the hub."""
    items = torch.arange(part.start, part.stop)
    within = (items - order.first) % (order.outer * order.inner * order.width)
    unit, rest = within // order.width, within % order.width
    moved = (unit % order.inner * order.outer + unit // order.inner) * order.width + rest
    return torch.where(items < order.first, items, items - within + moved)


def _chosen_rows(rectangle: Rectangle, tensor: NamedTensor, stored: StoredRectangle, part: Tensor) -> Tensor:
    """Return the rows of the rectangle, in the order of the hub. part: the stored rows."""
    order = tensor.order_of(columns=False)
    return part if order is None else part[_positions(order, rectangle.index[0]) - stored.index[0].start]


def _floats(rectangle: Rectangle, tensor: NamedTensor, stored: StoredRectangle, part: Tensor) -> Tensor:
    """Return the values of a rectangle. part: the stored rectangle, floats or blocks."""
    part = _chosen_rows(rectangle, tensor, stored, part)
    if not tensor.stored.type.is_float:
        part = dequantise(tensor.stored.type.name, part)
    if part.ndim == 2:
        columns, first = rectangle.index[1], stored.index[1].start
        order = tensor.order_of(columns=True)
        chosen = (
            slice(columns.start - first, columns.stop - first) if order is None else _positions(order, columns) - first
        )
        part = part[:, chosen]
    if tensor.change == "plus_one":
        return part - 1
    if tensor.change == "negative_exp":
        if not (part < 0).all():
            where, found = f"{tensor.stored.file}: tensor {tensor.stored.name}", float(part.max())
            raise CheckpointError(f"{where}: expected numbers below 0, found {found}")
        return (-part.float()).log()
    return part


def _write(
    rectangle: Rectangle, tensor: NamedTensor, stored: StoredRectangle, weight: Any, part: Tensor, row: int
) -> None:
    """Write the codes and scales of a rectangle to a weight. Its blocks may be parts of those of the file."""
    rows = _chosen_rows(rectangle, tensor, stored, part)
    columns, begin = rectangle.index[1], stored.index[1].start
    order = tensor.order_of(columns=True)  # moves whole blocks of the weight
    positions = (torch.arange(columns.start, columns.stop) if order is None else _positions(order, columns)) - begin
    if isinstance(weight, Mxfp4Weight):
        found, block = decode("MXFP4", rows), tensor.stored.type.block
        weight.write_codes(found.codes[:, positions], row)
        weight.write_scales(found.scales[:, positions[::block] // block], row)
        return
    assert isinstance(weight, GgufWeight)
    group = weight.format.parts.group
    weight.write_blocks(rows, (positions[::group] // group).int(), row)


@dataclass(frozen=True)
class _Joined:
    """A tensor of the hub that a file stores as two pieces, whose first dimensions count the same heads, experts or
    filters.
    pieces: the ends of their names. shapes: returns the expected shapes of the pieces, given the shape of the tensor on
    the hub and the stored shape of the first piece. join: returns the tensor [heads or experts, rows, columns].
    """

    pieces: tuple[str, str]
    shapes: Callable[[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]
    join: Callable[[Tensor, Tensor], Tensor]


def _head_shapes(shape: tuple[int, ...], keys: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    key_dim, latent = keys[-1], shape[1]
    heads = shape[0] // max(shape[0] // keys[0], 1)
    return (heads, latent, key_dim), (heads, shape[0] // heads - key_dim, latent)


def _interleaved_shapes(shape: tuple[int, ...], _: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    half = shape[0], shape[1] // 2
    return half, half


def _kernel_shapes(shape: tuple[int, ...], _: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    of_frame = shape[:2] + shape[3:]
    return of_frame, of_frame


_JOINED = {
    # Latent attention: the file has the keys of a head as [latent, dim], ready to be multiplied with queries.
    "kv_b_proj.weight": _Joined(
        ("k_b_proj.weight", "v_b_proj.weight"), _head_shapes, lambda k, v: torch.cat([k.transpose(1, 2), v], 1)
    ),
    # gpt-oss: the hub interleaves the biases of gate and up.
    "gate_up_proj_bias": _Joined(
        ("gate_proj_bias", "up_proj_bias"),
        _interleaved_shapes,
        lambda gate, up: torch.stack([gate, up], -1).flatten(1)[:, None],
    ),
    # Qwen3-VL: the file has one kernel [filters, channels, side, side] for each of the two frames of a patch.
    "patch_embed.proj.weight": _Joined(
        ("patch_embed.proj.kernel.0", "patch_embed.proj.kernel.1"),
        _kernel_shapes,
        lambda first, second: torch.stack([first, second], 2)[:, None],
    ),
}
"""By the end of the name on the hub."""


def _joined(rectangle: Rectangle, tensors: Mapping[str, NamedTensor]) -> Read | None:
    """Return what to read for a rectangle of a tensor that the file stores as two pieces; None for any other."""
    for end, joined in _JOINED.items():
        names = [rectangle.name.removesuffix(end) + piece for piece in joined.pieces]
        if not rectangle.name.endswith(end) or not all(name in tensors for name in names):
            continue
        pieces = [tensors[name] for name in names]
        units, rows = pieces[0].shape[0], rectangle.index[0]
        height = max(rectangle.shape[0] // units, 1)
        first = rows.start // height
        end = -(-rows.stop // height) if rectangle.elements else first
        shapes = joined.shapes(rectangle.shape, pieces[0].shape)
        stored = tuple(
            StoredRectangle(
                name,
                shape,
                (piece.stored.type.name,),
                (slice(first, end), *(slice(0, size) for size in piece.shape[1:])),
            )
            for name, shape, piece in zip(names, shapes, pieces, strict=True)
        )
        chosen = slice(rows.start - first * height, rows.stop - first * height), rectangle.index[1]
        return Read(stored, rectangle.parameter, rectangle.row, partial(_join, joined, pieces, chosen))
    return None


def _join(joined: _Joined, tensors: Sequence[NamedTensor], chosen: tuple[slice, ...], *parts: Tensor) -> Tensor:
    """Return the rows and columns `chosen` of the tensor that the parts of both pieces make."""
    values = []
    for tensor, part in zip(tensors, parts, strict=True):
        type = tensor.stored.type
        if not type.is_float:
            part = dequantise(type.name, part.flatten(0, -3)).view(*part.shape[:-2], -1)
        values.append(part.float())
    return joined.join(*values).flatten(0, 1)[chosen]
