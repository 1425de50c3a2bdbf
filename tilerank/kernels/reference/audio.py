"""`audio.py` in plain torch."""

import torch
from torch import Tensor


def log_mel(samples: Tensor, filters: Tensor, frames: slice, *, window: int = 400, hop: int = 160) -> Tensor:
    """Transform reflected windows with torch.fft, in fp64."""
    n, half = samples.shape[0], window // 2
    first = frames.start * hop - half
    at = torch.arange(first, max((frames.stop - 1) * hop + half, first))
    period = max(2 * (n - 1), 1)
    at = at.remainder(period)
    clip = samples.double()[torch.where(at < n, at, period - at)]
    rows = clip.unfold(0, window, hop) * torch.hann_window(window, dtype=torch.float64)
    power: Tensor = torch.fft.rfft(rows, dim=1).abs() ** 2
    bands: Tensor = power @ filters
    return bands.clamp(min=1e-10).log10().float()


def unfold(x: Tensor, rows: slice) -> Tensor:
    """Return views of 3 x 3 windows, two apart, as rows."""
    padded = torch.nn.functional.pad(x, (0, 0, 1, 1, 1, 1))
    taps = padded.unfold(0, 3, 2).unfold(1, 3, 2)  # [a', b', c, 3, 3], rows of the weights last
    return taps.permute(0, 1, 3, 4, 2).flatten(0, 1).flatten(1)[rows]
