"""Fp8 weights (e4m3fn) with one scale per block, half the bytes of bfloat16; activations stay bfloat16.

The format of DeepSeek-V3 checkpoints (arXiv 2412.19437): value = code * scale_inv of its block of 128 x 128. Codes are
exact in bfloat16, subnormals and NaN included. Products with x are summed block by block in fp32 and then scaled, so
only sums are rounded.
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

_QUANTISE = core.kernel("quantise_fp8")
_PACK = core.kernel("pack_fp8")
_LINEAR = core.kernel("linear_fp8")
_MOE = core.kernel("moe_fp8")

_TILE_BYTES = HALF_N * TILE_K


@dataclass(frozen=True)
class Fp8:
    """One scale per block of block_n outputs x block_k inputs, both multiples of 32."""

    block_n: int = 128
    block_k: int = 128

    @property
    def activations(self) -> torch.dtype:
        return torch.bfloat16

    @property
    def is_quantised(self) -> bool:
        return True

    @property
    def k_unit(self) -> int:
        return self.block_k

    def nbytes(self, n: int, k: int) -> int:
        return block_scaled.nbytes(self._arrays(n, k))

    def empty(self, n: int, k: int) -> Fp8Weight:
        values, scales = block_scaled.allocate(self._arrays(n, k))
        return Fp8Weight(values, scales, n, k, self)

    def _arrays(self, n: int, k: int) -> block_scaled.Arrays:
        block_scaled.check_sizes("Fp8Weight", n, k)
        block_scaled.check_unit("Fp8", "block_n", self.block_n)
        block_scaled.check_unit("Fp8", "block_k", self.block_k)
        blocks, groups = block_scaled.blocks(n), -(-k // self.block_k)
        values: tuple[tuple[int, ...], torch.dtype]
        values = (blocks, groups, self.block_k // TILE_K, 2, _TILE_BYTES), torch.uint8
        if core.isa() == "reference":
            values = (n, k), torch.uint8
        return [values, ((blocks, groups), torch.float32)]


@dataclass(frozen=True)
class Fp8Weight(block_scaled.BlockScaledWeight):
    """A weight[n, k] of fp8 codes and scales, in the layout of csrc/block_scaled/block_scaled.h.

    Where kernels run in plain torch, `values` are the bits of the codes, [n, k] uint8.
    """

    values: Tensor
    scales: Tensor
    n: int
    k: int
    format: Fp8

    @property
    def kernel(self) -> int:
        return _LINEAR

    @property
    def moe_kernel(self) -> int:
        return _MOE

    def operands(self) -> tuple[Tensor, ...]:
        return self.values, self.scales

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

    def write_codes(self, codes: Tensor, row: int = 0, col: int = 0) -> None:
        """Pack codes[r, c] float8_e4m3fn into weight[row : row + r, col : col + c]."""
        if codes.dtype is not torch.float8_e4m3fn:
            raise KernelError(f"Fp8Weight.write_codes: codes: expected float8_e4m3fn, found {codes.dtype}")
        block_scaled.check_rectangle("Fp8Weight.write_codes: codes", codes, (self.n, self.k), (row, col))
        bits = codes.view(torch.uint8)
        if self.is_plain:
            self.values[row : row + codes.shape[0], col : col + codes.shape[1]] = bits
            return
        core.launch(_PACK, (self.values, bits), (row, col))

    def write_scales(self, scale_inv: Tensor, row_block: int = 0, col_block: int = 0) -> None:
        """Write the factors of the codes, scale_inv[row blocks, column blocks] floats, from the given blocks on."""
        size = -(-self.n // self.format.block_n), self.scales.shape[1]
        block_scaled.check_rectangle("Fp8Weight.write_scales: scale_inv", scale_inv, size, (row_block, col_block))
        repeats = self.format.block_n // BLOCK_N
        place = self.scales[row_block * repeats :, col_block : col_block + scale_inv.shape[1]]
        values = scale_inv.float().repeat_interleave(repeats, 0)[: place.shape[0]]
        place[: values.shape[0]] = values

    def part(self, row: int, n: int, step: int = 1) -> Fp8Weight:
        chosen = chosen_blocks(row, n, step)
        values = self.values[row : row + n] if self.is_plain else self.values[chosen]
        return Fp8Weight(values, self.scales[chosen], n, self.k, self.format)

    def unpack(self) -> Tensor:
        """Return the quantised weight[n, k] as float32."""
        scales = self.scales.repeat_interleave(BLOCK_N, 0)[: self.n]
        return self._codes().float() * scales.repeat_interleave(self.format.block_k, 1)[:, : self.k]

    def _codes(self) -> Tensor:
        """Return the codes, [n, k] float8_e4m3fn."""
        if self.is_plain:
            return self.values.view(torch.float8_e4m3fn)
        # [blocks, tiles, halves, lines, quads of outputs, pairs of inputs, outputs of a quad, inputs of a pair]
        data = self.values.reshape(self.values.shape[0], -1, 2, 8, 4, 2, 4, 2)
        plain = data.permute(0, 2, 4, 6, 1, 3, 5, 7).reshape(data.shape[0] * BLOCK_N, -1)
        return plain[: self.n, : self.k].contiguous().view(torch.float8_e4m3fn)

    def embedding(self, ids: Tensor, first_row: int = 0) -> Tensor:
        raise KernelError("Fp8Weight.embedding: expected a bfloat16, float32 or int8 embedding table, found fp8")
