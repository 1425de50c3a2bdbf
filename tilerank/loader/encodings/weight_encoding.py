"""How a scheme of quantisation stores a weight: what its encodings share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tilerank.parallel.parameters import Rectangle, WeightParameter

from ..checkpoint import Checkpoint
from ..errors import CheckpointError
from ..quantization_config import Scheme
from ..rectangle import Read, read_plain


class WeightEncoding(ABC):
    """How a scheme stores a weight."""

    def __init__(self, scheme: Scheme, checkpoint: Checkpoint) -> None:
        self.scheme = scheme
        self.checkpoint = checkpoint

    @abstractmethod
    def encoded(self, rectangle: Rectangle, parameter: WeightParameter) -> Iterator[Read]:
        """Yield what to read for a rectangle of a weight that is held in codes."""

    @abstractmethod
    def floats(self, rectangle: Rectangle) -> Read:
        """Return what to read for a rectangle that is held as floats."""

    def scales_alone(self, rectangle: Rectangle) -> Read:
        """Return what to read for a rectangle [rows, 1] of scales of rows."""
        return read_plain(rectangle)

    def refusal(self, name: str, expected: str) -> CheckpointError:
        return CheckpointError(f"{self.checkpoint.info(name).file}: tensor {name}: expected {expected}")


def module_of(rectangle: Rectangle) -> str:
    return rectangle.name.rpartition(".")[0]


def unless_empty(rectangle: Rectangle, *index: slice) -> tuple[slice, ...]:
    """Return `index`, or an empty one where the rectangle is empty."""
    return index if rectangle.elements else tuple(slice(0, 0) for _ in index)


def whole(part: slice, unit: int) -> slice:
    """Return the items that serve any element of `part`, if each item serves `unit` elements (0: all of them)."""
    return slice(part.start // unit, -(-part.stop // unit)) if unit else slice(0, 1)


def repeated(scales: Tensor, dim: int, part: slice, stored: int, held: int) -> Tensor:
    """Return scales along `dim` for blocks of `held` elements of `part`, from those of the `stored` ones around it.

    0: of all elements.
    """
    if not stored:
        count = -(-(part.stop - part.start) // held) if held else 1
        return scales.expand(*(count if i == dim else size for i, size in enumerate(scales.shape)))
    starts = torch.arange(part.start, part.stop, held)
    return scales.index_select(dim, starts // stored - part.start // stored)


def write_codes(weight: Any, codes: Tensor, row: int) -> None:
    """The part of a Read that writes codes to a weight of any quantised format."""
    weight.write_codes(codes, row)
