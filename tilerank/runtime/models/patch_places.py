"""Where the patches of a frame are, and the angles and position embeddings that follow from it (Qwen2-VL, Qwen3-VL)."""

import torch
from torch import Tensor

_THETA = 10000.0


def patch_places(rows: slice, columns: int, merge: int) -> tuple[Tensor, Tensor]:
    """Return row and column [n] int64 of the patches in some rows of a frame, in their order, block by block."""
    first, end = rows.start, rows.stop
    blocks = ((end - first) // merge, merge, columns // merge, merge)
    places = torch.meshgrid(torch.arange(first, end), torch.arange(columns), indexing="ij")
    row, column = (place.reshape(blocks).transpose(1, 2).flatten() for place in places)
    return row, column


def angle_table(places: int, head_dim: int) -> Tensor:
    """Return [places, 2, head_dim / 4] float32, cosines and sines of rows or columns: half of the frequencies of a head
    follow the row of a patch, half its column."""
    half = head_dim // 2
    frequencies = 1.0 / _THETA ** (torch.arange(0, half, 2, dtype=torch.float32) / half)
    angles = torch.outer(torch.arange(places).float(), frequencies)
    return torch.stack([angles.cos(), angles.sin()], 1)


def bilinear_taps(row: Tensor, column: Tensor, rows: int, columns: int, side: int) -> tuple[Tensor, Tensor]:
    """Return rows [n, 4] int64 of a table of side x side positions and their weights [n, 4] float32.

    They resample the table bilinearly to rows x columns patches, whose corners are those of the table.
    """
    indices, weights = [], []
    for place, size in ((row, rows), (column, columns)):
        source = place.float() * (side - 1) / max(size - 1, 1)
        low = source.floor()
        indices.append(torch.stack([low, low + 1], 1).long().clamp(max=side - 1))
        upper = source - low
        weights.append(torch.stack([1 - upper, upper], 1))
    index = indices[0][:, :, None] * side + indices[1][:, None, :]
    weight = weights[0][:, :, None] * weights[1][:, None, :]
    return index.flatten(1), weight.flatten(1)
