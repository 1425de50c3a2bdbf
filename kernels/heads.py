"""Rows as heads and heads as rows: views, no kernels."""

from torch import Tensor

from . import core


def split_heads(rows: Tensor, first: int, heads: int, dim: int) -> Tensor:
    """rows[m, n] -> [m, heads, dim], a view: the columns from `first` on."""
    return core.view(rows, (rows.shape[0], heads, dim), (rows.stride(0), dim, 1), first)


def join_heads(x: Tensor) -> Tensor:
    """x[m, heads, dim] -> [m, heads * dim], a view; each x[i] is contiguous."""
    m, heads, dim = x.shape
    return core.view(x, (m, heads * dim), (x.stride(0), 1))
