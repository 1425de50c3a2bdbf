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

    conv: [slots, width - 1 + drafts, channels] in the activation dtype, the last inputs of the convolution, the oldest
        first, and after them those of drafted tokens.
    state: [slots, value_heads, key_dim, value_dim] float32, the matrices of the delta rule (kernels/delta.py).
    drafts: [slots, drafts, channels] in the activation dtype, queries, keys and values of drafted tokens.
    draft_gates: [slots, drafts, 2 * value_heads] float32, their log-decays, and after them their learning rates.
    """

    conv: Tensor
    state: Tensor
    drafts: Tensor
    draft_gates: Tensor

    @staticmethod
    def nbytes(
        slots: int,
        width: int,
        channels: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        dtype: torch.dtype,
        drafts: int,
    ) -> int:
        """Return the bytes that `empty` allocates for the same arguments."""
        rows = (width - 1 + 2 * drafts) * channels * dtype.itemsize
        numbers = value_heads * (key_dim * value_dim + 2 * drafts)
        return slots * (rows + numbers * torch.float32.itemsize)

    @staticmethod
    def empty(
        slots: int,
        width: int,
        channels: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        dtype: torch.dtype,
        drafts: int,
    ) -> StateSlots:
        """Return zeroed slots in memory of their own (`core.alloc`).

        width: of the convolution. drafts: the most drafted tokens of a sequence in a step. A rank without heads has
        value_heads 0 and channels 0. Raises KernelError for a dtype other than float32 and bfloat16, and for sizes that
        are too small.
        """
        check.dtype("StateSlots", "dtype", dtype)
        for name, size in {"slots": slots, "width": width, "key_dim": key_dim, "value_dim": value_dim}.items():
            if size < 1:
                raise KernelError(f"StateSlots: expected {name} >= 1, found {size}")
        return StateSlots(
            conv=_zeros((slots, width - 1 + drafts, channels), dtype),
            state=_zeros((slots, value_heads, key_dim, value_dim), torch.float32),
            drafts=_zeros((slots, drafts, channels), dtype),
            draft_gates=_zeros((slots, drafts, 2 * value_heads), torch.float32),
        )

    def copy(self, source: int, target: int) -> None:
        """Copy the states in slot `source` to slot `target`, without those of drafted tokens."""
        window = self.conv.shape[1] - self.drafts.shape[1]
        self.conv[target, :window].copy_(self.conv[source, :window])
        self.state[target].copy_(self.state[source])


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    size = torch.Size(shape).numel() * dtype.itemsize
    return core.alloc(size).view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype)
