"""NVFP4 weights, 4.5 bits a weight; activations stay bfloat16.

value = code * scale * factor: codes of E2M1 (mxfp4.py), a scale in fp8 (e4m3), not negative, for each output and 16
inputs, and a factor in float32 for each output; files have one factor for a whole weight. Products with codes are
summed group by group in fp32 and then scaled, so only sums and scales are rounded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from ..errors import KernelError
from ..weight import BLOCK_N, Layout, chosen_blocks
from . import block_scaled
from .block_scaled import HALF_N
from .checks import check_rectangle
from .int4 import nibble_values
from .mxfp4 import E2m1Weight
from .output_scaled import OutputScaledFormat

GROUP = 16

_ARRAYS = f"values[_, _, 1, 2, {HALF_N * GROUP // 2}]:u8 scales[_, _, {BLOCK_N}]:u8 factors[_, {BLOCK_N}]:f32"
_LARGEST_CODE = 126  # of e4m3; those above have a sign or are NaN


@dataclass(frozen=True)
class Nvfp4(OutputScaledFormat):
    """Codes from 0 to 15, the sign on top, and the bits of scales in e4m3."""

    group: int = GROUP

    layout = Layout("nvfp4", "FactoredWeight", _ARRAYS)
    scale_dtype = torch.uint8
    tile_inputs = GROUP

    def values(self, n: int, k: int) -> tuple[tuple[int, ...], torch.dtype]:
        return nibble_values(n, k, self.group, GROUP), torch.uint8

    def arrays(self, n: int, k: int) -> block_scaled.Arrays:
        return [*super().arrays(n, k), ((block_scaled.blocks(n), BLOCK_N), torch.float32)]

    def empty(self, n: int, k: int) -> Nvfp4Weight:
        values, scales, factors = block_scaled.allocate(self.arrays(n, k))
        return Nvfp4Weight(values, scales, None, n, k, self, factors)

    def scale_values(self, stored: Tensor) -> Tensor:
        return stored.view(torch.float8_e4m3fn).float()


@dataclass(frozen=True)
class Nvfp4Weight(E2m1Weight):
    factors: Tensor
    """[n / 32, 32], those of outputs."""

    def scratch(self, m: int) -> int:
        return block_scaled.scratch_in_vectors(self.format.layout.format, m, self.k, GROUP)

    def quantise(self, rows: Tensor, importance: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        raise KernelError("Nvfp4Weight.write: rows: floats are not quantised to NVFP4, only read from files")

    def write_scales(self, scales: Tensor, row: int = 0, group: int = 0) -> None:
        """Write scales[r, groups] float8_e4m3fn, not negative, from row `row` and group `group` on."""
        where = "Nvfp4Weight.write_scales: scales"
        if scales.dtype is not torch.float8_e4m3fn:
            raise KernelError(f"{where}: expected float8_e4m3fn, found {scales.dtype}")
        codes = scales.view(torch.uint8)
        if codes.numel() and int(codes.max()) > _LARGEST_CODE:
            raise KernelError(f"{where}: expected numbers from 0 to 448, found others")
        super().write_scales(codes, row, group)

    def write_factors(self, factors: Tensor, row: int = 0) -> None:
        """Write factors[r, 1] float32 from row `row` on."""
        check_rectangle("Nvfp4Weight.write_factors: factors", factors, (self.n, 1), (row, 0))
        rows = torch.arange(row, row + factors.shape[0])
        self.factors[rows // BLOCK_N, rows % BLOCK_N] = factors[:, 0]

    def part(self, row: int, n: int, step: int = 1) -> Self:
        return replace(super().part(row, n, step), factors=self.factors[chosen_blocks(row, n, step)])

    def unpack(self) -> Tensor:
        """Return the quantised weight[n, k] as float32, rounded once."""
        return super().unpack() * self.factors.flatten()[: self.n, None]
