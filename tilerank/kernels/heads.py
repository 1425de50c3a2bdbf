"""Views of rows as heads and of heads as rows."""

from torch import Tensor

from . import core
from .errors import KernelError


def split_heads(rows: Tensor, first: int, heads: int, dim: int) -> Tensor:
    """Return rows[:, first : first + heads * dim] as a view [m, heads, dim]. rows: [m, n]."""
    return core.view(rows, (rows.shape[0], heads, dim), (rows.stride(0), dim, 1), first)


def columns_of(rows: Tensor, first: int, count: int) -> Tensor:
    """Return rows[:, first : first + count] as a view. rows: [m, n]."""
    return core.view(rows, (rows.shape[0], count), rows.stride(), first)


def part_of_heads(x: Tensor, first: int, dim: int) -> Tensor:
    """Return x[:, :, first : first + dim] as a view. x: [m, heads, n]."""
    return core.view(x, (*x.shape[:2], dim), x.stride(), first)


def join_heads(x: Tensor) -> Tensor:
    """Return x[m, heads, dim] as a view [m, heads * dim].

    Raises KernelError if the heads of a row are not contiguous.
    """
    m, heads, dim = x.shape
    if (heads > 1 and x.stride(1) != dim) or (dim > 1 and x.stride(2) != 1):
        raise KernelError(f"join_heads: x: expected strides [any, {dim}, 1], found {list(x.stride())}")
    return core.view(x, (m, heads * dim), (x.stride(0), 1))
