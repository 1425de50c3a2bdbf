"""The cap of logits against float64 arithmetic."""

import torch
from matrices import randn

from tilerank.kernels import ops


def test_soft_cap_is_exact_to_rounding(rung: str) -> None:
    logits = randn(3, 5000) * 20
    logits[0, :4] = torch.tensor([0.0, 1e-6, -200.0, float("inf")])
    exact = 30 * torch.tanh(logits.double() / 30)
    ops.soft_cap_(logits, 30.0)
    assert ((logits - exact).abs() <= 1e-6 * exact.abs()).all()
