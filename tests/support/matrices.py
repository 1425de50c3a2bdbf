"""Matrices for the kernel tests."""

import torch
from torch import Tensor


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inside_nan(plain: Tensor) -> Tensor:
    """The same matrix as a view into a larger one of NaN: its rows are apart, nothing beyond it may count."""
    around = torch.full((plain.shape[0] + 2, plain.shape[1] + 5), float("nan"), dtype=plain.dtype)
    around[1:-1, 2:-3] = plain
    return around[1:-1, 2:-3]


def layouts(t: int, heads: int, d: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return [t, heads, d] in a layout that occurs: dense, a slice of a fused projection, tokens and heads swapped."""
    fused = randn(t, (heads + 3) * d, dtype=dtype, seed=1)
    return {
        "dense": randn(t, heads, d, dtype=dtype),
        "slice": fused[:, d : (heads + 1) * d].view(t, heads, d),
        "swapped": randn(heads, t, d, dtype=dtype, seed=2).transpose(0, 1),
    }
