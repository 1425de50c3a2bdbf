"""Weights in the block formats of GGUF files with int8 activations: the products of integers.

Weights are those of `Gguf`. Each row of x is quantised at run time as for `Int8`, in steps of a group of the weight, 16
or 32 inputs. Sums of a step are exact in int32. They are multiplied with the scale of x, then with that of the weight,
and added in fp32, by one multiplication and one fused multiply-add; the sum of the codes of x follows in the same way
with the minimum of the weight. The order is that of the inputs on every rung, so that all rungs give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .. import core
from ..reference import weight_formats as reference
from ..weight import TILE_ROWS, Layout, Operands, round_up
from .gguf import GGUF_TYPES, Gguf, GgufWeight, gguf_layout

_TILE_K = 64  # inputs of a row of an AMX tile

GGUF_A8_LAYOUTS = {type.kind: gguf_layout(type, "_a8") for type in GGUF_TYPES.values()}


@dataclass(frozen=True)
class GgufA8(Gguf):
    """A block format of GGUF as `Gguf`, and int8 activations."""

    operands: ClassVar[Operands] = "int8"

    @property
    def layout(self) -> Layout:
        return GGUF_A8_LAYOUTS[self.parts.kind]

    def empty(self, n: int, k: int) -> GgufA8Weight:
        return GgufA8Weight(*self.allocate(n, k), n, k, self)


@dataclass(frozen=True)
class GgufA8Weight(GgufWeight):
    def scratch(self, m: int) -> int:
        """Return the bytes for the codes of x, and for a scale and a start of sums for every row and step; with few
        rows every thread quantises them for itself."""
        kind, step = self.format.layout.format, self.format.parts.group
        if core.packs_per_thread(kind, m):
            return 0
        if core.rung_of(kind) == "amx":
            return round_up(m, TILE_ROWS) * round_up(self.k, _TILE_K) // _TILE_K * (_TILE_K + _TILE_K // step * 8)
        code = 2 if core.rung_of(kind) == "avx2" else 1  # bytes
        return m * -(-self.k // step) * (step * code + 8)

    def product(self, x: Tensor) -> Tensor:
        parts = self.format.parts
        scales, minimums = self.group_scales()
        numbers = parts.numbers(self.codes())
        return reference.product_groups(x, numbers, scales, None, parts.group, parts.group, minimums)
