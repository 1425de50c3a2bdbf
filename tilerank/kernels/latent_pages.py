"""The pages of the latent cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import check, core
from .errors import KernelError
from .kv_pages import DTYPES, PAGE_TOKENS
from .weight import round_up

MAX_LATENT_DIM = 512

MAX_ROPE_DIM = 64

_ROW_UNIT = 32
"""Rows are padded to a multiple of these values, so that every rung reads them in whole vectors and tiles."""


@dataclass(frozen=True)
class LatentPages:
    """The pages of one layer's latent cache (DeepSeek-V2, arXiv 2405.04434): PAGE_TOKENS tokens a page, for all heads.

    A token is one row of data[page, token]: its latent, its rotated key, and zeros up to a multiple of 32 values.

    With dtype int8 the cache holds codes, value = code * scale. Every token has one scale for its latent and one for
    its rotated key: scales[page, 0 for latents or 1 for rotated keys, token]. Activations are of either dtype.
    """

    data: Tensor
    num_pages: int
    latent_dim: int
    rope_dim: int
    dtype: torch.dtype
    scales: Tensor | None = None

    @property
    def activations(self) -> tuple[torch.dtype, ...]:
        """The dtypes of what is stored into the cache and multiplied with it."""
        return check.ACTIVATION_DTYPES if self.dtype == torch.int8 else (self.dtype,)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors whose rows are the pages, and together hold all that is stored."""
        return [self.data] if self.scales is None else [self.data, self.scales]

    @staticmethod
    def nbytes(num_pages: int, latent_dim: int, rope_dim: int, dtype: torch.dtype) -> int:
        """Return the bytes that `empty` allocates for the same arguments."""
        values = torch.Size(_shape(num_pages, latent_dim, rope_dim, dtype)).numel() * dtype.itemsize
        return values + (num_pages * 2 * PAGE_TOKENS * 4 if dtype == torch.int8 else 0)

    @staticmethod
    def empty(num_pages: int, latent_dim: int, rope_dim: int, dtype: torch.dtype) -> LatentPages:
        """Return zeroed pages in memory of their own (`core.alloc`).

        latent_dim: a multiple of 32 up to 512; rope_dim: a multiple of 8 up to 64; dtype: bfloat16, float32 or int8.
        Raises KernelError for other values.
        """
        shape = _shape(num_pages, latent_dim, rope_dim, dtype)
        data = core.alloc(torch.Size(shape).numel() * dtype.itemsize).view(dtype).view(shape)
        scales = None
        if dtype == torch.int8:
            scales = core.alloc(num_pages * 2 * PAGE_TOKENS * 4).view(torch.float32).view(num_pages, 2, PAGE_TOKENS)
        return LatentPages(data, num_pages, latent_dim, rope_dim, dtype, scales)


def _shape(num_pages: int, latent_dim: int, rope_dim: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Return the shape of data. Raises KernelError for sizes or a dtype that the kernels do not support."""
    check.dtype("LatentPages", "dtype", dtype, DTYPES)
    sizes = (("latent_dim", latent_dim, _ROW_UNIT, MAX_LATENT_DIM), ("rope_dim", rope_dim, 8, MAX_ROPE_DIM))
    for name, dim, unit, most in sizes:
        if dim % unit or not 0 < dim <= most:
            raise KernelError(f"LatentPages: {name}: expected a multiple of {unit} up to {most}, found {dim}")
    if num_pages < 1:
        raise KernelError(f"LatentPages: num_pages: expected at least 1, found {num_pages}")
    return num_pages, PAGE_TOKENS, round_up(latent_dim + rope_dim, _ROW_UNIT)
