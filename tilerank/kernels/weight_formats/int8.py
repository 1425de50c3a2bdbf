"""Int8 weights with int8 activations (w8a8): half the bytes of bfloat16 and twice its products per cycle.

Each row of the weight, and each row of x at run time, is quantised symmetrically: scale = largest magnitude / 127,
code = round(value / scale) with ties to even. Sums of products of codes are exact in int32 on every rung and are scaled
once in fp32, so all rungs give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import check, core
from ..contract import Contract
from ..errors import KernelError
from ..reference import ops as reference_ops
from ..reference import weight_formats as reference
from ..weight import BLOCK_N, TILE_ROWS, Layout, chosen_blocks, round_up
from .checks import packable

_LAYOUT = Layout("int8", "Int8Weight", f"codes[_, _]:i8 scales[_, {BLOCK_N}]:f32 sums[_, {BLOCK_N}]:i32")
_TILE_K = 64  # csrc/linear/int8.h

_QUANTISE = Contract("Int8Weight.write: w:weight rows row:int", kernel="quantise_int8", layout=_LAYOUT)
_PACK = Contract("Int8Weight.write_codes: w:weight codes scales[r]:f32 row:int", kernel="pack_int8", layout=_LAYOUT)
_EMBEDDING = Contract(
    "Int8Weight.embedding: ids[t]:i64 w:weight first_row:int n:int k:size -> out[t, k]:bf16",
    kernel="embedding_int8",
    layout=_LAYOUT,
)

_MAX_INPUTS = 1 << 17
"""Sums of 2^17 products of 127 and -128 fit into 32 bits."""


@dataclass(frozen=True)
class Int8:
    """One symmetric scale per output; activations are quantised row by row at run time."""

    layout = _LAYOUT
    activations = torch.bfloat16
    is_quantised = True
    k_unit = _TILE_K

    def nbytes(self, n: int, k: int) -> int:
        return Int8Weight.nbytes(n, k)

    def empty(self, n: int, k: int) -> Int8Weight:
        return Int8Weight.empty(n, k)


@dataclass(frozen=True)
class Int8Weight:
    """A weight[n, k] of int8 codes with one scale per output.

    codes: int8 in tiles, [n / 32, ...], padded with zeros (csrc/linear/int8.h); scales: float32 [n / 32, 32];
    sums: int32 [n / 32, 32], the sum of each output's codes.
    Where kernels run in plain torch they are [n, k], [n] and [0].
    """

    codes: Tensor
    scales: Tensor
    sums: Tensor
    n: int
    k: int

    @staticmethod
    def nbytes(n: int, k: int) -> int:
        """Return the bytes that a weight[n, k] takes, padding included."""
        if n < 1 or not 1 <= k <= _MAX_INPUTS:
            raise KernelError(
                f"Int8Weight: n, k: expected positive sizes and at most {_MAX_INPUTS} inputs, found {n}, {k}"
            )
        if core.isa() == "reference":
            return n * (k + 4)
        return round_up(n, BLOCK_N) * (round_up(k, _TILE_K) + 8)

    @classmethod
    def empty(cls, n: int, k: int) -> Int8Weight:
        """Return a weight[n, k] of zeros in memory of its own (`core.alloc`)."""
        nbytes = cls.nbytes(n, k)
        if core.isa() == "reference":
            none = torch.zeros(0, dtype=torch.int32)
            return cls(torch.zeros(n, k, dtype=torch.int8), torch.zeros(n), none, n, k)
        blocks = round_up(n, BLOCK_N) // BLOCK_N
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

    def scratch(self, m: int) -> int:
        """Return the bytes for the codes and scales of x; with few rows every thread quantises them for itself."""
        if core.packs_per_thread(_LAYOUT.format, m):
            return 0
        rung = core.rung_of(_LAYOUT.format)
        rows = round_up(m, TILE_ROWS) if rung == "amx" else m
        code_bytes = 2 if rung == "avx2" else 1
        return rows * round_up(self.k, _TILE_K) * code_bytes + m * 4

    def product(self, x: Tensor) -> Tensor:
        return reference.product_int8(x, *self._plain())

    def write(self, rows: Tensor, row: int = 0, col: int = 0) -> None:
        """Quantise rows[r, k] into weight[row : row + r]; the rest is unchanged.

        rows: any floating-point dtype and strides, for example a slice of a file mapping. Runs on all threads.
        A row with an infinity or NaN becomes NaN.
        """
        rows = packable("Int8Weight.write: rows", rows)
        self._check_rows("write", rows, row, col)
        if self.is_plain:
            place = slice(row, row + rows.shape[0])
            self.codes[place], self.scales[place] = reference_ops.quantise_rows(rows.float())
            return
        _QUANTISE.run(self, rows, row)

    def write_codes(self, codes: Tensor, scales: Tensor, row: int = 0) -> None:
        """Pack quantised rows: weight[row : row + r] = codes[r, k] int8 * scales[r] float32."""
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
        _PACK.run(self, codes, scales, row)

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
        chosen = chosen_blocks(row, n, step)
        return Int8Weight(self.codes[chosen], self.scales[chosen], self.sums[chosen], n, self.k)

    def unpack(self) -> Tensor:
        """Return the quantised weight[n, k] as float32."""
        codes, scales = self._plain()
        return codes * scales[:, None]

    def _plain(self) -> tuple[Tensor, Tensor]:
        """Return codes [n, k] and scales [n]."""
        if self.is_plain:
            return self.codes, self.scales
        # [blocks, k / 64, halves of 16 outputs, quads of inputs, outputs, inputs of a quad]
        tiles = self.codes.view(self.codes.shape[0], -1, 2, 16, 16, 4)
        codes = tiles.permute(0, 2, 4, 1, 3, 5).reshape(tiles.shape[0] * BLOCK_N, -1)
        return codes[: self.n, : self.k].contiguous(), self.scales.flatten()[: self.n]

    def embedding(self, ids: Tensor, first_row: int = 0) -> Tensor:
        """Return rows [t, k] of the weight in bfloat16 for ids[t] int64; ids outside [first_row, first_row + n) give
        zeros.
        """
        _EMBEDDING.check(ids)
        if core.isa() == "reference" or self.is_plain:
            return reference_ops.embedding(ids, self.unpack().to(torch.bfloat16), first_row)
        return _EMBEDDING(ids, self, first_row, self.n, self.k)
