"""Checks of the arguments of weights: sizes, and the rows that are written to them."""

import torch
from torch import Tensor

from ..errors import KernelError
from ..weight import SOURCE_DTYPES


def check_sizes(where: str, n: int, k: int) -> None:
    """Raise KernelError unless n and k are positive."""
    if n < 1 or k < 1:
        raise KernelError(f"{where}: n, k: expected positive sizes, found {n}, {k}")


def check_rectangle(
    where: str, rows: Tensor, size: tuple[int, int], at: tuple[int, int], unit: tuple[int, int] = (1, 1)
) -> None:
    """Raise KernelError unless rows[r, c], placed at `at`, lies inside `size` and `at` is a multiple of `unit`."""
    if rows.ndim != 2:
        raise KernelError(f"{where}: expected a matrix, found {list(rows.shape)}")
    (row, col), (r, c) = at, rows.shape
    if row < 0 or col < 0 or row + r > size[0] or col + c > size[1]:
        raise KernelError(
            f"{where}: expected a rectangle inside {list(size)}, found {[r, c]} at row {row}, column {col}"
        )
    if row % unit[0] or col % unit[1]:
        raise KernelError(
            f"{where}: expected a rectangle that starts at a scale block, a multiple of {unit[0]} rows and {unit[1]} "
            f"columns, found row {row}, column {col}"
        )


def packable(where: str, rows: Tensor) -> Tensor:
    """Return rows in a dtype that the packing kernels read; raise KernelError unless they are a matrix of floats."""
    if rows.ndim != 2 or not rows.is_floating_point():
        raise KernelError(f"{where}: expected a matrix of floats, found {list(rows.shape)} {rows.dtype}")
    return (rows if rows.dtype in SOURCE_DTYPES else rows.to(torch.float32)).detach()
