"""Int8 weights with int8 activations that have one scale a row: the format of checkpoints that were made for it.

Compressed-tensors calls it w8a8 with dynamic activations by "token"; DeepSeek-V3 was released in it by others
(meituan/DeepSeek-R1-Channel-INT8 on Hugging Face). Sums of products of codes are exact in int32 on every rung and are
scaled once in fp32, so all rungs give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..reference import weight_formats as reference
from .int8 import Int8, int8_layout


@dataclass(frozen=True)
class TokenInt8(Int8):
    """One symmetric scale per output; activations are quantised row by row at run time."""

    layout = int8_layout("token_int8")

    def product(self, x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        return reference.product_token_int8(x, codes, scales)
