"""Fp8 weights (e4m3fn) with a scale for each output, or for each output and group of inputs, half the bytes of
bfloat16; activations stay bfloat16.

Without groups, the format of compressed-tensors' `float-quantized` files whose weights were scaled by channel. With
groups, what is quantised while loading: the rounding errors of 4 significant bits depend on where numbers lie between
two powers of 2, so that a scale that suits a group saves a third of their squares.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..contract import Contract
from ..reference import weight_formats as reference
from . import block_scaled
from .byte_codes import TILE_BYTES, byte_values, pack_bytes
from .group_int8 import OutputScaledBytes
from .output_scaled import OutputScaledFormat, output_scaled_layout, quantise_rows

_LAYOUT = output_scaled_layout("channel_fp8", TILE_BYTES, "f32")


@dataclass(frozen=True)
class ChannelFp8(OutputScaledFormat):
    """Codes e4m3fn, and scales in float32."""

    group: int = 0

    layout = _LAYOUT
    scale_dtype = torch.float32

    def values(self, n: int, k: int) -> tuple[tuple[int, ...], torch.dtype]:
        return byte_values(n, k, self.k_block), torch.uint8

    def empty(self, n: int, k: int) -> ChannelFp8Weight:
        values, scales = block_scaled.allocate(self.arrays(n, k))
        return ChannelFp8Weight(values, scales, None, n, k, self)


@dataclass(frozen=True)
class ChannelFp8Weight(OutputScaledBytes):
    codes_dtype = torch.float8_e4m3fn
    quantise_kernel = Contract(
        "ChannelFp8Weight.write: w:weight source row:int col:int importance[_]?:f32",
        kernel="quantise_channel_fp8",
        layout=_LAYOUT,
    )

    def quantise(self, rows: Tensor, importance: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        if self.format.group:
            codes, scales = reference.quantise_channel_fp8(rows, self.format.group, importance)
            return codes, scales, None
        steps, scales = quantise_rows(rows, 0, 448, 0.0)
        return steps.to(torch.float8_e4m3fn), scales, None

    def write_codes(self, codes: Tensor, row: int = 0, col: int = 0) -> None:
        """Pack codes[r, c] float8_e4m3fn into weight[row : row + r, col : col + c]."""
        pack_bytes("ChannelFp8Weight.write_codes: codes", self, codes, torch.float8_e4m3fn, (row, col))
