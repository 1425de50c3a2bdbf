"""Plain-torch references of kernels/convolution.py."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..weight import Weight, round_up


def tap_columns(channels: int, taps: int) -> int:
    return channels if taps == 1 else round_up(channels, 32)


def convolve_(
    x: Tensor,
    w: Weight,
    bias: Tensor | None = None,
    *,
    taps: int = 1,
    dilation: int = 1,
    scale: Tensor | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    snake: tuple[Tensor, Tensor] | None = None,
    activated: Tensor | None = None,
) -> None:
    y = w.product(_unfold(x, taps, dilation))
    if bias is not None:
        y = y + bias.float()
    if scale is not None:
        y = y * scale
    if residual is not None:
        y = y + residual.float()
    if snake is not None and activated is not None:
        frequency, magnitude = snake
        activated.copy_(y + magnitude * (y * frequency).sin() ** 2)
    if out is not None:
        out.copy_(y)


def _unfold(x: Tensor, taps: int, dilation: int) -> Tensor:
    """Return [m, taps * tap_columns], the rows of x that each row of the result reads, padded with zeros."""
    m = x.shape[0] - (taps - 1) * dilation
    padded = pad(x, (0, tap_columns(x.shape[1], taps) - x.shape[1]))
    return torch.cat([padded[i * dilation : i * dilation + m] for i in range(taps)], 1)


def convolve_channels(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    taps = weight.shape[0]
    m = x.shape[0] - taps + 1
    total = bias.float().expand(m, -1)
    for i in range(taps):
        total = total + weight[i].float() * x[i : i + m].float()
    return total.to(x.dtype)
