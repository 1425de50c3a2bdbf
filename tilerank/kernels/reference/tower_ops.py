"""`tower_ops.py` in plain torch."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import KernelError
from .ops import by_row


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """nn.LayerNorm in fp32, rounded once."""
    return F.layer_norm(x.float(), weight.shape, weight.float(), bias.float(), eps).to(x.dtype).contiguous()


def gelu(x: Tensor, tanh: bool) -> Tensor:
    """nn.GELU in fp32, rounded once."""
    rows = x.float().reshape(-1, x.shape[-1]) if x.numel() else x.float()
    return by_row(rows, lambda row: F.gelu(row, approximate="tanh" if tanh else "none")).view(x.shape).to(x.dtype)


def rotary_float_(q: Tensor, k: Tensor, angles: Tensor) -> None:
    """Half-split rotation of q and k, in place, in fp32 with one rounding."""
    c, s = (part[:, None] for part in angles.unbind(1))
    for heads in (q, k):
        first, second = heads.float().chunk(2, dim=-1)
        heads.copy_(torch.cat([first * c - second * s, second * c + first * s], dim=-1))


def interpolate_rows(table: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    """Return the sum over i of weights[:, i] * table[rows[:, i]]."""
    if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < table.shape[0]:
        bad = next(row for row in rows.flatten().tolist() if not 0 <= row < table.shape[0])
        raise KernelError(f"interpolate_rows: rows: expected values in [0, {table.shape[0]}), found {bad}")
    first, second, third, fourth = (table[rows].float() * weights[..., None]).unbind(1)
    return (first + second + third + fourth).to(table.dtype)


def tanh_gate_(x: Tensor, gate: Tensor, shown: Tensor | None = None) -> None:
    """x *= tanh(gate), with zeros in the rows that are not shown."""
    x *= gate.tanh()
    if shown is not None:
        x[shown == 0] = 0


def clamp(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """min(max(x, low), high)"""
    return torch.clamp(x, low, high).contiguous()
