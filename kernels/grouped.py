"""What weights with a scale for every group of inputs have in common (csrc/grouped.h): memory, blocks, checks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from . import core, reference
from .errors import KernelError
from .linear import BLOCK_N

BLOCK_K = 32
HALF_N = 16
_TILE_ROWS = 16

SOURCES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

Arrays = Sequence[tuple[tuple[int, ...], torch.dtype]]
"""Shapes and dtypes."""


def up_to(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def blocks(n: int) -> int:
    """Blocks of outputs of a weight of n."""
    return -(-n // BLOCK_N)


def nbytes(arrays: Arrays) -> int:
    return sum(_nbytes(*array) for array in arrays)


def allocate(arrays: Arrays) -> list[Tensor]:
    """Zeros, in one piece of memory (`core.alloc`)."""
    memory = core.alloc(nbytes(arrays), resident=True)
    tensors = []
    for shape, dtype in arrays:
        size = _nbytes(shape, dtype)
        tensors.append(memory[:size].view(dtype)[: torch.Size(shape).numel()].view(shape))
        memory = memory[size:]
    return tensors


def _nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return up_to(torch.Size(shape).numel() * dtype.itemsize, 64)


class GroupedWeight(ABC):
    """A weight of codes that kernels expand to bfloat16. `values` are [n, k] where kernels run in plain torch."""

    values: Tensor
    k: int

    @property
    def is_plain(self) -> bool:
        return self.values.ndim == 2

    def scratch(self, m: int) -> int:
        """Bytes for packed rows of x; few rows every thread packs for itself."""
        k = up_to(self.k, BLOCK_K)
        if core.packed_alone(m):
            return 0
        if core.isa() == "amx":
            return up_to(m, _TILE_ROWS) * k * 2
        return m * (k + k // BLOCK_K) * 4  # in fp32, with a sum for each group at most

    def product(self, x: Tensor) -> Tensor:
        return reference.product(x.to(torch.bfloat16), self.unpack())

    @abstractmethod
    def unpack(self) -> Tensor: ...


def check_sizes(where: str, n: int, k: int) -> None:
    if n < 1 or k < 1:
        raise KernelError(f"{where}: n, k: expected positive sizes, found {n}, {k}")


def check_unit(where: str, name: str, unit: int) -> None:
    if unit < BLOCK_K or unit % BLOCK_K:
        raise KernelError(f"{where}: {name}: expected a multiple of {BLOCK_K}, found {unit}")


def check_rectangle(
    where: str, rows: Tensor, size: tuple[int, int], at: tuple[int, int], unit: tuple[int, int] = (1, 1)
) -> None:
    """Raises KernelError unless rows[r, c] lies inside `size` from `at` on, which is a multiple of `unit`."""
    if rows.ndim != 2:
        raise KernelError(f"{where}: expected a matrix, found {list(rows.shape)}")
    (row, col), (r, c) = at, rows.shape
    if row < 0 or col < 0 or row + r > size[0] or col + c > size[1]:
        raise KernelError(
            f"{where}: expected a rectangle inside {list(size)}, found {[r, c]} at row {row}, column {col}"
        )
    if row % unit[0] or col % unit[1]:
        raise KernelError(
            f"{where}: expected a rectangle that begins a group, at a multiple of {unit[0]} rows and {unit[1]} columns,"
            f" found row {row}, column {col}"
        )


def floats(where: str, rows: Tensor) -> Tensor:
    """rows, of a dtype that the kernels read."""
    if not rows.is_floating_point():
        raise KernelError(f"{where}: expected floats, found {rows.dtype}")
    return (rows if rows.dtype in SOURCES else rows.to(torch.float32)).detach()


def chosen_blocks(row: int, n: int, step: int) -> slice:
    """The blocks of a part of a weight."""
    first = row // BLOCK_N
    return slice(first, first + (blocks(n) - 1) * step + 1, step)
