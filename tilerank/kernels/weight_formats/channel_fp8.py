"""Fp8 weights (e4m3fn) with one scale for each output, half the bytes of bfloat16; activations stay bfloat16.

The format of compressed-tensors' `float-quantized` files whose weights were scaled by channel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import block_scaled
from .byte_codes import TILE_BYTES, byte_values, pack_bytes
from .group_int8 import OutputScaledBytes
from .output_scaled import OutputScaledFormat, output_scaled_layout, quantise_rows


@dataclass(frozen=True)
class ChannelFp8(OutputScaledFormat):
    """Codes e4m3fn, and scales in float32."""

    group: int = 0

    layout = output_scaled_layout("channel_fp8", TILE_BYTES, "f32")
    scale_dtype = torch.float32

    def values(self, n: int, k: int) -> tuple[tuple[int, ...], torch.dtype]:
        return byte_values(n, k, self.k_block), torch.uint8

    def empty(self, n: int, k: int) -> ChannelFp8Weight:
        values, scales = block_scaled.allocate(self.arrays(n, k))
        return ChannelFp8Weight(values, scales, None, n, k, self)


@dataclass(frozen=True)
class ChannelFp8Weight(OutputScaledBytes):
    codes_dtype = torch.float8_e4m3fn

    def quantise(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        steps, scales = quantise_rows(rows, 0, 448, 0.0)
        return steps.to(torch.float8_e4m3fn), scales, None

    def write_codes(self, codes: Tensor, row: int = 0, col: int = 0) -> None:
        """Pack codes[r, c] float8_e4m3fn into weight[row : row + r, col : col + c]."""
        pack_bytes("ChannelFp8Weight.write_codes: codes", self, codes, torch.float8_e4m3fn, (row, col))
