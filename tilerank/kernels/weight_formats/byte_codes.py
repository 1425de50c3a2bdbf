"""What formats with a byte for each code and a scale for each block share: fp8, and int8 in blocks.

A block has several outputs and inputs. Codes are exact in bfloat16; products with x are summed block by block in fp32
and then scaled, so only sums are rounded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from .. import core
from ..errors import KernelError
from ..weight import BLOCK_N, chosen_blocks
from . import block_scaled
from .block_scaled import HALF_N, TILE_K

_PACK = core.kernel("pack_bytes")

_TILE_BYTES = HALF_N * TILE_K


@dataclass(frozen=True)
class BlockFormat(ABC):
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

    @abstractmethod
    def empty(self, n: int, k: int) -> ByteCodes: ...

    def _allocate(self, n: int, k: int) -> tuple[Tensor, Tensor]:
        """Return values and scales of zeros."""
        values, scales = block_scaled.allocate(self._arrays(n, k))
        return values, scales

    def _arrays(self, n: int, k: int) -> block_scaled.Arrays:
        name = type(self).__name__
        block_scaled.check_sizes(f"{name}Weight", n, k)
        block_scaled.check_unit(name, "block_n", self.block_n)
        block_scaled.check_unit(name, "block_k", self.block_k)
        blocks, groups = block_scaled.blocks(n), -(-k // self.block_k)
        values: tuple[tuple[int, ...], torch.dtype]
        values = (blocks, groups, self.block_k // TILE_K, 2, _TILE_BYTES), torch.uint8
        if core.isa() == "reference":
            values = (n, k), torch.uint8
        return [values, ((blocks, groups), torch.float32)]


@dataclass(frozen=True)
class ByteCodes(block_scaled.BlockScaledWeight):
    """A weight[n, k] of codes and scales, in the layout of csrc/block_scaled/block_scaled.h.

    Where kernels run in plain torch, `values` are the bits of the codes, [n, k] uint8.
    """

    values: Tensor
    scales: Tensor
    n: int
    k: int
    format: BlockFormat

    @property
    @abstractmethod
    def codes_dtype(self) -> torch.dtype: ...

    @property
    @abstractmethod
    def kernel(self) -> int: ...

    @property
    @abstractmethod
    def moe_kernel(self) -> int: ...

    @abstractmethod
    def write(self, rows: Tensor, row: int = 0, col: int = 0) -> None: ...

    def operands(self) -> tuple[Tensor, ...]:
        return self.values, self.scales

    def write_codes(self, codes: Tensor, row: int = 0, col: int = 0) -> None:
        """Pack codes[r, c] of `codes_dtype` into weight[row : row + r, col : col + c]."""
        where = f"{type(self).__name__}.write_codes: codes"
        if codes.dtype is not self.codes_dtype:
            expected = str(self.codes_dtype).removeprefix("torch.")
            raise KernelError(f"{where}: expected {expected}, found {codes.dtype}")
        block_scaled.check_rectangle(where, codes, (self.n, self.k), (row, col))
        bits = codes.view(torch.uint8)
        if self.is_plain:
            self.values[row : row + codes.shape[0], col : col + codes.shape[1]] = bits
            return
        core.launch(_PACK, (self.values, bits), (row, col))

    def write_scales(self, scale_inv: Tensor, row_block: int = 0, col_block: int = 0) -> None:
        """Write the factors of the codes, scale_inv[row blocks, column blocks] floats, from the given blocks on."""
        size = -(-self.n // self.format.block_n), self.scales.shape[1]
        where = f"{type(self).__name__}.write_scales: scale_inv"
        block_scaled.check_rectangle(where, scale_inv, size, (row_block, col_block))
        repeats = self.format.block_n // BLOCK_N
        place = self.scales[row_block * repeats :, col_block : col_block + scale_inv.shape[1]]
        values = scale_inv.float().repeat_interleave(repeats, 0)[: place.shape[0]]
        place[: values.shape[0]] = values

    def part(self, row: int, n: int, step: int = 1) -> Self:
        chosen = chosen_blocks(row, n, step)
        values = self.values[row : row + n] if self.is_plain else self.values[chosen]
        return replace(self, values=values, scales=self.scales[chosen], n=n)

    def unpack(self) -> Tensor:
        """Return the quantised weight[n, k] as float32."""
        scales = self.scales.repeat_interleave(BLOCK_N, 0)[: self.n]
        return self._codes().float() * scales.repeat_interleave(self.format.block_k, 1)[:, : self.k]

    def _codes(self) -> Tensor:
        """Return the codes, [n, k] of `codes_dtype`."""
        if self.is_plain:
            return self.values.view(self.codes_dtype)
        # [blocks, tiles, halves, lines, quads of outputs, pairs of inputs, outputs of a quad, inputs of a pair]
        data = self.values.reshape(self.values.shape[0], -1, 2, 8, 4, 2, 4, 2)
        plain = data.permute(0, 2, 4, 6, 1, 3, 5, 7).reshape(data.shape[0] * BLOCK_N, -1)
        return plain[: self.n, : self.k].contiguous().view(self.codes_dtype)

    def embedding(self, ids: Tensor, first_row: int = 0) -> Tensor:
        raise KernelError(
            f"{type(self).__name__}.embedding: expected a bfloat16, float32 or int8 embedding table, "
            f"found {type(self.format).__name__}"
        )
