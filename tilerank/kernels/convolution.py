"""Causal convolutions over the rows of a sound, as products with packed weights.

A row is a moment, its columns are channels. A wrong argument raises KernelError naming it, what was expected and what
was found.
"""

from typing import NamedTuple

from torch import Tensor

from . import core
from .contract import Contract
from .errors import KernelError
from .reference import convolution as reference
from .weight import Weight, round_up
from .weight_formats import FLOAT_LAYOUTS

_CONVOLVE_LINE = (
    "convolve_: x m:size n:size bias[n]?:f32|bf16 taps:int dilation:int scale[n]?:f32 residual[m, n]?:f32|bf16 "
    "out[m, n]?:f32|bf16 frequency[n]?:f32 magnitude[n]?:f32 activated[m, n]?:f32|bf16 w:weight"
)
_CONVOLVE = {dtype: Contract(_CONVOLVE_LINE, layout=layout) for dtype, layout in FLOAT_LAYOUTS.items()}

TAP_UNIT = 32
"""Columns of a weight that belong to a tap begin at a multiple of this (csrc/linear/pack.h: kTileK)."""


class Snake(NamedTuple):
    """SnakeBeta (arXiv 2006.08195): x + magnitude * sin(frequency * x)^2. Both: [n] float32, one of each channel."""

    frequency: Tensor
    magnitude: Tensor


def tap_columns(channels: int, taps: int) -> int:
    """Return how many columns of a weight belong to a tap; those after the channels are zero."""
    return channels if taps == 1 else round_up(channels, TAP_UNIT)


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
    snake: Snake | None = None,
    activated: Tensor | None = None,
) -> None:
    """Write y[t] = residual[t] + scale * (bias + sum over i of weight_i @ x[t + i * dilation]) to `out`, and its snake
    to `activated`; either may be None.

    x: [m + (taps - 1) * dilation, c], dtype `w.format.activations`, with contiguous rows. w: [n, taps * tap_columns],
    the weights of tap i from column i * tap_columns on. bias: [n] float32 or bfloat16; scale: [n] float32, default 1;
    residual, out, activated: [m, n] float32 or bfloat16, with contiguous rows. `out` may be
    `residual`. All arithmetic is fp32, and each result is rounded once. A row of the results depends only on the rows
    of x that it reads.
    """
    columns = tap_columns(x.shape[-1], taps)
    m = x.shape[0] - (taps - 1) * dilation
    if (
        x.ndim != 2
        or w.format.is_quantised
        or x.dtype != w.format.activations
        or w.k != taps * columns
        or x.stride(-1) != 1
    ):
        raise KernelError(
            f"convolve_: x: expected {w.format.activations} rows for {taps} taps of a weight with {w.k} columns, found "
            f"{list(x.shape)} {x.dtype}"
        )
    if m < 0 or (out is None and activated is None):
        raise KernelError(
            f"convolve_: expected at least {(taps - 1) * dilation} rows and a tensor for the result, found {x.shape[0]}"
        )
    if (snake is None) != (activated is None):
        raise KernelError("convolve_: expected a snake and what receives it, found one of them")
    frequency, magnitude = snake or (None, None)
    convolve = _CONVOLVE[x.dtype]
    arguments = (x, m, w.n, bias, taps, dilation, scale, residual, out, frequency, magnitude, activated)
    convolve.check(*arguments)
    if not m:
        return
    if core.isa() == "reference" or w.is_plain:
        reference.convolve_(
            x,
            w,
            bias,
            taps=taps,
            dilation=dilation,
            scale=scale,
            residual=residual,
            out=out,
            snake=snake,
            activated=activated,
        )
        return
    convolve.run(*arguments, w)


_CONVOLVE_CHANNELS = Contract(
    "convolve_channels: x[n, c]:f32|bf16 weight[taps, c]:x bias[c]:x -> out[n - taps + 1, c]:x",
    reference.convolve_channels,
)


def convolve_channels(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return bias + sum over i of weight[i] * x[t + i], a convolution of each channel alone, in fp32, rounded once.

    x: [m + taps - 1, c]; weight: [taps, c], bias: [c], of its dtype. Returns [m, c].
    """
    _CONVOLVE_CHANNELS.check(x, weight)
    if x.shape[0] < weight.shape[0] - 1:
        raise KernelError(f"convolve_channels: x: expected at least {weight.shape[0] - 1} rows, found {x.shape[0]}")
    return _CONVOLVE_CHANNELS(x, weight, bias)
