"""Fp8 weights (e4m3fn) with one scale per block, half the bytes of bfloat16; activations stay bfloat16.

The format of DeepSeek-V3 checkpoints (arXiv 2412.19437): value = code * scale_inv of its block of 128 x 128. Codes are
exact in bfloat16, subnormals and NaN included.
"""

import torch
from torch import Tensor

from .. import core
from ..reference import weight_formats as reference
from .byte_codes import BlockFormat


class Fp8(BlockFormat):
    """Codes e4m3fn, of magnitudes up to 448."""

    codes_dtype = torch.float8_e4m3fn
    kernel = core.kernel("linear_fp8")
    moe_kernel = core.kernel("moe_fp8")
    quantise_kernel = core.kernel("quantise_fp8")

    def quantise(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return reference.quantise_fp8(rows, self.block_n, self.block_k)
