"""Int8 weights with one scale per block, as fp8 weights have it; activations stay bfloat16.

The format of DeepSeek-V3 checkpoints that were quantised again for hardware without fp8 (meituan/DeepSeek-R1-Block-INT8
on Hugging Face): value = code * scale_inv of its block of 128 x 128. Codes from -128 to 127 are exact in bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import core
from ..reference import weight_formats as reference
from . import block_scaled
from .byte_codes import BlockFormat, ByteCodes

_LINEAR = core.kernel("linear_block_int8")
_MOE = core.kernel("moe_block_int8")


@dataclass(frozen=True)
class BlockInt8(BlockFormat):
    """Codes int8, with one scale per block of block_n outputs x block_k inputs, both multiples of 32."""

    def empty(self, n: int, k: int) -> BlockInt8Weight:
        return BlockInt8Weight(*self._allocate(n, k), n, k, self)


@dataclass(frozen=True)
class BlockInt8Weight(ByteCodes):
    """A weight[n, k] of int8 codes and scales."""

    @property
    def codes_dtype(self) -> torch.dtype:
        return torch.int8

    @property
    def kernel(self) -> int:
        return _LINEAR

    @property
    def moe_kernel(self) -> int:
        return _MOE

    def write(self, rows: Tensor, row: int = 0, col: int = 0) -> None:
        """Quantise rows[r, c] into weight[row : row + r, col : col + c]; row and col must start a scale block.

        rows: any floating-point dtype and strides. Runs in plain torch, because checkpoints hold the codes. The scale
        of a block is its largest magnitude / 127. A block with an infinity or NaN becomes NaN.
        """
        rows = block_scaled.floats("BlockInt8Weight.write: rows", rows)
        block = self.format.block_n, self.format.block_k
        block_scaled.check_rectangle("BlockInt8Weight.write: rows", rows, (self.n, self.k), (row, col), block)
        codes, scales = reference.quantise_block_int8(rows.float(), *block)
        self.write_codes(codes, row, col)
        self.write_scales(scales, row // block[0], col // block[1])
