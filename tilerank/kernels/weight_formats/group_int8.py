"""Int8 weights with one scale per group of inputs, half the bytes of bfloat16; activations stay bfloat16.

value = (code - zero) * scale with codes 0 to 255; zero is 128, or given per group. Scales are stored as those of int4.
This covers GPTQ with 8 bits (arXiv 2210.17323) and the packed layout of compressed-tensors with 8 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from . import block_scaled
from .byte_codes import TILE_BYTES, byte_values, pack_bytes, unpack_bytes
from .output_scaled import SCALE_UNIT, OutputScaledFormat, OutputScaledWeight, output_scaled_layout, quantise_rows


@dataclass(frozen=True)
class GroupInt8(OutputScaledFormat):
    """Codes from 0 to 255; a weight without zero points is symmetric around code 128."""

    layout = output_scaled_layout("group_int8", TILE_BYTES, "f16")

    def values(self, n: int, k: int) -> tuple[tuple[int, ...], torch.dtype]:
        return byte_values(n, k, self.k_block), torch.uint8

    def empty(self, n: int, k: int) -> GroupInt8Weight:
        values, scales, *zeros = block_scaled.allocate(self.arrays(n, k))
        return GroupInt8Weight(values, scales, zeros[0] if zeros else None, n, k, self)


@dataclass(frozen=True)
class OutputScaledBytes(OutputScaledWeight):
    """A byte for each code. Where kernels run in plain torch, `values` are the bits of the codes, [n, k] uint8."""

    codes_dtype: ClassVar[torch.dtype]

    def codes(self) -> Tensor:
        return unpack_bytes(self.values, self.n, self.k).view(self.codes_dtype)


@dataclass(frozen=True)
class GroupInt8Weight(OutputScaledBytes):
    codes_dtype = torch.int8
    middle = 128

    def quantise(self, rows: Tensor, importance: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        steps, scales = quantise_rows(rows, self.format.group, 127, SCALE_UNIT)
        zeros = torch.full(scales.shape, 128, dtype=torch.uint8) if self.format.zero_points else None
        return (steps.round() + 128).to(torch.uint8), scales, zeros

    def write_codes(self, codes: Tensor, row: int = 0, col: int = 0) -> None:
        """Pack codes[r, c] uint8 into weight[row : row + r, col : col + c]."""
        pack_bytes("GroupInt8Weight.write_codes: codes", self, codes, torch.uint8, (row, col), self.middle)
