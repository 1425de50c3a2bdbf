"""Rows as heads and heads as rows: views, no kernels."""

from torch import Tensor

from . import core
from .errors import KernelError


def split_heads(rows: Tensor, first: int, heads: int, dim: int) -> Tensor:
    """rows[m, n] -> [m, heads, dim], a view: the columns from `first` on."""
    return core.view(rows, (rows.shape[0], heads, dim), (rows.stride(0), dim, 1), first)


def join_heads(x: Tensor) -> Tensor:
    """x[m, heads, dim] -> [m, heads * dim], a view. KernelError where the heads of a row do not follow each other."""
    m, heads, dim = x.shape
    if (heads > 1 and x.stride(1) != dim) or (dim > 1 and x.stride(2) != 1):
        raise KernelError(f"join_heads: x: expected strides [any, {dim}, 1], found {list(x.stride())}")
    return core.view(x, (m, heads * dim), (x.stride(0), 1))
