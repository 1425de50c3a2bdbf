"""The interface of packed weights: what a weight format and a weight of it provide to kernels, shards and loaders."""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

Operands = Literal["bf16", "int8", "fp32"]

BLOCK_N = 32
"""Outputs in a block of a packed weight (csrc/linear/pack.h)."""

TILE_ROWS = 16
"""Rows of activations in an AMX tile."""

WORK_QUEUE_BYTES = 64
"""Size of the counter from which threads take work (csrc/core/work_queue.h)."""

SOURCE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes that the packing kernels read; any other is converted to float32 first."""


def round_up(n: int, unit: int) -> int:
    """Return the smallest multiple of `unit` that is at least n."""
    return -(-n // unit) * unit


def chosen_blocks(row: int, n: int, step: int) -> slice:
    """Return the slice of a weight's blocks that `Weight.part(row, n, step)` views."""
    first, count = row // BLOCK_N, -(-n // BLOCK_N)
    return slice(first, first + (count - 1) * step + 1, step)


@dataclass(frozen=True, eq=False)
class Layout:
    """The tensors from which compiled kernels read a weight.

    format: the end of the kernels' names, such as linear_int8. record: the struct in C++ that has the tensors as
    fields. tensors: attributes of the weight, as in the line of a contract (contract.py).
    """

    format: str
    record: str
    tensors: str


class Format(Protocol):
    """A weight format. Formats compare by value: those with the same parameters are equal."""

    def __hash__(self) -> int: ...

    @property
    def layout(self) -> Layout: ...

    @property
    def activations(self) -> torch.dtype:
        """Dtype of the x that such a weight multiplies."""
        ...

    @property
    def operands(self) -> Operands:
        """Type of the numbers that the kernels multiply, to which they convert x and codes."""
        ...

    @property
    def is_quantised(self) -> bool:
        """True for codes with scales, False for floats."""
        ...

    @property
    def k_unit(self) -> int:
        """Columns can be split at multiples of this without padding."""
        ...

    def nbytes(self, n: int, k: int) -> int:
        """Return the bytes that a weight[n, k] takes, padding included."""
        ...

    def empty(self, n: int, k: int) -> "Weight":
        """Return a weight[n, k] of zeros in memory of its own (`core.alloc`)."""
        ...


class Weight(Protocol):
    """A weight[n, k] in the layout that the kernels read.

    Each of its arrays consists of blocks of 32 outputs with a constant stride, so weights stacked along n form one
    taller weight.
    """

    @property
    def format(self) -> Format: ...
    @property
    def n(self) -> int: ...
    @property
    def k(self) -> int: ...

    def write(self, rows: Tensor, row: int = 0, col: int = 0) -> None:
        """Convert and pack rows[r, c] into weight[row : row + r, col : col + c]; the rest is unchanged."""
        ...

    def unpack(self) -> Tensor:
        """Return the values of weight[n, k] as a plain matrix."""
        ...

    def embedding(self, ids: Tensor, first_row: int = 0) -> Tensor:
        """Return rows [t, k] of the weight for ids[t] int64; ids outside [first_row, first_row + n) give zeros."""
        ...

    def part(self, row: int, n: int, step: int = 1) -> "Weight":
        """Return a view of n rows: every `step`-th block of 32 rows from `row` on, a multiple of 32.

        The view can be written and unpacked. A plain weight (`is_plain`) ignores `step`.
        """
        ...

    @property
    def is_plain(self) -> bool:
        """True if the weight was allocated for plain torch: then `product` computes, not a kernel."""
        ...

    def scratch(self, m: int) -> int:
        """Return the bytes of scratch memory that `linear` shares among threads for m rows, on the rung in force."""
        ...

    def product(self, x: Tensor) -> Tensor:
        """Return x[m, k] @ weight.T as [m, n] float32, in plain torch: the kernel's result before its epilogue."""
        ...
