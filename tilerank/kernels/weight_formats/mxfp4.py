"""MXFP4 weights (OCP Microscaling Formats 1.0), 4.25 bits a weight; activations stay bfloat16.

value = code * 2^(e - 127): codes of E2M1, which are 0, 0.5, 1, 1.5, 2, 3, 4 and 6 below a sign, and an exponent e
(E8M0) for each output and 32 inputs. The exponent 255 is NaN. Values are exact in bfloat16. Products with codes are
summed block by block in fp32 and then scaled, so only sums are rounded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..contract import Contract
from ..errors import KernelError
from ..reference import weight_formats as reference
from . import block_scaled
from .block_scaled import TILE_K
from .checks import check_rectangle
from .int4 import TILE_BYTES, nibble_values, unpack_nibbles
from .output_scaled import OutputScaledFormat, OutputScaledWeight, output_scaled_layout

_LAYOUT = output_scaled_layout("mxfp4", TILE_BYTES, "u8")
_QUANTISE = Contract(
    "quantise_mxfp4: rows[r, k]:f32 -> codes[r, (k + 31) // 32 * 32]:u8 exponents[r, (k + 31) // 32]:u8",
    reference.quantise_mxfp4,
)
_PACK = Contract("E2m1Weight.write_codes: w.values codes row:int col:int", kernel="pack_e2m1")


@dataclass(frozen=True)
class Mxfp4(OutputScaledFormat):
    """Codes from 0 to 15, the sign on top, and exponents from 0 to 254."""

    group: int = TILE_K

    layout = _LAYOUT
    scale_dtype = torch.uint8

    def values(self, n: int, k: int) -> tuple[tuple[int, ...], torch.dtype]:
        return nibble_values(n, k, self.k_block), torch.uint8

    def empty(self, n: int, k: int) -> Mxfp4Weight:
        values, scales = block_scaled.allocate(self.arrays(n, k))
        return Mxfp4Weight(values, scales, None, n, k, self)

    def scale_values(self, stored: Tensor) -> Tensor:
        return reference.powers_of_two(stored)


class E2m1Weight(OutputScaledWeight):
    """A weight of codes of E2M1. Where kernels run in plain torch, `values` are the codes, [n, k] uint8."""

    def write_codes(self, codes: Tensor, row: int = 0, col: int = 0) -> None:
        """Pack codes[r, c] uint8, 0 to 15, into weight[row : row + r, col : col + c]."""
        name = f"{type(self).__name__}.write_codes"
        if codes.dtype is not torch.uint8:
            raise KernelError(f"{name}: codes: expected uint8, found {codes.dtype}")
        check_rectangle(f"{name}: codes", codes, (self.n, self.k), (row, col))
        if self.is_plain:
            self.values[row : row + codes.shape[0], col : col + codes.shape[1]] = codes
            return
        _PACK.run(self, codes, row, col)

    def codes(self) -> Tensor:
        """Return what the codes stand for, [n, k] float32."""
        codes = self.values if self.is_plain else unpack_nibbles(self.values, self.n, self.k)
        return reference.E2M1[codes.int()]


@dataclass(frozen=True)
class Mxfp4Weight(E2m1Weight):
    def quantise(self, rows: Tensor, importance: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        codes, exponents = _QUANTISE.run(rows.contiguous())
        return codes, exponents, None
