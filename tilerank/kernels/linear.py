"""The packed linear layer: any weight format, any sizes, fp32 sums and a fused epilogue."""

from typing import Literal, get_args

import torch
from torch import Tensor

from . import check, core
from .contract import Contract
from .errors import KernelError
from .reference import linear as reference
from .weight import BLOCK_N, Weight
from .weight_formats import LAYOUTS

GatedActivation = Literal["silu_mul", "gelu_tanh_mul"]
Activation = GatedActivation | Literal["gelu", "gelu_tanh"]

_ACTIVATIONS: dict[str | None, int] = {None: 0, "silu_mul": 1, "gelu": 2, "gelu_tanh": 3, "gelu_tanh_mul": 4}
"""Numbers of the enum in csrc/linear/epilogue-inl.h."""

_LINEAR = {
    (layout, dtype): Contract(
        "linear: x[m, w.k]:w.format.activations w:weight bias[w.n]?:f32|bf16 activation:int width:size bytes:size "
        f"-> {out} scratch[bytes]?:u8",
        layout=layout,
    )
    for layout in LAYOUTS
    # Rows that are apart are more than twice as fast to write; float32 results are logits, which stay contiguous.
    for dtype, out in ((torch.bfloat16, "apart out[m, width]:bf16"), (torch.float32, "out[m, width]:f32"))
}


def linear(
    x: Tensor,
    w: Weight,
    bias: Tensor | None = None,
    *,
    activation: Activation | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return activation(x[m, k] @ weight[n, k].T + bias[n]): [m, n], or [m, n / 2] with a gated activation.

    x: dtype `w.format.activations`, with contiguous rows; bias: float32 or bfloat16, contiguous; out_dtype: float32 or
    bfloat16, default x.dtype.
    activation: "gelu" (with erf) or "gelu_tanh" (its tanh approximation); or gated, where the weight and the bias
    alternate between 32 rows of gate and 32 rows of up: "silu_mul" = silu(gate) * up, or "gelu_tanh_mul".
    All arithmetic is fp32 and the result is rounded once. A row of the result depends only on the same row of x.
    Raises KernelError for an argument of another shape or dtype.
    """
    out_dtype = out_dtype or x.dtype
    check.dtype("linear", "out_dtype", out_dtype)
    if activation not in _ACTIVATIONS:
        known = ", ".join(name for name in _ACTIVATIONS if name)
        raise KernelError(f"linear: activation: expected {known} or None, found {activation!r}")
    is_gated = activation in get_args(GatedActivation)
    if is_gated and w.n % (2 * BLOCK_N):
        raise KernelError(
            f"linear: {activation}: expected a weight of blocks of 32 gate and 32 up rows, found {w.n} rows"
        )
    width = w.n // 2 if is_gated else w.n
    contract = _LINEAR[w.format.layout, out_dtype]
    arguments = (x, w, bias, _ACTIVATIONS[activation], width)
    if core.isa() == "reference" or w.is_plain:
        contract.check(*arguments)
        return reference.linear(x, w, bias, activation=activation, out_dtype=out_dtype)
    return contract(*arguments, w.scratch(x.shape[0]))
