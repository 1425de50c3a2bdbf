"""Weights of plain floats, bfloat16 or float32, packed in tiles."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import check, core
from ..contract import Contract
from ..reference import ops as reference_ops
from ..reference import weight_formats as reference
from ..weight import BLOCK_N, TILE_ROWS, WORK_QUEUE_BYTES, chosen_blocks, round_up
from .checks import check_rectangle, check_sizes, packable

_PACK = core.kernel("pack")
_EMBEDDING = Contract(
    "FloatWeight.embedding: ids[t]:i64 first_row:int n:int k:int weight -> out[t, k]:weight", kernel="embedding_packed"
)
_LINEAR = {torch.bfloat16: core.kernel("linear_bf16"), torch.float32: core.kernel("linear_f32")}
_MOE = {torch.bfloat16: core.kernel("moe_bf16"), torch.float32: core.kernel("moe_f32")}

_TILE_K = 32  # csrc/linear/pack.h


@dataclass(frozen=True)
class Float:
    """bfloat16 or float32 values, not quantised."""

    dtype: torch.dtype

    @property
    def activations(self) -> torch.dtype:
        return self.dtype

    is_quantised = False
    k_unit = _TILE_K

    def nbytes(self, n: int, k: int) -> int:
        return FloatWeight.nbytes(n, k, self.dtype)

    def empty(self, n: int, k: int) -> FloatWeight:
        return FloatWeight.empty(n, k, self.dtype)


_FLOATS = {dtype: Float(dtype) for dtype in _LINEAR}


def _padded(n: int, k: int, dtype: torch.dtype) -> tuple[int, int]:
    """Return the sizes of a weight[n, k] after padding."""
    return round_up(n, BLOCK_N), round_up(k, _TILE_K) if dtype is torch.bfloat16 else k


@dataclass(frozen=True)
class FloatWeight:
    """A weight[n, k] of bfloat16 or float32.

    `data` is flat, in the tiles of csrc/linear/pack.h and padded with zeros, or [n, k] where kernels run in plain
    torch.
    """

    data: Tensor
    n: int
    k: int
    dtype: torch.dtype

    @staticmethod
    def nbytes(n: int, k: int, dtype: torch.dtype) -> int:
        """Return the bytes that a weight[n, k] takes, padding included."""
        check.dtype("FloatWeight", "dtype", dtype)
        check_sizes("FloatWeight", n, k)
        rows, columns = (n, k) if core.isa() == "reference" else _padded(n, k, dtype)
        return rows * columns * dtype.itemsize

    @classmethod
    def empty(cls, n: int, k: int, dtype: torch.dtype) -> FloatWeight:
        """Return a weight[n, k] of zeros in memory of its own (`core.alloc`)."""
        data = core.alloc(cls.nbytes(n, k, dtype), resident=True).view(dtype)
        return cls(data.view(n, k) if core.isa() == "reference" else data, n, k, dtype)

    @property
    def format(self) -> Float:
        return _FLOATS[self.dtype]

    @property
    def is_plain(self) -> bool:
        return self.data.shape == (self.n, self.k)  # a row of packed data is a block: longer than k

    @property
    def kernel(self) -> int:
        return _LINEAR[self.dtype]

    @property
    def moe_kernel(self) -> int:
        return _MOE[self.dtype]

    def operands(self) -> tuple[Tensor, ...]:
        return (self.data,)

    def scratch(self, m: int) -> int:
        if core.isa() != "amx" or self.dtype is torch.float32:
            return WORK_QUEUE_BYTES + m * (self.k + 1) * 4  # the queue and panels of rows (csrc/linear/panels-inl.h)
        if core.packs_per_thread(m):
            return 0
        return round_up(m, TILE_ROWS) * _padded(self.n, self.k, self.dtype)[1] * 2  # packed rows of x

    def product(self, x: Tensor) -> Tensor:
        return reference.product(x, self.data if self.is_plain else self.unpack())

    def write(self, rows: Tensor, row: int = 0, col: int = 0) -> None:
        """Convert and pack rows[r, c] into weight[row : row + r, col : col + c]; the rest is unchanged.

        rows: any floating-point dtype and strides, for example a slice of a file mapping. Runs on all threads.
        """
        rows = packable("FloatWeight.write: rows", rows)
        check_rectangle("FloatWeight.write: rows", rows, (self.n, self.k), (row, col))
        if self.is_plain:
            self.data[row : row + rows.shape[0], col : col + rows.shape[1]] = rows
            return
        core.launch(_PACK, (self._blocks(), rows), (row, col))

    def part(self, row: int, n: int, step: int = 1) -> FloatWeight:
        data = self.data[row : row + n] if self.is_plain else self._blocks()[chosen_blocks(row, n, step)]
        return FloatWeight(data, n, self.k, self.dtype)

    def _blocks(self) -> Tensor:
        """Return `data` as [blocks of 32 outputs, elements]."""
        return self.data.view(-(-self.n // BLOCK_N), -1)

    def embedding(self, ids: Tensor, first_row: int = 0) -> Tensor:
        """Return `ops.embedding` of an embedding table that is also the weight of the output head.

        ids: [t] int64; ids outside [first_row, first_row + n) give zeros. Returns [t, k].
        """
        _EMBEDDING.check(ids)
        if core.isa() == "reference" or self.is_plain:
            return reference_ops.embedding(ids, self.data if self.is_plain else self.unpack(), first_row)
        return _EMBEDDING(ids, first_row, self.n, self.k, self.data)

    def unpack(self) -> Tensor:
        if self.is_plain:
            return self.data.clone()
        n, k = _padded(self.n, self.k, self.dtype)
        if self.dtype is torch.bfloat16:
            # [blocks, k / 32, halves of 16 outputs, pairs of inputs, outputs, inputs of a pair]
            tiles = self.data.view(n // BLOCK_N, k // _TILE_K, 2, 16, 16, 2)
            plain = tiles.permute(0, 2, 4, 1, 3, 5).reshape(n, k)
        else:
            plain = self.data.view(n // BLOCK_N, k, BLOCK_N).transpose(1, 2).reshape(n, k)
        return plain[: self.n, : self.k].contiguous()
