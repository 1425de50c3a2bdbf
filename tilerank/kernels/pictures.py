"""Frames of pictures and videos, as patches for a vision encoder."""

import torch
from torch import Tensor

from . import check, core
from .contract import Contract
from .errors import KernelError
from .reference import pictures as reference

RESAMPLING = ("bilinear", "bicubic")


_PATCHES = Contract(
    "patches: frames[n, h, w, 3]:u8 rows:int columns:int patch:int merge:int temporal:int bicubic:bool height:int "
    "width:int first_row:int red_mean:float green_mean:float blue_mean:float red_std:float green_std:float "
    "blue_std:float dtype:f32|bf16 "
    "-> out[(n + temporal - 1) // temporal * rows * columns, 3 * temporal * patch * patch]:dtype"
)


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
    """Resize RGB frames, normalise them, and cut them into patches, as the processors of Qwen3-VL and mllama do.

    frames: [n, h, w, 3] uint8, n >= 1. grid: (t, rows, columns) of patches, with t = ceil(n / temporal), and rows and
    columns multiples of `merge`. The last frame is repeated until n is a multiple of `temporal`.
    Frames are resized to `size`, by default [rows * patch, columns * patch], as by torchvision with antialias=True:
    horizontally, then vertically, with the kernel `resample` ("bilinear" or "bicubic", a = -0.5), int16 weights, and
    uint8 in between. The pixels of the grid below and to the right of `size` are zeros before they are normalised.
    A value v becomes (v - 255 * mean) / (255 * std) in fp32, with mean and std of its channel, rounded to `dtype`.
    Returns [t * rows * columns, 3 * temporal * patch * patch]. Patches are ordered by (t, block row, block column, row
    in block, column in block), with blocks of merge x merge patches, and their values by (channel, frame, y, x).
    band: returns only these rows of patches of every frame, whole blocks.
    Raises KernelError for a frame that is empty, or another argument that does not fit.
    """
    _PATCHES.check(frames)
    n, height, width, _ = frames.shape
    t, rows, columns = grid
    if not (n and height and width):
        raise KernelError(f"patches: frames: expected at least one pixel, found shape {list(frames.shape)}")
    if t != -(-n // temporal) or rows < 1 or columns < 1 or rows % merge or columns % merge:
        raise KernelError(
            f"patches: grid: expected {-(-n // temporal)} times a multiple of {merge} rows and columns, found {grid}"
        )
    height, width = rows * patch, columns * patch
    size = size or (height, width)
    if not (1 <= size[0] <= height and 1 <= size[1] <= width):
        raise KernelError(f"patches: size: expected 1 to {height} rows and 1 to {width} columns, found {size}")
    first, end = (0, rows) if band is None else (band.start, band.stop)
    if not 0 <= first < end <= rows or first % merge or end % merge:
        raise KernelError(f"patches: band: expected blocks of {merge} within {rows} rows, found {first} to {end}")
    if resample not in RESAMPLING:
        raise KernelError(f"patches: resample: expected one of {', '.join(RESAMPLING)}, found {resample!r}")
    check.dtype("patches", "dtype", dtype)
    if core.isa() == "reference":
        return reference.patches(
            frames,
            grid,
            mean=mean,
            std=std,
            resample=resample,
            dtype=dtype,
            patch=patch,
            merge=merge,
            temporal=temporal,
            size=size,
            band=band,
        )
    sizes = (end - first, columns, patch, merge, temporal, resample == "bicubic", *size, first)
    return _PATCHES(frames, *sizes, *mean, *std, dtype)
