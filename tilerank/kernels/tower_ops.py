"""More row kernels, for encoders of pictures and sound: LayerNorm, GELU, rotation, gates, and interpolation of rows.

Every argument may be strided as long as its last dimension is contiguous. Activations are float32 or bfloat16. A row's
result depends on that row alone. A wrong argument raises KernelError naming it, what was expected and what was found.
"""

import torch
from torch import Tensor

from . import check, core
from .errors import KernelError
from .reference import tower_ops as reference

_LAYER_NORM = core.kernel("layer_norm")
_GELU = core.kernel("gelu")
_ROTARY_FLOAT = core.kernel("rotary_float")
_INTERPOLATE_ROWS = core.kernel("interpolate_rows")
_TANH_GATE = core.kernel("tanh_gate")


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return the LayerNorm of the last dimension, (x - mean) / sqrt(variance + eps) * weight + bias (Ba et al., 2016).

    x: [..., d]; weight, bias: [d] of the same dtype. Returns [..., d], contiguous. Computed in fp32, rounded once.
    """
    check.tensor("layer_norm", "x", x, (*x.shape[:-1], None), check.ACTIVATION_DTYPES)
    check.tensor("layer_norm", "weight", weight, (x.shape[-1],), x.dtype)
    check.tensor("layer_norm", "bias", bias, (x.shape[-1],), x.dtype)
    if core.isa() == "reference":
        return reference.layer_norm(x, weight, bias, eps)
    out = core.empty(x.shape, x.dtype)
    core.launch(_LAYER_NORM, (x, weight, bias, out), (), (eps,))
    return out


def gelu(x: Tensor, tanh: bool) -> Tensor:
    """Return the GELU of every element (Hendrycks and Gimpel, 2016), computed in fp32 and rounded once.

    x: [..., d]. Returns [..., d], contiguous.
    tanh=False: x * Phi(x), with Phi the normal distribution function. tanh=True: its approximation
    x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))).
    """
    check.tensor("gelu", "x", x, (*x.shape[:-1], None), check.ACTIVATION_DTYPES)
    if core.isa() == "reference":
        return reference.gelu(x, tanh)
    out = core.empty(x.shape, x.dtype)
    core.launch(_GELU, (x, out), (tanh,))
    return out


def rotary_float_(q: Tensor, k: Tensor, angles: Tensor) -> None:
    """Rotate the heads of q and k in place, by angles whose cosines and sines are float32.

    q: [t, hq, d]; k: [t, hk, d]; angles: [t, 2, d / 2] float32, cosines and sines. All d dims are rotated in pairs
    (i, i + d / 2). Products and sum are fp32, rounded once. The 2-D rotation of Qwen2-VL's encoder (arXiv 2409.12191).
    """
    check.tensor("rotary_float_", "q", q, (None, None, None), check.ACTIVATION_DTYPES)
    check.tensor("rotary_float_", "k", k, (q.shape[0], None, q.shape[2]), q.dtype)
    if q.shape[2] % 2:
        raise KernelError(f"rotary_float_: q: expected an even head dimension, found {q.shape[2]}")
    check.tensor("rotary_float_", "angles", angles, (q.shape[0], 2, q.shape[2] // 2), torch.float32)
    if core.isa() == "reference":
        reference.rotary_float_(q, k, angles)
    else:
        core.launch(_ROTARY_FLOAT, (q, k, angles))


def interpolate_rows(table: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sums of four rows of a table, such as of position embeddings that are resampled bilinearly.

    table: [p, d]; rows: [t, 4] int64, each in [0, p); weights: [t, 4] float32.
    Returns [t, d] of the table's dtype: sum over i of weights[:, i] * table[rows[:, i]], in fp32, rounded once.
    """
    check.tensor("interpolate_rows", "table", table, (None, None), check.ACTIVATION_DTYPES)
    check.tensor("interpolate_rows", "rows", rows, (None, 4), torch.int64)
    check.tensor("interpolate_rows", "weights", weights, rows.shape, torch.float32)
    if core.isa() == "reference":
        return reference.interpolate_rows(table, rows, weights)
    out = core.empty((rows.shape[0], table.shape[1]), table.dtype)
    core.launch(_INTERPOLATE_ROWS, (table, rows, weights, out))
    return out


def tanh_gate_(x: Tensor, gate: Tensor, shown: Tensor | None = None) -> None:
    """Multiply x by tanh(gate), in place: the gates of Flamingo (arXiv 2204.14198) and Llama-3.2-Vision.

    x: [m, d]; gate: [1] of the same dtype, whose tanh is rounded to it before the product. shown: [m] float32; rows
    whose number is 0 become 0.
    """
    check.tensor("tanh_gate_", "x", x, (None, None), check.ACTIVATION_DTYPES)
    check.tensor("tanh_gate_", "gate", gate, (1,), x.dtype)
    if shown is not None:
        check.tensor("tanh_gate_", "shown", shown, (x.shape[0],), torch.float32)
    if core.isa() == "reference":
        reference.tanh_gate_(x, gate, shown)
    else:
        core.launch(_TANH_GATE, (x, gate, shown))
