"""Int8 weights with int8 activations (w8a8): half the bytes of bfloat16 and twice its products per cycle.

Each row of the weight, and every 64 inputs of each row of x at run time, are quantised symmetrically: scale = largest
magnitude / 127, code = round(value / scale) with ties to even. Sums of 64 products of codes are exact in int32. They
are multiplied with the scales of x and added in fp32, by one fused multiply-add each, in the order of the inputs on
every rung, so that all rungs give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from .. import check, core
from ..contract import Contract
from ..errors import KernelError
from ..reference import ops as reference_ops
from ..reference import weight_formats as reference
from ..weight import BLOCK_N, TILE_ROWS, Layout, Operands, chosen_blocks, round_up
from .checks import packable

_TILE_K = 64  # csrc/linear/int8.h
_ZERO = 128  # what is stored for code 0


def int8_layout(format: str) -> Layout:
    return Layout(format, "Int8Weight", f"codes[_, _]:u8 scales[_, {BLOCK_N}]:f32")


_LAYOUT = int8_layout("int8")

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
    """One symmetric scale per output; activations get one for every 64 inputs at run time."""

    layout: ClassVar[Layout] = _LAYOUT
    activations = torch.bfloat16
    operands: ClassVar[Operands] = "int8"
    is_quantised = True
    k_unit = _TILE_K

    def nbytes(self, n: int, k: int) -> int:
        """Return the bytes that a weight[n, k] takes, padding included."""
        if n < 1 or not 1 <= k <= _MAX_INPUTS:
            raise KernelError(
                f"{type(self).__name__}: n, k: expected positive sizes and at most {_MAX_INPUTS} inputs, found {n}, {k}"
            )
        if core.isa() == "reference":
            return n * (k + 4)
        return round_up(n, BLOCK_N) * (round_up(k, _TILE_K) + 4)

    def empty(self, n: int, k: int) -> Int8Weight:
        memory, rows = core.alloc(self.nbytes(n, k), resident=True), round_up(n, BLOCK_N)
        if core.isa() == "reference":
            scales, codes = torch.split(memory, [4 * n, n * k])
            return Int8Weight(codes.view(torch.int8).view(n, k), scales.view(torch.float32), n, k, self)
        codes, scales = torch.split(memory, [len(memory) - 4 * rows, 4 * rows])
        codes, scales = codes.view(rows // BLOCK_N, -1), scales.view(torch.float32).view(-1, BLOCK_N)
        return Int8Weight(codes, scales, n, k, self)

    def product(self, x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        """Return x[m, k] @ (codes[n, k] * scales[n]).T in plain torch."""
        return reference.product_int8(x, codes, scales)


@dataclass(frozen=True)
class Int8Weight:
    """A weight[n, k] of int8 codes with one scale per output.

    codes: uint8, code + 128, in tiles, [n / 32, ...] (csrc/linear/int8.h); scales: float32 [n / 32, 32].
    Where kernels run in plain torch they are int8 [n, k] and [n].
    """

    codes: Tensor
    scales: Tensor
    n: int
    k: int
    format: Int8

    @property
    def is_plain(self) -> bool:
        return self.scales.ndim == 1

    def scratch(self, m: int) -> int:
        """Return the bytes for the codes of x, and for a scale and a start of sums for every row and tile; with few
        rows every thread quantises them for itself."""
        format = self.format.layout.format
        if core.packs_per_thread(format, m):
            return 0
        rung = core.rung_of(format)
        rows = round_up(m, TILE_ROWS) if rung == "amx" else m
        code_bytes = 2 if rung == "avx2" else 1
        return rows * round_up(self.k, _TILE_K) // _TILE_K * (_TILE_K * code_bytes + 8)

    def product(self, x: Tensor) -> Tensor:
        return self.format.product(x, *self._plain())

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
        chosen = slice(row, row + n) if self.is_plain else chosen_blocks(row, n, step)
        return replace(self, codes=self.codes[chosen], scales=self.scales[chosen], n=n)

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
        stored = tiles.permute(0, 2, 4, 1, 3, 5).reshape(tiles.shape[0] * BLOCK_N, -1)[: self.n, : self.k]
        return (stored.to(torch.int16) - _ZERO).to(torch.int8), self.scales.flatten()[: self.n]

    def embedding(self, ids: Tensor, first_row: int = 0) -> Tensor:
        """Return rows [t, k] of the weight in bfloat16 for ids[t] int64; ids outside [first_row, first_row + n) give
        zeros.
        """
        _EMBEDDING.check(ids)
        if core.isa() == "reference" or self.is_plain:
            return reference_ops.embedding(ids, self.unpack().to(torch.bfloat16), first_row)
        return _EMBEDDING(ids, self, first_row, self.n, self.k)
