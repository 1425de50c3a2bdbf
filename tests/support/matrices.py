"""Matrices for the kernel tests, and their comparison up to the rounding of their dtype."""

import torch
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16]
EPS32 = torch.finfo(torch.float32).eps


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inside_nan(plain: Tensor) -> Tensor:
    """Return the same matrix as a view into a larger one of NaN: rows are apart, and reading past their ends shows."""
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


def half_ulp(dtype: torch.dtype) -> float:
    """Return the largest relative error of one rounding."""
    return torch.finfo(dtype).eps / 2


def assert_within(found: Tensor, expected: Tensor, bound: Tensor | float) -> None:
    """Check |found - expected| <= bound, element by element, in float64; NaN fails."""
    excess = (found.double() - expected).abs() - bound
    assert found.shape == expected.shape
    assert not found.numel() or bool((excess <= 0).all()), f"exceeds the bound by up to {excess.max():g}"


def assert_same_rounding(found: Tensor, expected: Tensor) -> None:
    """Check equal bits, except for a few elements where the order of summation changes a rounding by one unit."""
    assert found.dtype == expected.dtype
    assert_within(found, expected.double(), expected.double().abs() * torch.finfo(found.dtype).eps)
    if found.dtype == torch.bfloat16:
        assert float((found != expected).double().mean()) < 0.01
