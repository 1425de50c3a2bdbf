"""Int8 weights with one scale per block, as fp8 weights have it; activations stay bfloat16.

The format of DeepSeek-V3 checkpoints that were quantised again for hardware without fp8 (meituan/DeepSeek-R1-Block-INT8
on Hugging Face): value = code * scale_inv of its block of 128 x 128. Codes from -128 to 127 are exact in bfloat16.
"""

import torch
from torch import Tensor

from ..reference import weight_formats as reference
from .byte_codes import BlockFormat, byte_codes_layout


class BlockInt8(BlockFormat):
    """Codes int8; `quantise` uses those of magnitudes up to 127."""

    codes_dtype = torch.int8
    layout = byte_codes_layout("block_int8")
    quantise_kernel = None  # checkpoints hold the codes

    def quantise(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return reference.quantise_block_int8(rows, self.block_n, self.block_k)
