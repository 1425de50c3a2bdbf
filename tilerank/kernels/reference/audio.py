"""References of kernels/audio.py."""

import torch
from torch import Tensor


def log_mel(samples: Tensor, filters: Tensor, frames: slice, *, window: int = 400, hop: int = 160) -> Tensor:
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
    planes = x.permute(2, 1, 0)[None].float()  # [1, c, b, a]
    taps = torch.nn.functional.unfold(planes, 3, padding=1, stride=2)[0]  # [c * 9, b' * a']
    b, a = (x.shape[1] + 1) // 2, (x.shape[0] + 1) // 2
    return taps.view(-1, b, a).permute(2, 1, 0).flatten(0, 1)[rows].to(x.dtype).contiguous()
