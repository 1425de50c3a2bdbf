"""`temperature.py` in plain torch."""

from torch import Tensor


def scale_by_position_(q: Tensor, positions: Tensor, beta: float, original: int) -> None:
    """q *= 1 + beta * ln(1 + floor(position / original)), in place, with the factor in fp64 until it is rounded."""
    factors = 1 + beta * (1 + positions // original).double().log()
    q.mul_(factors.to(q.dtype)[:, None, None])
