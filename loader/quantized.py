"""Quantised checkpoints: where the codes, scales and zero points of a weight are stored, and how they are packed.

A model asks for a rectangle of X.weight; here that becomes rectangles of the tensors which the checkpoint has in its
place (loader/quantization.py). Codes are written as they are: nothing is dequantised.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import cast

from torch import Tensor

from tilerank.kernels.linear import Weight
from tilerank.kernels.linear_int8 import Int8Weight
from tilerank.parallel.layer import Piece, whole_rows

from .checkpoint import Checkpoint
from .errors import CheckpointError
from .quantization import QuantizationConfig
from .read import FLOATS, Read, Source


def encoding_of(config: QuantizationConfig, checkpoint: Checkpoint) -> Encoding:
    kinds: dict[str, type[Encoding]] = {"int8": ChannelInt8}
    return kinds[config.layout](config, checkpoint)


class Encoding(ABC):
    """How one checkpoint stores its quantised weights."""

    def __init__(self, config: QuantizationConfig, checkpoint: Checkpoint) -> None:
        self.config = config
        self._checkpoint = checkpoint

    @abstractmethod
    def reads(self, piece: Piece) -> Iterator[Read]:
        """What to read in place of a piece that has a `place`. Rectangles are empty where the piece is."""

    def leaves_out(self, name: str) -> bool:
        """Is this tensor, which nobody asked for, without effect?"""
        return False

    def refusal(self, name: str, expected: str) -> CheckpointError:
        return CheckpointError(f"{self._checkpoint.model_dir}: tensor {name}: expected {expected}")


class ChannelInt8(Encoding):
    """weight [n, k] int8 and weight_scale [n, 1]."""

    def reads(self, piece: Piece) -> Iterator[Read]:
        rows, _ = piece.index

        def store(codes: Tensor, scales: Tensor) -> None:
            weight, row = _place(piece)
            cast(Int8Weight, weight).write_codes(whole_rows(codes, weight), scales.float().flatten(), row)

        codes = Source(piece.name, piece.shape, ("I8",), piece.index)
        scales = Source(f"{piece.name}_scale", (piece.shape[0], 1), FLOATS, _unless_empty(piece, rows, slice(0, 1)))
        yield Read((codes, scales), store)


def _place(piece: Piece) -> tuple[Weight, int]:
    assert piece.place is not None
    return piece.place()


def _unless_empty(piece: Piece, *index: slice) -> tuple[slice, ...]:
    return index if piece.elements else tuple(slice(0, 0) for _ in index)
