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
from ..errors import KernelError
from ..reference import weight_formats as reference
from ..weight import BLOCK_N, chosen_blocks
from . import block_scaled
from .block_scaled import HALF_N, TILE_K
from .checks import check_rectangle, check_sizes, packable

_QUANTISE = core.kernel("quantise_int4")
_PACK = core.kernel("pack_int4")

_NONE = torch.empty(0)
"""Stands for an absent operand: kernels treat a tensor without data as absent. A recorded step creates no tensors, so
it is created once."""

_SCALE_UNIT = 1 / 256
_LARGEST_SCALE = 65504 * _SCALE_UNIT
_TILE_BYTES = HALF_N * TILE_K // 2


@dataclass(frozen=True)
class Int4:
    """One scale per output and `group` inputs, a multiple of 32; optionally one zero point as well."""

    group: int
    zero_points: bool = False

    activations = torch.bfloat16
    is_quantised = True

    @property
    def k_unit(self) -> int:
        return self.group

    def nbytes(self, n: int, k: int) -> int:
        return block_scaled.nbytes(self._arrays(n, k))

    def empty(self, n: int, k: int) -> Int4Weight:
        values, scales, *zeros = block_scaled.allocate(self._arrays(n, k))
        return Int4Weight(values, scales, zeros[0] if zeros else None, n, k, self)

    def _arrays(self, n: int, k: int) -> block_scaled.Arrays:
        check_sizes("Int4", n, k)
        block_scaled.check_unit("Int4", "group", self.group)
        blocks, groups = block_scaled.blocks(n), -(-k // self.group)
        packed = (blocks, groups, self.group // TILE_K, 2, _TILE_BYTES), torch.uint8
        values = ((n, k), torch.int8) if core.isa() == "reference" else packed
        by_group = blocks, groups, BLOCK_N
        zeros = [(by_group, torch.int8)] if self.zero_points else []
        return [values, (by_group, torch.float16), *zeros]


@dataclass(frozen=True)
class Int4Weight(block_scaled.BlockScaledWeight):
    """A weight[n, k] of int4 codes, scales and zero points, in the layout of csrc/block_scaled/block_scaled.h.

    Where kernels run in plain torch, `values` are code - 8, [n, k] int8.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor | None
    n: int
    k: int
    format: Int4

    kernel = core.kernel("linear_int4")
    moe_kernel = core.kernel("moe_int4")

    def operands(self) -> tuple[Tensor, ...]:
        return self.values, self.scales, _NONE if self.zeros is None else self.zeros

    def write(self, rows: Tensor, row: int = 0, col: int = 0) -> None:
        """Quantise rows[r, c] into weight[row : row + r, col : col + c]; col must start a group.

        rows: any floating-point dtype and strides. Runs on all threads. Several scales (and zeros) near the one that
        just covers the extreme values of a group are tried; the one with the least squared error is used. A group with
        an infinity or NaN becomes NaN. Inputs of the last group beyond the last column become 0.
        """
        where, group = "Int4Weight.write: rows", self.format.group
        rows = packable(where, rows)
        check_rectangle(where, rows, (self.n, self.k), (row, col), (1, group))
        if not self.is_plain:
            core.launch(_QUANTISE, (self.values, self.scales, self.zeros, rows), (row, col))
            return
        codes, scales, zeros = reference.quantise_int4(rows.float(), group, self.format.zero_points)
        self.write_codes(codes[:, : self.k - col], row, col)
        self.write_scales(scales, row, col // group)
        if self.format.zero_points:
            self.write_zeros(zeros, row, col // group)

    def write_codes(self, codes: Tensor, row: int = 0, col: int = 0) -> None:
        """Pack codes[r, c] uint8, 0 to 15, into weight[row : row + r, col : col + c]."""
        if codes.dtype is not torch.uint8:
            raise KernelError(f"Int4Weight.write_codes: codes: expected uint8, found {codes.dtype}")
        check_rectangle("Int4Weight.write_codes: codes", codes, (self.n, self.k), (row, col))
        if self.is_plain:
            self.values[row : row + codes.shape[0], col : col + codes.shape[1]] = codes.to(torch.int8) - 8
            return
        core.launch(_PACK, (self.values, codes), (row, col))

    def write_scales(self, scales: Tensor, row: int = 0, group: int = 0) -> None:
        """Write scales[r, groups], floats of magnitude up to 255, from row `row` and group `group` on."""
        self._check_groups("write_scales: scales", scales, row, group)
        most = scales.abs().amax().item() if scales.numel() else 0
        if most > _LARGEST_SCALE:
            raise KernelError(
                f"Int4Weight.write_scales: scales: expected magnitudes up to {_LARGEST_SCALE}, found {most}"
            )
        self._put(self.scales, (scales.float() / _SCALE_UNIT).to(torch.float16), row, group)

    def write_zeros(self, zeros: Tensor, row: int = 0, group: int = 0) -> None:
        """Write the codes that stand for 0, zeros[r, groups] uint8, from row `row` and group `group` on."""
        if self.zeros is None or zeros.dtype is not torch.uint8:
            raise KernelError(
                f"Int4Weight.write_zeros: zeros: expected uint8 for a weight with zero points, found {zeros.dtype} for "
                f"one with{'out' if self.zeros is None else ''}"
            )
        self._check_groups("write_zeros: zeros", zeros, row, group)
        self._put(self.zeros, zeros.to(torch.int8) - 8, row, group)

    def _check_groups(self, name: str, values: Tensor, row: int, group: int) -> None:
        check_rectangle(f"Int4Weight.{name}", values, (self.n, self.scales.shape[1]), (row, group))

    @staticmethod
    def _put(array: Tensor, values: Tensor, row: int, group: int) -> None:
        """Write values[rows, groups] into array[blocks, groups, 32]."""
        rows = torch.arange(row, row + values.shape[0])
        array[rows // BLOCK_N, group : group + values.shape[1], rows % BLOCK_N] = values

    def part(self, row: int, n: int, step: int = 1) -> Int4Weight:
        chosen = chosen_blocks(row, n, step)
        values = self.values[row : row + n] if self.is_plain else self.values[chosen]
        zeros = None if self.zeros is None else self.zeros[chosen]
        return Int4Weight(values, self.scales[chosen], zeros, n, self.k, self.format)

    def unpack(self) -> Tensor:
        """Return the quantised weight[n, k] as float32."""
        values = self._codes().float()
        scales = self._by_input(self.scales).float() * _SCALE_UNIT
        return values * scales if self.zeros is None else (values - self._by_input(self.zeros)) * scales

    def _codes(self) -> Tensor:
        """Return code - 8, [n, k] int8."""
        if self.is_plain:
            return self.values
        # [blocks, tiles, halves, lines, outputs, inputs of a pair, bytes, nibbles]
        data = self.values.reshape(self.values.shape[0], -1, 2, 4, 16, 2, 2)
        nibbles = torch.stack([data & 15, data >> 4], -1)
        codes = nibbles.permute(0, 2, 4, 1, 3, 6, 7, 5).reshape(data.shape[0] * BLOCK_N, -1)[: self.n, : self.k]
        return (codes ^ 8).to(torch.int8) - 8

    def _by_input(self, array: Tensor) -> Tensor:
        """Expand array[blocks, groups, 32] to [n, k]."""
        plain = array.transpose(1, 2).flatten(0, 1)[: self.n]
        return plain.repeat_interleave(self.format.group, 1)[:, : self.k]

    def embedding(self, ids: Tensor, first_row: int = 0) -> Tensor:
        raise KernelError("Int4Weight.embedding: expected a bfloat16, float32 or int8 embedding table, found int4")
