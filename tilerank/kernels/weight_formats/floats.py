"""Weights of plain floats, bfloat16 or float32, packed in tiles."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import check, core
from ..contract import Contract
from ..reference import ops as reference_ops
from ..reference import weight_formats as reference
from ..weight import BLOCK_N, TILE_ROWS, WORK_QUEUE_BYTES, Layout, Operands, chosen_blocks, round_up
from .checks import check_rectangle, check_sizes, packable

_TILE_K = 32  # csrc/linear/pack.h

FLOAT_LAYOUTS = {
    torch.float32: Layout("f32", "FloatWeight", f"data[_, _, {BLOCK_N}]:f32"),
    torch.bfloat16: Layout("bf16", "FloatWeight", f"data[_, _, {BLOCK_N * _TILE_K}]:bf16"),
}

_PACK = Contract("FloatWeight.write: w.data rows row:int col:int", kernel="pack")
_EMBEDDING = Contract(
    "FloatWeight.embedding: ids[t]:i64 first_row:int n:int k:int weight -> out[t, k]:weight", kernel="embedding_packed"
)


@dataclass(frozen=True)
class Float:
    """bfloat16 or float32 values, not quantised."""

    dtype: torch.dtype

    @property
    def activations(self) -> torch.dtype:
        return self.dtype

    @property
    def operands(self) -> Operands:
        return "bf16" if self.dtype is torch.bfloat16 else "fp32"

    @property
    def layout(self) -> Layout:
        return FLOAT_LAYOUTS[self.dtype]

    is_quantised = False
    k_unit = _TILE_K

    def nbytes(self, n: int, k: int) -> int:
        return FloatWeight.nbytes(n, k, self.dtype)

    def empty(self, n: int, k: int) -> FloatWeight:
        return FloatWeight.empty(n, k, self.dtype)


_FLOATS = {dtype: Float(dtype) for dtype in FLOAT_LAYOUTS}


def _shape(n: int, k: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Return the shape of `data` for a weight[n, k]."""
    if core.isa() == "reference":
        return n, k
    blocks = -(-n // BLOCK_N)
    return (blocks, -(-k // _TILE_K), BLOCK_N * _TILE_K) if dtype is torch.bfloat16 else (blocks, k, BLOCK_N)


@dataclass(frozen=True)
class FloatWeight:
    """A weight[n, k] of bfloat16 or float32.

    `data` has the tiles of csrc/linear/pack.h, padded with zeros: [n / 32, k / 32, 1024] bfloat16 or [n / 32, k, 32]
    float32. Where kernels run in plain torch it is [n, k].
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
        return torch.Size(_shape(n, k, dtype)).numel() * dtype.itemsize

    @classmethod
    def empty(cls, n: int, k: int, dtype: torch.dtype) -> FloatWeight:
        """Return a weight[n, k] of zeros in memory of its own (`core.alloc`)."""
        data = core.alloc(cls.nbytes(n, k, dtype), resident=True)
        return cls(data.view(dtype).view(_shape(n, k, dtype)), n, k, dtype)

    @property
    def format(self) -> Float:
        return _FLOATS[self.dtype]

    @property
    def is_plain(self) -> bool:
        return self.data.ndim == 2

    def scratch(self, m: int) -> int:
        kind = self.format.layout.format
        if core.rung_of(kind) != "amx" or self.dtype is torch.float32:
            return WORK_QUEUE_BYTES + m * (self.k + 1) * 4  # the queue and panels of rows (csrc/linear/panels-inl.h)
        if core.packs_per_thread(kind, m):
            return 0
        return round_up(m, TILE_ROWS) * round_up(self.k, _TILE_K) * 2  # packed rows of x

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
        _PACK.run(self, rows, row, col)

    def part(self, row: int, n: int, step: int = 1) -> FloatWeight:
        data = self.data[row : row + n] if self.is_plain else self.data[chosen_blocks(row, n, step)]
        return FloatWeight(data, n, self.k, self.dtype)

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
        if self.dtype is torch.bfloat16:
            # [blocks, k / 32, halves of 16 outputs, pairs of inputs, outputs, inputs of a pair]
            plain = torch.unflatten(self.data, 2, (2, 16, 16, 2)).permute(0, 2, 4, 1, 3, 5)
        else:
            plain = self.data.transpose(1, 2)
        return plain.reshape(self.data.shape[0] * BLOCK_N, -1)[: self.n, : self.k].contiguous()
