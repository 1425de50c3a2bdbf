"""What formats with a byte for each code and a scale for each block share: fp8, and int8 in blocks.

A block has several outputs and inputs. Codes are exact in bfloat16; products with x are summed block by block in fp32
and then scaled, so only sums are rounded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from .. import core
from ..contract import Contract
from ..errors import KernelError
from ..weight import BLOCK_N, Layout, Operands, chosen_blocks
from . import block_scaled
from .block_scaled import HALF_N, TILE_K
from .checks import check_rectangle, check_sizes, packable

TILE_BYTES = HALF_N * TILE_K

_PACK = Contract("pack_bytes: w.values codes row:int col:int")


def byte_codes_layout(format: str) -> Layout:
    return Layout(format, "ByteCodesWeight", f"values[_, _, _, 2, {TILE_BYTES}]:u8 scales[_, _]:f32")


@dataclass(frozen=True)
class BlockFormat(ABC):
    """One scale per block of block_n outputs x block_k inputs, both multiples of 32: value = code * scale.

    A subclass gives the dtype of its codes, its layout, and how it quantises.
    """

    block_n: int = 128
    block_k: int = 128

    codes_dtype: ClassVar[torch.dtype]
    layout: ClassVar[Layout]
    quantise_kernel: ClassVar[Contract | None]
    """Does what `quantise` does, on all threads; None: there is no such kernel."""

    activations = torch.bfloat16
    operands: ClassVar[Operands] = "bf16"
    is_quantised = True

    @abstractmethod
    def quantise(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Quantise rows[r, c] float32 in plain torch.

        Returns codes [r, c] of `codes_dtype` and scales [row blocks, column blocks] float32. A block with an infinity
        or NaN becomes NaN.
        """

    @property
    def k_unit(self) -> int:
        return self.block_k

    def nbytes(self, n: int, k: int) -> int:
        return block_scaled.nbytes(self._arrays(n, k))

    def empty(self, n: int, k: int) -> ByteCodesWeight:
        values, scales = block_scaled.allocate(self._arrays(n, k))
        return ByteCodesWeight(values, scales, n, k, self)

    def _arrays(self, n: int, k: int) -> block_scaled.Arrays:
        name = type(self).__name__
        check_sizes(name, n, k)
        block_scaled.check_unit(name, "block_n", self.block_n)
        block_scaled.check_unit(name, "block_k", self.block_k)
        blocks, groups = block_scaled.blocks(n), -(-k // self.block_k)
        return [(byte_values(n, k, self.block_k), torch.uint8), ((blocks, groups), torch.float32)]


@dataclass(frozen=True)
class ByteCodesWeight(block_scaled.BlockScaledWeight):
    """A weight[n, k] of codes and scales, in the layout of csrc/block_scaled/block_scaled.h.

    Where kernels run in plain torch, `values` are the bits of the codes, [n, k] uint8.
    """

    values: Tensor
    scales: Tensor
    n: int
    k: int
    format: BlockFormat

    def write(self, rows: Tensor, row: int = 0, col: int = 0) -> None:
        """Quantise rows[r, c] into weight[row : row + r, col : col + c]; row and col must start a scale block.

        rows: any floating-point dtype and strides. The scale of a block maps its largest magnitude to the largest code.
        A block with an infinity or NaN becomes NaN.
        """
        where, block = "ByteCodesWeight.write: rows", (self.format.block_n, self.format.block_k)
        rows = packable(where, rows)
        check_rectangle(where, rows, (self.n, self.k), (row, col), block)
        if self.format.quantise_kernel is not None and not self.is_plain:
            self.format.quantise_kernel.run(self, rows, row, col, self.format.block_n)
            return
        codes, scales = self.format.quantise(rows.float())
        self.write_codes(codes, row, col)
        self.write_scales(scales, row // block[0], col // block[1])

    def write_codes(self, codes: Tensor, row: int = 0, col: int = 0) -> None:
        """Pack codes[r, c] of `format.codes_dtype` into weight[row : row + r, col : col + c]."""
        where, dtype = "ByteCodesWeight.write_codes: codes", self.format.codes_dtype
        pack_bytes(where, self, codes, dtype, (row, col))

    def write_scales(self, scales: Tensor, row_block: int = 0, col_block: int = 0) -> None:
        """Write scales[row blocks, column blocks], floats, from the given blocks on."""
        size = -(-self.n // self.format.block_n), self.scales.shape[1]
        check_rectangle("ByteCodesWeight.write_scales: scales", scales, size, (row_block, col_block))
        repeats = self.format.block_n // BLOCK_N
        place = self.scales[row_block * repeats :, col_block : col_block + scales.shape[1]]
        values = scales.float().repeat_interleave(repeats, 0)[: place.shape[0]]
        place[: values.shape[0]] = values

    def part(self, row: int, n: int, step: int = 1) -> ByteCodesWeight:
        chosen = chosen_blocks(row, n, step)
        values = self.values[row : row + n] if self.is_plain else self.values[chosen]
        return replace(self, values=values, scales=self.scales[chosen], n=n)

    def unpack(self) -> Tensor:
        """Return the quantised weight[n, k] as float32."""
        scales = self.scales.repeat_interleave(BLOCK_N, 0)[: self.n]
        codes = unpack_bytes(self.values, self.n, self.k).view(self.format.codes_dtype)
        return codes.float() * scales.repeat_interleave(self.format.block_k, 1)[:, : self.k]

    def embedding(self, ids: Tensor, first_row: int = 0) -> Tensor:
        raise KernelError(
            "ByteCodesWeight.embedding: expected a bfloat16, float32 or int8 embedding table, "
            f"found {type(self.format).__name__}"
        )


def byte_values(n: int, k: int, k_block: int) -> tuple[int, ...]:
    """Return the shape of the packed codes of a weight[n, k], uint8: [n, k] where kernels run in plain torch."""
    if core.isa() == "reference":
        return n, k
    return block_scaled.blocks(n), -(-k // k_block), k_block // TILE_K, 2, TILE_BYTES


def pack_bytes(
    where: str,
    weight: block_scaled.BlockScaledWeight,
    codes: Tensor,
    dtype: torch.dtype,
    at: tuple[int, int],
    middle: int = 0,
) -> None:
    """Pack codes[r, c] of `dtype` into the values of a weight, from row and column `at` on.

    middle: is subtracted from codes. Raises KernelError for another dtype or codes outside of the weight.
    """
    if codes.dtype is not dtype:
        raise KernelError(f"{where}: expected {str(dtype).removeprefix('torch.')}, found {codes.dtype}")
    check_rectangle(where, codes, (weight.n, weight.k), at)
    bits = codes.view(torch.uint8)
    if middle:
        bits = bits - middle
    if weight.is_plain:
        weight.values[at[0] : at[0] + codes.shape[0], at[1] : at[1] + codes.shape[1]] = bits
        return
    _PACK.run(weight, bits, *at)


def unpack_bytes(values: Tensor, n: int, k: int) -> Tensor:
    """Return the bits of packed codes, [n, k] uint8."""
    if values.ndim == 2:
        return values
    # [blocks, tiles, halves, lines, quads of outputs, pairs of inputs, outputs of a quad, inputs of a pair]
    data = values.reshape(values.shape[0], -1, 2, 8, 4, 2, 4, 2)
    plain = data.permute(0, 2, 4, 6, 1, 3, 5, 7).reshape(data.shape[0] * BLOCK_N, -1)
    return plain[:n, :k].contiguous()
