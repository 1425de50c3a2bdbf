"""Weights in the block formats of GGUF files with int8 activations: the products of integers.

Weights are those of `Gguf`. Each row of x is quantised at run time as for `Int8`, in steps of a group of the weight, 16
or 32 inputs. Sums of a step are exact in int32. They are multiplied with the scale of x, then with that of the weight,
and added in fp32, by one multiplication and one fused multiply-add; the sum of the codes of x follows in the same way
with the minimum of the weight. The order is that of the inputs on every rung, so that all rungs give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from .. import core
from ..reference import weight_formats as reference
from ..weight import Layout, Operands
from .gguf import ANY_GGUF, GGUF_TYPES, Gguf, GgufWeight, gguf_layout
from .int8_rows import scratch_of_int8_rows

GGUF_A8_LAYOUTS = {type.kind: gguf_layout(type, "_a8") for type in GGUF_TYPES.values()}
ANY_GGUF_A8 = replace(ANY_GGUF, format="gguf_a8")


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
        kind = self.format.layout.format
        code_bytes = 2 if core.rung_of(kind) == "avx2" else 1
        return scratch_of_int8_rows(kind, m, self.k, self.format.parts.group, code_bytes)

    def product(self, x: Tensor) -> Tensor:
        parts = self.format.parts
        scales, minimums = self.group_scales()
        numbers = parts.numbers(self.codes())
        return reference.product_groups(x, numbers, scales, None, parts.group, parts.group, minimums)
