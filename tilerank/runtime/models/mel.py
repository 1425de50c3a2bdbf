"""The bands of the spectrograms that audio towers take, like WhisperFeatureExtractor of transformers 5.23."""

from functools import cache
from math import log

import torch
from torch import Tensor

_LOG_STEP = log(6.4) / 27
"""The logarithm of the ratio of the frequencies of two adjacent mels, above 1000 Hz."""


@cache
def mel_filters(mels: int = 128, window: int = 400, rate: int = 16000) -> Tensor:
    """Return [window / 2 + 1, mels] float64: triangles that are equally wide on the mel scale of Slaney's Auditory
    Toolbox from 0 to rate / 2, each of the same area. Rounded to fp32, as Whisper's are."""
    edge = 15.0  # mels at 1000 Hz, below which the scale is linear

    def hertz(mel: Tensor) -> Tensor:
        return torch.where(mel < edge, 200 / 3 * mel, 1000 * torch.exp((mel - edge) * _LOG_STEP))

    top = edge + torch.log(torch.tensor(rate / 2 / 1000, dtype=torch.float64)) / _LOG_STEP
    corners = hertz(torch.linspace(0, float(top), mels + 2, dtype=torch.float64))
    frequencies = torch.linspace(0, rate / 2, window // 2 + 1, dtype=torch.float64)
    slopes = corners - frequencies[:, None]
    widths = corners.diff()
    rising, falling = -slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]
    filters = torch.minimum(rising, falling).clamp(min=0) * (2 / (corners[2:] - corners[:-2]))
    return filters.float().double()


def normalize_mel(mel: Tensor, loudest: float) -> Tensor:
    """Return frames of log_mel as the tower takes them: within 8 powers of ten of the loudest value of the clip, and
    about 1."""
    return (mel.clamp(min=loudest - 8) + 4) / 4
