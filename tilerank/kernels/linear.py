"""The packed linear layer: any weight format, any sizes, fp32 sums and a fused epilogue."""

from typing import Literal

import torch
from torch import Tensor

from . import check, core
from .errors import KernelError
from .reference import linear as reference
from .weight import BLOCK_N, Weight

Activation = Literal["silu_mul", "gelu", "gelu_tanh"]

_ACTIVATIONS: dict[str | None, int] = {None: 0, "silu_mul": 1, "gelu": 2, "gelu_tanh": 3}
"""Numbers of the enum in csrc/linear/epilogue-inl.h."""


def linear(
    x: Tensor,
    w: Weight,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    activation: Activation | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return activation(x[..., k] @ weight[n, k].T + bias[n]) + residual: [..., n], or [..., n / 2] with "silu_mul".

    x: dtype `w.format.activations`; bias: float32 or bfloat16, contiguous; residual: float32 or bfloat16, in the shape
    of the result; out_dtype: float32 or bfloat16, default x.dtype.
    activation: "gelu" (with erf), "gelu_tanh" (its tanh approximation) or "silu_mul" = silu(gate) * up, where the
    weight and the bias alternate between 32 rows of gate and 32 rows of up.
    All arithmetic is fp32 and the result is rounded once. A row of the result depends only on the same row of x.
    Raises KernelError for an argument of another shape or dtype.
    """
    out_dtype = out_dtype or x.dtype
    dtypes = check.ACTIVATION_DTYPES
    sizes = x.shape
    if x.dtype != w.format.activations or not sizes or sizes[-1] != w.k:
        raise KernelError(
            f"linear: x: expected [..., {w.k}] {w.format.activations} for the weight, found {list(x.shape)} {x.dtype}"
        )
    check.dtype("linear", "out_dtype", out_dtype)
    if bias is not None and (bias.shape != (w.n,) or bias.dtype not in dtypes or not bias.is_contiguous()):
        raise KernelError(
            f"linear: bias: expected contiguous [{w.n}] float32 or bfloat16, found {list(bias.shape)} {bias.dtype}"
        )
    if activation not in _ACTIVATIONS:
        raise KernelError(f"linear: activation: expected silu_mul, gelu, gelu_tanh or None, found {activation!r}")
    width = w.n
    if activation == "silu_mul":
        width //= 2
        if w.n % (2 * BLOCK_N):
            raise KernelError(
                f"linear: silu_mul: expected a weight of blocks of 32 gate and 32 up rows, found {w.n} rows"
            )
    shape = (*sizes[:-1], width)
    if residual is not None and (residual.shape != shape or residual.dtype not in dtypes):
        raise KernelError(
            f"linear: residual: expected {list(shape)} float32 or bfloat16, "
            f"found {list(residual.shape)} {residual.dtype}"
        )
    if core.isa() == "reference" or w.is_plain:
        return reference.linear(x, w, bias, residual=residual, activation=activation, out_dtype=out_dtype)
    rows = _rows(x)
    residual = None if residual is None else _rows(residual)
    m = sizes[0] if rows is x else rows.shape[0]
    # Padded rows are more than twice as fast to write; float32 results are logits, which stay contiguous.
    out = (core.empty if out_dtype == torch.float32 else core.empty_rows)((m, width), out_dtype)
    if m:
        scratch = w.scratch(m)
        working = core.empty((scratch,), torch.uint8) if scratch else None
        core.launch(w.kernel, (rows, bias, residual, out, working, *w.operands()), (_ACTIVATIONS[activation],))
    return out if rows is x else out.view(shape)


def _rows(x: Tensor) -> Tensor:
    """Return x as a matrix with contiguous rows."""
    rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])  # making a view costs as much as the launch
    return rows if rows.stride(1) == 1 else rows.contiguous()
