"""One record of what a loader reads: rectangles of stored tensors, and where they land in the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from tilerank.kernels.reference.weight_formats import powers_of_two
from tilerank.parallel.parameters import FusedPlace, Parameter, Rectangle, WeightParameter

from .checkpoint import Checkpoint
from .errors import CheckpointError
from .gguf.block_types import BY_NAME
from .padding import pad_loaded_weight

FLOATS = ("BF16", "F16", "F32")
"""The dtypes of scales and of weights that are not quantised."""

INTEGERS = ("I64",)
"""The dtypes of token ids."""

EXPONENTS = ("U8", "F8_E8M0")
"""The dtypes of scales that are powers of two (ue8m0)."""

SIZES = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "I8": 1, "I32": 4, "I64": 8, "U8": 1, "F8_E8M0": 1}
"""Bytes of an element."""


@dataclass(frozen=True)
class StoredRectangle:
    """Rectangle `index` of a stored tensor, which has to have shape `shape` and one of `dtypes` (safetensors' names).

    optional: the checkpoint may lack the tensor; then nothing is read or written.
    """

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    index: tuple[slice, ...]
    optional: bool = False

    @property
    def elements(self) -> int:
        return prod(part.stop - part.start for part in self.index)

    def nbytes(self, checkpoint: Checkpoint) -> int:
        dtype = checkpoint.info(self.name).dtype
        blocks = BY_NAME.get(dtype)
        return self.elements * SIZES[dtype] if blocks is None else self.elements // blocks.block * blocks.nbytes

    def check(self, checkpoint: Checkpoint) -> None:
        """Raise CheckpointError unless the tensor has this shape and one of these dtypes."""
        info = checkpoint.info(self.name)
        if info.shape != self.shape:
            raise CheckpointError(
                f"{info.file}: tensor {self.name}: expected shape {list(self.shape)}, found {list(info.shape)}"
            )
        if info.dtype not in self.dtypes:
            expected = self.dtypes[0] if len(self.dtypes) == 1 else f"one of {', '.join(self.dtypes)}"
            raise CheckpointError(f"{info.file}: tensor {self.name}: expected {expected}, found {info.dtype}")

    def check_finite(self, checkpoint: Checkpoint, values: Tensor) -> None:
        """Raise CheckpointError if the rectangle, read into `values`, holds NaN or infinity; integers never do."""
        if self.dtypes[0] in BY_NAME and self.dtypes[0] not in FLOATS:
            return  # blocks, whose scales are checked when they are taken apart
        if self.dtypes != ("U8",):  # codes
            values = scales_of(values)
        if values.dtype is torch.float8_e4m3fn:
            suspect = bool(values.numel()) and int((values.view(torch.uint8) & 127).max()) == 127  # NaN; no infinities
        else:
            # One pass: any NaN or infinity makes the sum one, though a sum of finite numbers may overflow as well.
            # Rows first, because torch is many times slower over both dimensions of a slice of columns.
            suspect = values.is_floating_point() and not math.isfinite(values.sum(-1).sum())
        if not suspect:
            return
        for place in (~values.float().isfinite()).nonzero()[:1].tolist():
            found = float(values[tuple(place)])
            position = [part.start + offset for part, offset in zip(self.index, place, strict=True)]
            file = checkpoint.info(self.name).file
            raise CheckpointError(f"{file}: tensor {self.name}: expected finite numbers, found {found} at {position}")


@dataclass(frozen=True)
class Read:
    """Stored rectangles that are read together, and rows of a parameter that they fill.

    transform: makes one tensor of those read, such as a slice of a fused tensor, its transpose, or dequantised values
    (None: they are written as they are). part: the method of the parameter's weight that writes this part of it, its
    codes, scales or zero points; called as part(weight, *tensors, row). None: the tensor holds values. columns: those
    that the weight has of the part; where the rank's cut is padded, the first tensor has fewer, and zeros follow.
    importance: by how much errors of each column count where values are quantised; None: all alike.
    """

    stored: tuple[StoredRectangle, ...]
    parameter: Parameter
    row: int
    transform: Callable[..., Tensor] | None = None
    part: Callable[..., None] | None = None
    columns: int = 0
    importance: Tensor | None = None

    @property
    def elements(self) -> int:
        return sum(stored.elements for stored in self.stored)

    def nbytes(self, checkpoint: Checkpoint) -> int:
        return sum(stored.nbytes(checkpoint) for stored in self.stored)

    def write(self, tensors: Sequence[Tensor]) -> None:
        """Transform and store the tensors that were read."""
        if self.transform is not None:
            tensors = (self.transform(*tensors),)
        if self.importance is not None:
            assert isinstance(self.parameter, WeightParameter)
            rows, importance = (_whole_rows(each, self.parameter) for each in (tensors[0], self.importance[None]))
            self.parameter.write_by_importance(rows, self.row, importance[0])
        elif self.part is None:
            self.parameter.write(_whole_rows(tensors[0], self.parameter), self.row)
        else:
            assert isinstance(self.parameter, WeightParameter)
            weight, row = self.parameter.place(self.row)
            self.part(weight, pad_loaded_weight(tensors[0], 1, (self.columns,)), *tensors[1:], row)


def read_plain(rectangle: Rectangle, place: FusedPlace | None = None) -> Read:
    """Read a rectangle as it is stored under its own name, or in `place`: as floats, or integers if its parameter holds
    these."""
    if place is None:
        dtypes = INTEGERS if rectangle.parameter.holds_integers else FLOATS
        stored = StoredRectangle(rectangle.name, rectangle.shape, dtypes, rectangle.index, rectangle.optional)
        return Read((stored,), rectangle.parameter, rectangle.row)
    stored = StoredRectangle(place.name, place.shape, FLOATS, place.index(rectangle.index), rectangle.optional)
    return Read((stored,), rectangle.parameter, rectangle.row, place.extract)


def place_of(rectangle: Rectangle, checkpoint: Checkpoint) -> FusedPlace | None:
    """Return the place where the checkpoint stores the weight; None for a tensor of its own name.

    Places of one name differ in shape. The first is returned if the tensor is missing or fits none, for the message.
    """
    if rectangle.name in checkpoint.tensors or not rectangle.places:
        return None
    tensors = checkpoint.tensors
    fitting = (p for p in rectangle.places if p.name in tensors and tensors[p.name].shape == p.shape)
    return next(fitting, rectangle.places[0])


def scales_of(stored: Tensor) -> Tensor:
    """Return scales as floats: exponents b (EXPONENTS) stand for 2^(b - 127), 255 for NaN; others are unchanged."""
    if stored.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        return stored
    return powers_of_two(stored.view(torch.uint8))


def _whole_rows(rows: Tensor, parameter: Parameter) -> Tensor:
    """Pad rows to the width of a weight. A parameter of filters, which have more dimensions, does so itself."""
    if not isinstance(parameter, WeightParameter) or parameter.transposed or rows.ndim != 2:
        return rows
    return pad_loaded_weight(rows, 1, (parameter.k,))
