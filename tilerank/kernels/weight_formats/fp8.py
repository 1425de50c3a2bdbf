"""Fp8 weights (e4m3fn) with one scale per block, half the bytes of bfloat16; activations stay bfloat16.

The format of DeepSeek-V3 checkpoints (arXiv 2412.19437): value = code * scale_inv of its block of 128 x 128. Codes are
exact in bfloat16, subnormals and NaN included.
"""

import torch
from torch import Tensor

from ..contract import Contract
from ..reference import weight_formats as reference
from .byte_codes import BlockFormat, byte_codes_layout


class Fp8(BlockFormat):
    """Codes e4m3fn, of magnitudes up to 448."""

    codes_dtype = torch.float8_e4m3fn
    layout = byte_codes_layout("fp8")
    quantise_kernel = Contract(
        "ByteCodesWeight.write: w:weight source row:int col:int block_n:int", kernel="quantise_fp8", layout=layout
    )

    def quantise(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return reference.quantise_fp8(rows, self.block_n, self.block_k)
