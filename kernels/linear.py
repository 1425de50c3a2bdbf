"""The packed linear layer: any weight format, any sizes, fp32 sums, and what follows a product fused into it.

`linear` is the one face. A weight format is a `Weight` class, which holds the weight as its kernels read it and names
them, and a `Format`, which says what such a weight takes before there is one (`formats.py` has them all). Here is the
plain one: bfloat16 or float32.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from . import check, core, reference
from .errors import KernelError

Activation = Literal["silu_mul", "gelu", "gelu_tanh"]

_ACTIVATIONS: dict[str | None, int] = {None: 0, "silu_mul": 1, "gelu": 2, "gelu_tanh": 3}
"""The numbers are those of csrc/epilogue.h."""

_PACK = core.kernel("pack")
_EMBEDDING = core.kernel("embedding_packed")
_LINEAR = {torch.bfloat16: core.kernel("linear_bf16"), torch.float32: core.kernel("linear_f32")}
_MOE = {torch.bfloat16: core.kernel("moe_bf16"), torch.float32: core.kernel("moe_f32")}

# The layout is defined in csrc/pack.h.
BLOCK_N = 32
_BLOCK_K = 32
_TILE_ROWS = 16

DEAL_BYTES = 64
"""Of the counter from which threads take work (csrc/deal.h)."""

_SOURCES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Format(Protocol):
    """How weights are held: a value, equal to others that say the same."""

    @property
    def activations(self) -> torch.dtype:
        """Of the x that such weights are multiplied with."""
        ...

    @property
    def k_unit(self) -> int:
        """Where columns are cut without cost: a multiple of this."""
        ...

    def nbytes(self, n: int, k: int) -> int:
        """Bytes that a weight[n, k] takes, padding included."""
        ...

    def empty(self, n: int, k: int) -> "Weight":
        """All zeros, in memory of its own (`core.alloc`)."""
        ...


class Weight(Protocol):
    """A weight[n, k] as the kernels read it. Every array of it is in blocks of 32 outputs, one stride from each other,
    so that weights on top of each other are one taller weight.
    """

    @property
    def format(self) -> Format: ...
    @property
    def n(self) -> int: ...
    @property
    def k(self) -> int: ...

    def write(self, rows: Tensor, row: int = 0, col: int = 0) -> None:
        """Converts and packs rows[r, c] to where weight[row : row + r, col : col + c] is; the rest stays as it is."""
        ...

    def unpack(self) -> Tensor:
        """The plain weight[n, k]."""
        ...

    def embedding(self, ids: Tensor, first_row: int = 0) -> Tensor:
        """Rows of the weight [t, k] for ids[t] int64; ids outside [first_row, first_row + n) give zeros."""
        ...

    def part(self, row: int, n: int, step: int = 1) -> "Weight":
        """The weight[n, k] in every `step`-th block of 32 rows from `row` on, a multiple of 32: a view, to write and to
        unpack; a plain one has no steps.
        """
        ...

    # What `linear` asks for:

    @property
    def is_plain(self) -> bool:
        """Was it made for plain torch, so that `product` computes?"""
        ...

    @property
    def kernel(self) -> int:
        """The compiled kernel (`core.kernel`), which gets the tensors x[m, k], bias, residual, out, scratch, operands
        and the activation's number (csrc/epilogue.h).
        """
        ...

    @property
    def moe_kernel(self) -> int:
        """The same for experts (`moe.moe`), which gets x, ids, weights, middle, partial, out (csrc/experts.h) and the
        operands of both weights, with the number of experts and their width.
        """
        ...

    def operands(self) -> tuple[Tensor, ...]:
        """Tensors that the kernels read the weight from."""
        ...

    def scratch(self, m: int) -> int:
        """Bytes that the kernel wants, on the rung in force, for all threads together and m rows."""
        ...

    def product(self, x: Tensor) -> Tensor:
        """x[m, k] @ weight.T in plain torch, [m, n] float32: what the kernel computes before its epilogue."""
        ...


@dataclass(frozen=True)
class Float:
    """bfloat16 or float32, unchanged."""

    dtype: torch.dtype

    @property
    def activations(self) -> torch.dtype:
        return self.dtype

    @property
    def k_unit(self) -> int:
        return _BLOCK_K

    def nbytes(self, n: int, k: int) -> int:
        return PackedWeight.nbytes(n, k, self.dtype)

    def empty(self, n: int, k: int) -> "PackedWeight":
        return PackedWeight.empty(n, k, self.dtype)


_FLOATS = {dtype: Float(dtype) for dtype in _LINEAR}


def _padded(n: int, k: int, dtype: torch.dtype) -> tuple[int, int]:
    """The sizes of a packed weight[n, k]."""
    return -(-n // BLOCK_N) * BLOCK_N, -(-k // _BLOCK_K) * _BLOCK_K if dtype is torch.bfloat16 else k


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
        data = core.alloc(cls.nbytes(n, k, dtype), resident=True).view(dtype)
        return cls(data.view(n, k) if core.isa() == "reference" else data, n, k, dtype)

    @property
    def format(self) -> Float:
        return _FLOATS[self.dtype]

    @property
    def is_plain(self) -> bool:
        return self.data.shape == (self.n, self.k)  # a block is longer than k

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
            return DEAL_BYTES + m * (self.k + 1) * 4  # and panels of rows (csrc/panels.h)
        if core.packed_alone(m):
            return 0
        return -(-m // _TILE_ROWS) * _TILE_ROWS * _padded(self.n, self.k, self.dtype)[1] * 2  # packed rows of x

    def product(self, x: Tensor) -> Tensor:
        return reference.product(x, self.data if self.is_plain else self.unpack())

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
        if self.is_plain:
            self.data[row : row + r, col : col + c] = rows
            return
        if rows.dtype not in _SOURCES:
            rows = rows.to(torch.float32)
        core.launch(_PACK, (self.data.view(-(-self.n // BLOCK_N), -1), rows.detach()), (row, col))

    def part(self, row: int, n: int, step: int = 1) -> "PackedWeight":
        if self.is_plain:
            return PackedWeight(self.data[row : row + n], n, self.k, self.dtype)
        blocks = self.data.view(-(-self.n // BLOCK_N), -1)
        first, count = row // BLOCK_N, -(-n // BLOCK_N)
        return PackedWeight(blocks[first : first + (count - 1) * step + 1 : step], n, self.k, self.dtype)

    def embedding(self, ids: Tensor, first_row: int = 0) -> Tensor:
        """`ops.embedding` for a table that is the output head's weight as well: rows of the weight, [t, k].

        ids: [t] int64; those outside [first_row, first_row + n) give zeros.
        """
        check.tensor("PackedWeight.embedding", "ids", ids, (None,), torch.int64)
        if core.isa() == "reference" or self.is_plain:
            return reference.embedding(ids, self.data if self.is_plain else self.unpack(), first_row)
        out = core.empty((ids.shape[0], self.k), self.dtype)
        core.launch(_EMBEDDING, (ids, self.data, out), (first_row, self.n, self.k))
        return out

    def unpack(self) -> Tensor:
        """The plain weight[n, k]."""
        if self.is_plain:
            return self.data.clone()
        n, k = _padded(self.n, self.k, self.dtype)
        if self.dtype is torch.bfloat16:
            tiles = self.data.view(n // BLOCK_N, k // _BLOCK_K, 2, 16, 16, 2)  # blocks, k, halves, pairs, outputs, 2
            plain = tiles.permute(0, 2, 4, 1, 3, 5).reshape(n, k)
        else:
            plain = self.data.view(n // BLOCK_N, k, BLOCK_N).transpose(1, 2).reshape(n, k)
        return plain[: self.n, : self.k].contiguous()


def linear(
    x: Tensor,
    w: Weight,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    activation: Activation | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """activation(x[..., k] @ weight[n, k].T + bias[n]) + residual -> [..., n]; [..., n / 2] after "silu_mul".

    x: dtype `w.format.activations`; bias: float32 or bfloat16, contiguous; residual: float32 or bfloat16, in the shape
    of the result; out_dtype: float32 or bfloat16, default x.dtype. All in fp32, rounded once. A row of the result
    depends on the same row of x alone.
    activation: "gelu" (with erf), "gelu_tanh" (its approximation), or "silu_mul": silu(gate) * up for a weight whose
    32-row blocks are gate and up in turn, and its bias likewise.
    """
    out_dtype = out_dtype or x.dtype
    sizes = x.shape
    if x.dtype != w.format.activations or not sizes or sizes[-1] != w.k:
        raise KernelError(
            f"linear: x: expected [..., {w.k}] {w.format.activations} for the weight, found {list(x.shape)} {x.dtype}",
        )
    if out_dtype not in check.ACTIVATIONS:
        raise KernelError(f"linear: out_dtype: expected float32 or bfloat16, found {out_dtype}")
    if bias is not None and (bias.shape != (w.n,) or bias.dtype not in check.ACTIVATIONS or not bias.is_contiguous()):
        raise KernelError(
            f"linear: bias: expected contiguous [{w.n}] float32 or bfloat16, found {list(bias.shape)} {bias.dtype}"
        )
    if activation not in _ACTIVATIONS:
        raise KernelError(f"linear: activation: expected silu_mul, gelu, gelu_tanh or None, found {activation!r}")
    width = w.n
    if activation == "silu_mul":
        width //= 2
        if w.n % (2 * BLOCK_N):
            raise KernelError(
                f"linear: silu_mul: expected a weight of blocks of 32 gate and 32 up rows, found {w.n} rows"
            )
    shape = (*sizes[:-1], width)
    if residual is not None and (residual.shape != shape or residual.dtype not in check.ACTIVATIONS):
        raise KernelError(
            f"linear: residual: expected {list(shape)} float32 or bfloat16, "
            f"found {list(residual.shape)} {residual.dtype}"
        )
    rows = _rows(x)
    residual = None if residual is None else _rows(residual)
    if core.isa() == "reference" or w.is_plain:
        return reference.epilogue(w.product(rows), bias, residual, activation, out_dtype).view(shape)
    m = sizes[0] if rows is x else rows.shape[0]
    # Logits go on as they are; what else comes out is more than twice as fast to write that way.
    out = (core.empty if out_dtype == torch.float32 else core.empty_rows)((m, width), out_dtype)
    if m:
        scratch = w.scratch(m)
        working = core.empty((scratch,), torch.uint8) if scratch else None
        core.launch(w.kernel, (rows, bias, residual, out, working, *w.operands()), (_ACTIVATIONS[activation],))
    return out if rows is x else out.view(shape)


def _rows(x: Tensor) -> Tensor:
    """As a matrix whose rows are contiguous."""
    rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])  # a view costs as much as the launch
    return rows if rows.stride(1) == 1 else rows.contiguous()
