"""The RMS norm of all heads of a token together, some of which are on other ranks (MiniMax-M2, OLMo 3)."""

from torch import Tensor

from .contract import Contract
from .errors import KernelError
from .reference import joint_norm as reference

_HEAD_SQUARES = Contract(
    "head_squares: q[t, hq, d]:f32|bf16 k[t, hk, d]:q first_key:int -> out[t, 2]:f32", reference.head_squares
)


def head_squares(q: Tensor, k: Tensor, first_key: int = 0) -> Tensor:
    """Return the sum of squares of all heads of q, and that of the heads of k from `first_key` on, for each token.

    q: [t, hq, d]; k: [t, hk, d]. Returns [t, 2] float32.
    """
    if not 0 <= first_key <= k.shape[1]:
        raise KernelError(f"head_squares: first_key: expected 0 to {k.shape[1]}, found {first_key}")
    return _HEAD_SQUARES(q, k, first_key)


_JOINT_NORM = Contract(
    "joint_norm_: q[t, hq, d]:f32|bf16 k[t, hk, d]:q q_weight[hq, d]:q k_weight[hk, d]:q squares[t, 2]:f32 q_width:int "
    "k_width:int eps:float",
    reference.joint_norm_,
)


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
    """`rms_norm`, in its default form, of all heads of q of a token together, and of those of k, in place.

    q: [t, hq, d] and k: [t, hk, d] are some of the heads, with their weights [hq, d] and [hk, d]. squares: [t, 2]
    float32, the sums of squares of all heads (`head_squares`), which have q_width and k_width columns together.
    """
    _JOINT_NORM.run(q, k, q_weight, k_weight, squares, q_width, k_width, eps)
