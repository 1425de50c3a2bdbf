"""Int8 weights with int8 activations (w8a8): half the bytes of bfloat16, and twice its products a cycle.

A row of a weight, and a row of x when it is multiplied, is codes times a step: step = largest magnitude / 127, code =
round(value / step) with ties to even. Their sums of products are exact in int32 on every rung, and one scaling in fp32
follows, so that all rungs give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import check, core, reference
from .errors import KernelError
from .linear import BLOCK_N

_QUANTISE = core.kernel("quantise_int8")
_PACK = core.kernel("pack_int8")
_EMBEDDING = core.kernel("embedding_int8")
_LINEAR = core.kernel("linear_int8")
_MOE = core.kernel("moe_int8")

# The layout is defined in csrc/int8.h.
_BLOCK_K = 64
_TILE_ROWS = 16

_MOST_INPUTS = 1 << 17
"""2^17 products of 127 and -128 stay within 32 bits."""

_SOURCES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _up_to(n: int, unit: int) -> int:
    return -(-n // unit) * unit


@dataclass(frozen=True)
class Int8:
    """One scale for every output, symmetric; activations are quantised row by row as they come."""

    @property
    def activations(self) -> torch.dtype:
        return torch.bfloat16

    @property
    def k_unit(self) -> int:
        return _BLOCK_K

    def nbytes(self, n: int, k: int) -> int:
        return Int8Weight.nbytes(n, k)

    def empty(self, n: int, k: int) -> Int8Weight:
        return Int8Weight.empty(n, k)


@dataclass(frozen=True)
class Int8Weight:
    """A weight[n, k] as codes and a scale for each output.

    codes: int8 in tiles, a row for every 32 outputs, padded with zeros (csrc/int8.h), scales: float32 [n / 32, 32], and
    sums of an output's codes: int32 [n / 32, 32]; or [n, k], [n] and [0] where kernels run in plain torch.
    """

    codes: Tensor
    scales: Tensor
    sums: Tensor
    n: int
    k: int

    @staticmethod
    def nbytes(n: int, k: int) -> int:
        """Bytes that a weight[n, k] takes, padding included."""
        if n < 1 or not 1 <= k <= _MOST_INPUTS:
            raise KernelError(
                f"Int8Weight: n, k: expected positive sizes and at most {_MOST_INPUTS} inputs, found {n}, {k}"
            )
        if core.isa() == "reference":
            return n * (k + 4)
        return _up_to(n, BLOCK_N) * (_up_to(k, _BLOCK_K) + 8)

    @classmethod
    def empty(cls, n: int, k: int) -> Int8Weight:
        """All zeros, in memory of its own (`core.alloc`)."""
        nbytes = cls.nbytes(n, k)
        if core.isa() == "reference":
            none = torch.zeros(0, dtype=torch.int32)
            return cls(torch.zeros(n, k, dtype=torch.int8), torch.zeros(n), none, n, k)
        blocks = _up_to(n, BLOCK_N) // BLOCK_N
        data = core.alloc(nbytes, resident=True)
        outputs = blocks * BLOCK_N
        codes, scales, sums = torch.split(data, [nbytes - 8 * outputs, 4 * outputs, 4 * outputs])
        return cls(
            codes.view(torch.int8).view(blocks, -1),
            scales.view(torch.float32).view(blocks, BLOCK_N),
            sums.view(torch.int32).view(blocks, BLOCK_N),
            n,
            k,
        )

    @property
    def format(self) -> Int8:
        return Int8()

    @property
    def is_plain(self) -> bool:
        return self.scales.ndim == 1

    @property
    def kernel(self) -> int:
        return _LINEAR

    @property
    def moe_kernel(self) -> int:
        return _MOE

    def operands(self) -> tuple[Tensor, ...]:
        return self.codes, self.scales, self.sums

    def scratch(self, m: int) -> int:
        """Codes and steps of x."""
        if core.packed_alone(m):
            return 0
        rows = _up_to(m, _TILE_ROWS) if core.isa() == "amx" else m
        code_bytes = 2 if core.isa() == "avx2" else 1
        return rows * _up_to(self.k, _BLOCK_K) * code_bytes + m * 4

    def product(self, x: Tensor) -> Tensor:
        return reference.product_int8(x, *self._plain())

    def write(self, rows: Tensor, row: int = 0, col: int = 0) -> None:
        """Quantises rows[r, k] to where weight[row : row + r] is; the rest stays as it is.

        rows: any floating-point dtype and strides, for example a slice of a file mapping. Runs on all threads.
        A row with an infinity or NaN becomes NaN.
        """
        if rows.ndim != 2 or not rows.is_floating_point():
            raise KernelError(
                f"Int8Weight.write: rows: expected a matrix of floats, found {list(rows.shape)} {rows.dtype}"
            )
        self._check_rows("write", rows, row, col)
        if rows.dtype not in _SOURCES:
            rows = rows.to(torch.float32)
        if self.is_plain:
            place = slice(row, row + rows.shape[0])
            self.codes[place], self.scales[place] = reference.quantise_rows(rows.float())
            return
        core.launch(_QUANTISE, (self.codes, self.scales, self.sums, rows.detach()), (row,))

    def write_codes(self, codes: Tensor, scales: Tensor, row: int = 0) -> None:
        """Packs rows that were quantised before: weight[row : row + r] = codes[r, k] int8 * scales[r] float32."""
        if codes.ndim != 2 or codes.dtype is not torch.int8:
            raise KernelError(
                f"Int8Weight.write_codes: codes: expected a matrix of int8, found {list(codes.shape)} {codes.dtype}"
            )
        check.tensor("Int8Weight.write_codes", "scales", scales, (codes.shape[0],), torch.float32)
        self._check_rows("write_codes", codes, row, 0)
        if self.is_plain:
            place = slice(row, row + codes.shape[0])
            self.codes[place], self.scales[place] = codes, scales
            return
        core.launch(_PACK, (self.codes, self.scales, self.sums, codes, scales), (row,))

    def _check_rows(self, method: str, rows: Tensor, row: int, col: int) -> None:
        r, c = rows.shape
        if row < 0 or row + r > self.n or (col, c) != (0, self.k):
            raise KernelError(
                f"Int8Weight.{method}: rows: expected whole rows inside [{self.n}, {self.k}], "
                f"found [{r}, {c}] at row {row}, column {col}"
            )

    def part(self, row: int, n: int, step: int = 1) -> Int8Weight:
        if self.is_plain:
            return Int8Weight(self.codes[row : row + n], self.scales[row : row + n], self.sums, n, self.k)
        first, count = row // BLOCK_N, -(-n // BLOCK_N)
        chosen = slice(first, first + (count - 1) * step + 1, step)
        return Int8Weight(self.codes[chosen], self.scales[chosen], self.sums[chosen], n, self.k)

    def unpack(self) -> Tensor:
        """What the weight[n, k] was rounded to, float32."""
        codes, scales = self._plain()
        return codes * scales[:, None]

    def _plain(self) -> tuple[Tensor, Tensor]:
        """Codes [n, k] and scales [n]."""
        if self.is_plain:
            return self.codes, self.scales
        tiles = self.codes.view(self.codes.shape[0], -1, 2, 16, 16, 4)  # blocks, k, halves, fours, outputs, 4
        codes = tiles.permute(0, 2, 4, 1, 3, 5).reshape(tiles.shape[0] * BLOCK_N, -1)
        return codes[: self.n, : self.k].contiguous(), self.scales.flatten()[: self.n]

    def embedding(self, ids: Tensor, first_row: int = 0) -> Tensor:
        """Rows of the weight [t, k] in bfloat16; ids: [t] int64, outside [first_row, first_row + n) give zeros."""
        check.tensor("Int8Weight.embedding", "ids", ids, (None,), torch.int64)
        if core.isa() == "reference" or self.is_plain:
            return reference.embedding(ids, self.unpack().to(torch.bfloat16), first_row)
        out = core.empty((ids.shape[0], self.k), torch.bfloat16)
        core.launch(_EMBEDDING, (ids, self.codes, self.scales, out), (first_row, self.n))
        return out
