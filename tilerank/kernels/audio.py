"""Sound: mel spectrograms, and convolutions as products.

A wrong argument raises KernelError naming it, what was expected and what was found.
"""

from functools import cache
from math import pi

import torch
from torch import Tensor

from . import core
from .contract import Contract
from .errors import KernelError
from .reference import audio as reference

_LOG_MEL = Contract(
    "log_mel: samples[n]:f32 length:size filters[length // 2 + 1, mels]:f64 frames:size first_frame:int hop:int "
    "window[length]:f64 cosines[_, _]:f64 sines[_, _]:f64 -> out[frames, mels]:f32"
)


def log_mel(samples: Tensor, filters: Tensor, frames: slice, *, window: int = 400, hop: int = 160) -> Tensor:
    """Return log10(max(mel, 1e-10)) of some frames of a spectrogram, as Whisper has it (arXiv 2212.04356).

    samples: [n] float32, n >= 1. filters: [window / 2 + 1, mels] float64, what each frequency adds to each band.
    Frame i is the squared magnitude of the Fourier transform of `window` samples around sample i * hop, times a
    periodic Hann window. The clip is reflected at its ends, as often as necessary (numpy.pad, mode "reflect").
    Returns [frames, mels] float32, computed in fp64.
    """
    _LOG_MEL.check(samples, window, filters)
    if not samples.shape[0] or window % 2 or hop < 1:
        raise KernelError(
            f"log_mel: expected samples, an even window and a hop, found {samples.shape[0]}, {window} and {hop}"
        )
    if not 0 <= frames.start < frames.stop <= samples.shape[0] // hop + 1:
        raise KernelError(
            f"log_mel: frames: expected a range of {samples.shape[0] // hop + 1}, found {frames.start} to {frames.stop}"
        )
    if core.isa() == "reference":
        return reference.log_mel(samples, filters, frames, window=window, hop=hop)
    count = frames.stop - frames.start
    return _LOG_MEL(samples, window, filters, count, frames.start, hop, *_transform(window))


_UNFOLD = Contract("unfold: x[a, b, c]:f32|bf16 rows:size first:int -> apart out[rows, 9 * c]:x")


def unfold(x: Tensor, rows: slice) -> Tensor:
    """Return some rows of what a 3 x 3 convolution with stride 2 and padding 1 multiplies with its weights.

    x: [a, b, c], contiguous: an input of c channels whose planes have b rows and a columns. Rows count the places of
    the output, [ceil(a / 2), ceil(b / 2)]. Returns [rows, 9 * c], by (column, row, channel) of the weights, zero
    outside of the planes, with contiguous rows. So the rows times weights [out, c, 3, 3] with dimensions 1 and 3
    exchanged, as a matrix, are the convolution.
    """
    _UNFOLD.check(x)
    if not x.is_contiguous():
        raise KernelError(f"unfold: x: expected it contiguous, found strides {x.stride()}")
    places = (x.shape[0] + 1) // 2 * ((x.shape[1] + 1) // 2)
    if not 0 <= rows.start < rows.stop <= places:
        raise KernelError(f"unfold: rows: expected a range of {places}, found {rows.start} to {rows.stop}")
    if core.isa() == "reference":
        return reference.unfold(x, rows)
    return _UNFOLD(x, rows.stop - rows.start, rows.start)


@cache
def _transform(window: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a Hann window [window], and cosines and sines [window / 2 + 1, window / 4 + 1], float64."""
    # The product is an exact integer, whose remainder keeps the angle small.
    angles = torch.outer(torch.arange(window // 2 + 1), torch.arange(window // 4 + 1)).remainder(window).double() * (
        2 * pi / window
    )
    return torch.hann_window(window, dtype=torch.float64), angles.cos(), angles.sin()
