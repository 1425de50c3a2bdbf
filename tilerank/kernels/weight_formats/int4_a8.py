"""Int4 weights with int8 activations (w4a8): a quarter of the bytes of bfloat16, and the products of integers.

Weights are those of `Int4`. Each row of x is quantised at run time as for `Int8`, in steps of 64 inputs, or of 32 if a
group of the weight is no multiple of 64. Sums of a step are exact in int32. They are multiplied with the scale of x,
then with that of the weight, and added in fp32, by one multiplication and one fused multiply-add, in the order of the
inputs on every rung, so that all rungs give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..reference import weight_formats as reference
from ..weight import Operands
from . import block_scaled
from .int4 import TILE_BYTES, Int4, Int4Weight
from .int8_rows import scratch_of_int8_rows
from .output_scaled import SCALE_UNIT, output_scaled_layout


@dataclass(frozen=True)
class Int4A8(Int4):
    """Codes from 0 to 15, and int8 activations."""

    layout = output_scaled_layout("int4_a8", TILE_BYTES, "f16")
    operands: ClassVar[Operands] = "int8"

    def empty(self, n: int, k: int) -> Int4A8Weight:
        values, scales, *zeros = block_scaled.allocate(self.arrays(n, k))
        return Int4A8Weight(values, scales, zeros[0] if zeros else None, n, k, self)


@dataclass(frozen=True)
class Int4A8Weight(Int4Weight):
    @property
    def _step(self) -> int:
        """Inputs of x that share a scale."""
        return 64 if self.format.k_block % 64 == 0 else 32

    def scratch(self, m: int) -> int:
        return scratch_of_int8_rows(self.format.layout.format, m, self.k, self._step)

    def product(self, x: Tensor) -> Tensor:
        zeros = None if self.zeros is None else self._by_group(self.zeros)
        scales = self._by_group(self.scales).float()
        return (
            reference.product_groups(x, self.codes(), scales, zeros, self.format.group or self.k, self._step)
            * SCALE_UNIT
        )
