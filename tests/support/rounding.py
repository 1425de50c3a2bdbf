"""Comparison of results up to the rounding of their dtype."""

import torch
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16]
EPS32 = torch.finfo(torch.float32).eps


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
