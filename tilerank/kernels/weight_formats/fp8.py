"""Fp8 weights (e4m3fn) with one scale per block, half the bytes of bfloat16; activations stay bfloat16.

The format of DeepSeek-V3 checkpoints (arXiv 2412.19437): value = code * scale_inv of its block of 128 x 128. Codes are
exact in bfloat16, subnormals and NaN included.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import core
from ..reference import weight_formats as reference
from . import block_scaled
from .byte_codes import BlockFormat, ByteCodes

_QUANTISE = core.kernel("quantise_fp8")
_LINEAR = core.kernel("linear_fp8")
_MOE = core.kernel("moe_fp8")


@dataclass(frozen=True)
class Fp8(BlockFormat):
    """Codes e4m3fn, with one scale per block of block_n outputs x block_k inputs, both multiples of 32."""

    def empty(self, n: int, k: int) -> Fp8Weight:
        return Fp8Weight(*self._allocate(n, k), n, k, self)


@dataclass(frozen=True)
class Fp8Weight(ByteCodes):
    """A weight[n, k] of fp8 codes and scales."""

    @property
    def codes_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn

    @property
    def kernel(self) -> int:
        return _LINEAR

    @property
    def moe_kernel(self) -> int:
        return _MOE

    def write(self, rows: Tensor, row: int = 0, col: int = 0) -> None:
        """Quantise rows[r, c] into weight[row : row + r, col : col + c]; row and col must start a scale block.

        rows: any floating-point dtype and strides. Runs on all threads. The scale of a block is its largest magnitude
        / 448. A block with an infinity or NaN becomes NaN.
        """
        rows = block_scaled.floats("Fp8Weight.write: rows", rows)
        block = self.format.block_n, self.format.block_k
        block_scaled.check_rectangle("Fp8Weight.write: rows", rows, (self.n, self.k), (row, col), block)
        if not self.is_plain:
            core.launch(_QUANTISE, (self.values, self.scales, rows), (row, col, self.format.block_n))
            return
        codes, scales = reference.quantise_fp8(rows.float(), *block)
        self.write_codes(codes, row, col)
        self.write_scales(scales, row // block[0], col // block[1])
