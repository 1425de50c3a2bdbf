"""`linear.py` in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..weight import BLOCK_N, Weight
from .ops import by_row


def linear(
    x: Tensor,
    w: Weight,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return activation(x[..., k] @ weight[n, k].T + bias) + residual, in fp32, rounded once."""
    sums = w.product(x.reshape(-1, x.shape[-1]))
    if residual is not None:
        residual = residual.reshape(-1, residual.shape[-1])
    result = epilogue(sums, bias, residual, activation, out_dtype or x.dtype)
    return result.reshape(*x.shape[:-1], result.shape[-1])


def epilogue(
    sums: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str | None, out_dtype: torch.dtype
) -> Tensor:
    """Apply the epilogue of `linear` to sums [m, n] float32. Returns [m, n], or [m, n / 2] with silu_mul."""
    if bias is not None:
        sums = sums + bias.float()
    if activation == "silu_mul":
        blocks = sums.view(sums.shape[0], sums.shape[1] // (2 * BLOCK_N), 2, BLOCK_N)
        gate, up = blocks.unbind(2)  # blocks of gate and up alternate
        sums = (F.silu(gate) * up).flatten(1)
    elif activation is not None:
        approximate = "tanh" if activation == "gelu_tanh" else "none"
        sums = by_row(sums, lambda row: F.gelu(row, approximate=approximate))
    if residual is not None:
        sums = sums + residual.float()
    return sums.to(out_dtype)
