"""`linear.py` in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..weight import BLOCK_N, Weight
from .ops import GATES, by_row


def linear(
    x: Tensor,
    w: Weight,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return activation(x[m, k] @ weight[n, k].T + bias), in fp32, rounded once."""
    sums = w.product(x)
    if bias is not None:
        sums = sums + bias.float()
    if activation in GATES:
        gate, up = torch.unflatten(sums, 1, (-1, 2, BLOCK_N)).unbind(2)  # blocks of gate and up alternate
        sums = (GATES[activation](gate) * up).flatten(1)
    elif activation is not None:
        approximate = "tanh" if activation == "gelu_tanh" else "none"
        sums = by_row(sums, lambda row: F.gelu(row, approximate=approximate))
    return sums.to(out_dtype or x.dtype)
