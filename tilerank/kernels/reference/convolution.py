"""Plain-torch references of kernels/convolution.py."""

import torch
from torch import Tensor
from torch.nn.functional import pad

_UNIT = 32


def unfold(x: Tensor, taps: int, dilation: int) -> Tensor:
    """Return [m, taps * tap_columns], the rows of x that each row of the result reads."""
    if taps == 1:
        return x
    m = x.shape[0] - (taps - 1) * dilation
    padded = pad(x, (0, -x.shape[1] % _UNIT))
    return torch.cat([padded[i * dilation : i * dilation + m] for i in range(taps)], 1)


def finish(
    y: Tensor,
    scale: Tensor | None,
    residual: Tensor | None,
    out: Tensor | None,
    snake: tuple[Tensor, Tensor] | None,
    activated: Tensor | None,
) -> None:
    """Write what `convolve_` makes of the biased sums y [m, n] float32."""
    if scale is not None:
        y = y * scale
    if residual is not None:
        y = y + residual.float()
    if snake is not None and activated is not None:
        frequency, magnitude = snake
        activated.copy_(y + magnitude * (y * frequency).sin() ** 2)
    if out is not None:
        out.copy_(y)


def convolve_channels(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    taps = weight.shape[0]
    m = x.shape[0] - taps + 1
    total = bias.float().expand(m, -1)
    for i in range(taps):
        total = total + weight[i].float() * x[i : i + m].float()
    return total.to(x.dtype)
