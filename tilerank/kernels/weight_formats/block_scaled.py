"""What weights with one scale per block of inputs share: their memory, and products in plain torch.

Their layout is that of csrc/block_scaled/block_scaled.h. x stays bfloat16 and the kernels expand codes to bfloat16.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import core
from ..errors import KernelError
from ..reference import weight_formats as reference
from ..weight import BLOCK_N, TILE_ROWS, Format, round_up

TILE_K = 32
"""Inputs in a tile."""

HALF_N = 16
"""Outputs in a tile."""

Arrays = Sequence[tuple[tuple[int, ...], torch.dtype]]
"""Shapes and dtypes."""


def blocks(n: int) -> int:
    """Return the number of blocks of 32 outputs in a weight of n."""
    return -(-n // BLOCK_N)


def nbytes(arrays: Arrays) -> int:
    """Return the bytes that `allocate` takes."""
    return sum(_nbytes(*array) for array in arrays)


def allocate(arrays: Arrays) -> list[Tensor]:
    """Return tensors of zeros, 64-byte aligned parts of one piece of memory (`core.alloc`)."""
    memory = core.alloc(nbytes(arrays), resident=True)
    tensors = []
    for shape, dtype in arrays:
        size = _nbytes(shape, dtype)
        tensors.append(memory[:size].view(dtype)[: torch.Size(shape).numel()].view(shape))
        memory = memory[size:]
    return tensors


def _nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return round_up(torch.Size(shape).numel() * dtype.itemsize, 64)


class BlockScaledWeight(ABC):
    """A weight of codes with one scale per block, which the kernels expand to bfloat16.

    `values` are packed codes, or [n, k] where kernels run in plain torch.
    """

    format: Format
    values: Tensor
    n: int
    k: int

    @property
    def is_plain(self) -> bool:
        return self.values.ndim == 2

    def scratch(self, m: int) -> int:
        """Return the bytes for packed rows of x; with few rows every thread packs them for itself."""
        kind = self.format.layout.format
        if core.rung_of(kind) == "amx" and not core.packs_per_thread(kind, m):
            return round_up(m, TILE_ROWS) * round_up(self.k, TILE_K) * 2
        return scratch_in_vectors(kind, m, self.k, TILE_K)

    def product(self, x: Tensor) -> Tensor:
        return reference.product(x.to(torch.bfloat16), self.unpack())

    @abstractmethod
    def unpack(self) -> Tensor: ...


def scratch_in_vectors(kind: str, m: int, k: int, group: int) -> int:
    """Return the bytes of `Weight.scratch` for products in vectors. group: the fewest inputs that share a scale."""
    if core.packs_per_thread(kind, m):
        return 0
    k = round_up(k, TILE_K)
    return m * (k + k // group) * 4  # in fp32, with a sum for each group


def check_unit(where: str, name: str, unit: int, tile: int = TILE_K) -> None:
    """Raise KernelError unless `unit` is a positive multiple of the inputs of a tile."""
    if unit < tile or unit % tile:
        raise KernelError(f"{where}: {name}: expected a multiple of {tile}, found {unit}")
