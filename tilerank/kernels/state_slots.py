"""The states of a gated delta net."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import check, core
from .errors import KernelError

BLOCK_TOKENS = 64
"""Tokens that the delta rule computes together. A sequence that is cut at multiples of them has the bits of the whole
sequence, unless a single token is left: that is computed in another form (kernels/delta.py)."""


@dataclass(frozen=True)
class StateSlots:
    """What one layer keeps of sequences, a slot for each.

    conv: [slots, width - 1, channels] in the activation dtype, the last inputs of the convolution, the oldest first.
    state: [slots, value_heads, key_dim, value_dim] float32, the matrices of the delta rule (kernels/delta.py).
    """

    conv: Tensor
    state: Tensor

    @staticmethod
    def nbytes(
        slots: int, width: int, channels: int, value_heads: int, key_dim: int, value_dim: int, dtype: torch.dtype
    ) -> int:
        """Return the bytes that `empty` allocates for the same arguments."""
        conv = (width - 1) * channels * dtype.itemsize
        state = value_heads * key_dim * value_dim * torch.float32.itemsize
        return slots * (conv + state)

    @staticmethod
    def empty(
        slots: int, width: int, channels: int, value_heads: int, key_dim: int, value_dim: int, dtype: torch.dtype
    ) -> StateSlots:
        """Return zeroed slots in memory of their own (`core.alloc`).

        width: of the convolution. A rank without heads has value_heads 0 and channels 0. Raises KernelError for a dtype
        other than float32 and bfloat16, and for sizes that are too small.
        """
        check.dtype("StateSlots", "dtype", dtype)
        for name, size in {"slots": slots, "width": width, "key_dim": key_dim, "value_dim": value_dim}.items():
            if size < 1:
                raise KernelError(f"StateSlots: expected {name} >= 1, found {size}")
        conv, state = (slots, width - 1, channels), (slots, value_heads, key_dim, value_dim)
        return StateSlots(_zeros(conv, dtype), _zeros(state, torch.float32))

    def copy(self, source: int, target: int) -> None:
        """Copy the states in slot `source` to slot `target`."""
        self.conv[target].copy_(self.conv[source])
        self.state[target].copy_(self.state[source])


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    size = torch.Size(shape).numel() * dtype.itemsize
    return core.alloc(size).view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype)
