"""Int4 weights with one scale per group of inputs, a quarter of the bytes of bfloat16; activations stay bfloat16.

value = (code - zero) * scale with codes 0 to 15; zero is 8, or given per group. Codes are exact in bfloat16. Products
with x are summed group by group in fp32 and then scaled, so only sums are rounded. Scales are stored as float16, times
256: float16 and bfloat16 scales of checkpoints from 2^-22 to 255 are represented exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import core
from ..contract import Contract
from ..errors import KernelError
from ..reference import weight_formats as reference
from ..weight import BLOCK_N
from . import block_scaled
from .block_scaled import HALF_N, TILE_K
from .checks import check_rectangle
from .output_scaled import OutputScaledFormat, OutputScaledWeight, output_scaled_layout

TILE_BYTES = HALF_N * TILE_K // 2

_LAYOUT = output_scaled_layout("int4", TILE_BYTES, "f16")
_PACK = Contract("Int4Weight.write_codes: w.values codes row:int col:int", kernel="pack_int4")


@dataclass(frozen=True)
class Int4(OutputScaledFormat):
    """Codes from 0 to 15."""

    layout = _LAYOUT

    def values(self, n: int, k: int) -> tuple[tuple[int, ...], torch.dtype]:
        return nibble_values(n, k, self.k_block), torch.int8 if core.isa() == "reference" else torch.uint8

    def empty(self, n: int, k: int) -> Int4Weight:
        values, scales, *zeros = block_scaled.allocate(self.arrays(n, k))
        return Int4Weight(values, scales, zeros[0] if zeros else None, n, k, self)


@dataclass(frozen=True)
class Int4Weight(OutputScaledWeight):
    """Where kernels run in plain torch, `values` are code - 8, [n, k] int8."""

    middle = 8

    quantise_kernel = Contract(
        "Int4Weight.write: w:weight source row:int col:int importance[_]?:f32",
        kernel="quantise_int4",
        layout=_LAYOUT,
    )

    def quantise(self, rows: Tensor, importance: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        zero_points = self.format.zero_points
        codes, scales, zeros = reference.quantise_int4(rows, self.format.group or self.k, zero_points, importance)
        return codes, scales, zeros if zero_points else None

    def write_codes(self, codes: Tensor, row: int = 0, col: int = 0) -> None:
        """Pack codes[r, c] uint8, 0 to 15, into weight[row : row + r, col : col + c]."""
        if codes.dtype is not torch.uint8:
            raise KernelError(f"Int4Weight.write_codes: codes: expected uint8, found {codes.dtype}")
        check_rectangle("Int4Weight.write_codes: codes", codes, (self.n, self.k), (row, col))
        if self.is_plain:
            self.values[row : row + codes.shape[0], col : col + codes.shape[1]] = codes.to(torch.int8) - 8
            return
        _PACK.run(self, codes, row, col)

    def codes(self) -> Tensor:
        """Return code - 8, [n, k] int8."""
        return self.values if self.is_plain else (unpack_nibbles(self.values, self.n, self.k) ^ 8).to(torch.int8) - 8


def nibble_values(n: int, k: int, k_block: int, tile: int = TILE_K) -> tuple[int, ...]:
    """Return the shape of the packed codes of a weight[n, k]: [n, k] where kernels run in plain torch.

    tile: inputs of a tile.
    """
    if core.isa() == "reference":
        return n, k
    return block_scaled.blocks(n), -(-k // k_block), k_block // tile, 2, HALF_N * tile // 2


def unpack_nibbles(values: Tensor, n: int, k: int) -> Tensor:
    """Return packed codes as numbers from 0 to 15, [n, k] uint8."""
    # [blocks, tiles, halves, lines, outputs, inputs of a pair, bytes, nibbles]
    data = values.reshape(values.shape[0], -1, 2, values.shape[-1] // 64, 16, 2, 2)
    nibbles = torch.stack([data & 15, data >> 4], -1)
    return nibbles.permute(0, 2, 4, 1, 3, 6, 7, 5).reshape(data.shape[0] * BLOCK_N, -1)[:n, :k]
