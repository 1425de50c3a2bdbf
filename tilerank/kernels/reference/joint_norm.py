"""`joint_norm.py` in plain torch."""

import torch
from torch import Tensor


def head_squares(q: Tensor, k: Tensor, first_key: int = 0) -> Tensor:
    """The sums of squares of all heads of q, and of the heads of k from `first_key` on."""
    return torch.stack([heads.float().square().sum((1, 2)) for heads in (q, k[:, first_key:])], 1)


def joint_norm_(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    squares: Tensor,
    q_width: int,
    k_width: int,
    eps: float,
) -> None:
    """MiniMaxM2RMSNorm of transformers over all heads together, of which q and k have some."""
    for heads, weight, total, width in ((q, q_weight, squares[:, 0], q_width), (k, k_weight, squares[:, 1], k_width)):
        normed = heads.float() * torch.rsqrt(total / width + eps)[:, None, None]
        heads.copy_(weight * normed.to(heads.dtype))
