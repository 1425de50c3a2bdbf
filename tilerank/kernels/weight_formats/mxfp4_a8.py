"""MXFP4 weights with int8 activations: 4.25 bits a weight, and the products of integers.

Weights are those of `Mxfp4`. Twice their codes are integers from -12 to 12. Each row of x is quantised at run time as
for `Int8`, in steps of 32 inputs. Sums of a step are exact in int32. They are multiplied with the scale of x, then with
the power of two of the weight, and added in fp32, by one multiplication and one fused multiply-add, in the order of the
inputs on every rung, so that all rungs give the same bits. The total is halved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..reference import weight_formats as reference
from ..weight import Operands
from . import block_scaled
from .int4 import TILE_BYTES
from .int8_rows import scratch_of_int8_rows
from .mxfp4 import Mxfp4, Mxfp4Weight
from .output_scaled import output_scaled_layout


@dataclass(frozen=True)
class Mxfp4A8(Mxfp4):
    """Codes and exponents as those of `Mxfp4`, and int8 activations."""

    layout = output_scaled_layout("mxfp4_a8", TILE_BYTES, "u8")
    operands: ClassVar[Operands] = "int8"

    def empty(self, n: int, k: int) -> Mxfp4A8Weight:
        values, scales = block_scaled.allocate(self.arrays(n, k))
        return Mxfp4A8Weight(values, scales, None, n, k, self)


@dataclass(frozen=True)
class Mxfp4A8Weight(Mxfp4Weight):
    def scratch(self, m: int) -> int:
        return scratch_of_int8_rows(self.format.layout.format, m, self.k, self.format.group)

    def product(self, x: Tensor) -> Tensor:
        group = self.format.group
        powers = self._by_group(reference.powers_of_two(self.scales))
        return reference.product_groups(x, 2 * self.codes(), powers, None, group, group) / 2
