"""The temperature of attention by position (Llama 4, Ministral 3)."""

from torch import Tensor

from .contract import Contract
from .errors import KernelError
from .reference import temperature as reference

_SCALE_BY_POSITION = Contract(
    "scale_by_position_: q[t, h, d]:f32|bf16 positions[t]:i64 beta:float original:int", reference.scale_by_position_
)


def scale_by_position_(q: Tensor, positions: Tensor, beta: float, original: int) -> None:
    """Multiply the queries of each token by 1 + beta * ln(1 + floor(position / original)), in place.

    q: [t, h, d]; positions: [t] int64, from 0 on; original: tokens of the context before it was extended, at least 1.
    The factor is rounded to the dtype of q before the product, as transformers does (get_llama_4_attn_scale).
    """
    _SCALE_BY_POSITION.check(q, positions, beta, original)
    if original < 1:
        raise KernelError(f"scale_by_position_: original: expected at least 1, found {original}")
    _SCALE_BY_POSITION.run(q, positions, beta, original)
