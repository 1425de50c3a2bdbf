"""The packed linear layer: weights in the layout that the products read, any sizes, fp32 accumulation."""

from dataclasses import dataclass

import torch
from torch import Tensor

from . import check, core, reference
from .errors import KernelError

_PACK = core.kernel("pack")
_EMBEDDING = core.kernel("embedding_packed")
_LINEAR = {torch.bfloat16: core.kernel("linear_bf16"), torch.float32: core.kernel("linear_f32")}

# The layout is defined in csrc/pack.h.
_BLOCK_N = 32
_BLOCK_K = 32
_TILE_ROWS = 16

_SOURCES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_ACTIVATIONS = (torch.float32, torch.bfloat16)


def _padded(n: int, k: int, dtype: torch.dtype) -> tuple[int, int]:
    """The sizes of a packed weight[n, k]."""
    return -(-n // _BLOCK_N) * _BLOCK_N, -(-k // _BLOCK_K) * _BLOCK_K if dtype is torch.bfloat16 else k


@dataclass(frozen=True)
class PackedWeight:
    """A weight[n, k], bfloat16 or float32, as the kernels read it.

    data is flat and in tiles (csrc/pack.h), padded with zeros, or [n, k] where kernels run in plain torch.
    """

    data: Tensor
    n: int
    k: int
    dtype: torch.dtype

    @staticmethod
    def nbytes(n: int, k: int, dtype: torch.dtype) -> int:
        """Bytes that a packed weight[n, k] takes, padding included."""
        if dtype not in _LINEAR:
            raise KernelError(f"PackedWeight: dtype: expected bfloat16 or float32, found {dtype}")
        if n < 1 or k < 1:
            raise KernelError(f"PackedWeight: n, k: expected positive sizes, found {n}, {k}")
        rows, columns = (n, k) if core.isa() == "reference" else _padded(n, k, dtype)
        return rows * columns * dtype.itemsize

    @classmethod
    def empty(cls, n: int, k: int, dtype: torch.dtype) -> "PackedWeight":
        """All zeros, in memory of its own (`core.alloc`)."""
        data = core.alloc(cls.nbytes(n, k, dtype)).view(dtype)
        return cls(data.view(n, k) if core.isa() == "reference" else data, n, k, dtype)

    @property
    def _plain(self) -> bool:
        return self.data.shape == (self.n, self.k)  # a block is longer than k

    def write(self, rows: Tensor, row: int = 0, col: int = 0) -> None:
        """Converts and packs rows[r, c] to where weight[row : row + r, col : col + c] is; the rest stays as it is.

        rows: any floating-point dtype and strides, for example a slice of a file mapping. Runs on all threads.
        """
        if rows.ndim != 2 or not rows.is_floating_point():
            raise KernelError(
                f"PackedWeight.write: rows: expected a matrix of floats, found {list(rows.shape)} {rows.dtype}"
            )
        r, c = rows.shape
        if row < 0 or col < 0 or row + r > self.n or col + c > self.k:
            raise KernelError(
                f"PackedWeight.write: rows: expected a rectangle inside [{self.n}, {self.k}], "
                f"found [{r}, {c}] at row {row}, column {col}"
            )
        if self._plain:
            self.data[row : row + r, col : col + c] = rows
            return
        if rows.dtype not in _SOURCES:
            rows = rows.to(torch.float32)
        core.launch(_PACK, (self.data.view(-(-self.n // _BLOCK_N), -1), rows.detach()), (row, col))

    def embedding(self, ids: Tensor, first_row: int = 0) -> Tensor:
        """`ops.embedding` for a table that is the output head's weight as well: rows of the weight, [t, k].

        ids: [t] int64; those outside [first_row, first_row + n) give zeros.
        """
        check.tensor("PackedWeight.embedding", "ids", ids, (None,), torch.int64)
        if core.isa() == "reference" or self._plain:
            return reference.embedding(ids, self.data if self._plain else self.unpack(), first_row)
        out = core.empty((ids.shape[0], self.k), self.dtype)
        core.launch(_EMBEDDING, (ids, self.data, out), (first_row, self.n, self.k))
        return out

    def unpack(self) -> Tensor:
        """The plain weight[n, k]."""
        if self._plain:
            return self.data.clone()
        n, k = _padded(self.n, self.k, self.dtype)
        if self.dtype is torch.bfloat16:
            tiles = self.data.view(n // _BLOCK_N, k // _BLOCK_K, 2, 16, 16, 2)  # blocks, k, halves, pairs, outputs, 2
            plain = tiles.permute(0, 2, 4, 1, 3, 5).reshape(n, k)
        else:
            plain = self.data.view(n // _BLOCK_N, k, _BLOCK_N).transpose(1, 2).reshape(n, k)
        return plain[: self.n, : self.k].contiguous()


def linear(x: Tensor, w: PackedWeight, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """x[..., k] @ weight[n, k].T + bias[n] -> [..., n].

    x: dtype of the weight; bias: float32 or bfloat16, contiguous; out_dtype: float32 or bfloat16, default x.dtype.
    Accumulated in fp32, the bias added in fp32, rounded once. A row of the result does not depend on the other rows.
    """
    out_dtype = out_dtype or x.dtype
    if x.dtype != w.dtype or x.ndim < 1 or x.shape[-1] != w.k:
        raise KernelError(
            f"linear: x: expected [..., {w.k}] {w.dtype} as the weight, found {list(x.shape)} {x.dtype}",
        )
    if out_dtype not in _ACTIVATIONS:
        raise KernelError(f"linear: out_dtype: expected float32 or bfloat16, found {out_dtype}")
    if bias is not None and (bias.shape != (w.n,) or bias.dtype not in _ACTIVATIONS or not bias.is_contiguous()):
        raise KernelError(
            f"linear: bias: expected contiguous [{w.n}] float32 or bfloat16, found {list(bias.shape)} {bias.dtype}"
        )
    if core.isa() == "reference" or w._plain:
        return reference.linear(x, w.unpack(), bias, out_dtype=out_dtype)
    rows = x.reshape(-1, w.k)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    m = rows.shape[0]
    out = core.empty((m, w.n), out_dtype)
    if m == 0:
        return out.view(*x.shape[:-1], w.n)
    scratch = None
    if x.dtype is torch.bfloat16 and core.isa() == "amx":
        scratch = core.empty((-(-m // _TILE_ROWS) * _TILE_ROWS, _padded(w.n, w.k, w.dtype)[1]), x.dtype)
    core.launch(_LINEAR[x.dtype], (rows, w.data, bias, out, scratch))
    return out.view(*x.shape[:-1], w.n)
