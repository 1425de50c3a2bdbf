"""`pictures.py` in plain torch."""

import torch
import torch.nn.functional as F
from torch import Tensor


def patches(
    frames: Tensor,
    grid: tuple[int, int, int],
    *,
    mean: tuple[float, float, float],
    std: tuple[float, float, float],
    resample: str,
    dtype: torch.dtype,
    patch: int = 16,
    merge: int = 2,
    temporal: int = 2,
    size: tuple[int, int] | None = None,
    band: slice | None = None,
) -> Tensor:
    """Resize, pad, normalise and permute, as the processors of Qwen3-VL and mllama of transformers."""
    t, rows, columns = grid
    taken = slice(0, rows) if band is None else band
    images = frames.permute(0, 3, 1, 2)
    height, width = size or (rows * patch, columns * patch)
    if images.shape[2:] != (height, width):
        images = F.interpolate(images, (height, width), mode=resample, antialias=True)
    images = F.pad(images, (0, columns * patch - width, 0, rows * patch - height))
    images = torch.cat([images, images[-1:].expand(t * temporal - images.shape[0], -1, -1, -1)])
    factor = torch.tensor(255.0)
    offset, scale = (factor * torch.tensor(values) for values in (mean, std))
    images = images[:, :, taken.start * patch : taken.stop * patch]
    rows = taken.stop - taken.start
    normed = ((images.float() - offset[:, None, None]) / scale[:, None, None]).to(dtype)
    split = normed.view(t, temporal, 3, rows // merge, merge, patch, columns // merge, merge, patch)
    return split.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(t * rows * columns, 3 * temporal * patch * patch)
