"""More row kernels, for encoders of pictures and sound: LayerNorm, GELU, rotation, gates, bounds, interpolated rows.

Every argument may be strided as long as its last dimension is contiguous. Activations are float32 or bfloat16. A row's
result depends on that row alone. A wrong argument raises KernelError naming it, what was expected and what was found.
"""

from torch import Tensor

from .contract import Contract
from .errors import KernelError
from .reference import tower_ops as reference

_LAYER_NORM = Contract(
    "layer_norm: x[..., d]:f32|bf16 weight[d]:x bias[d]:x eps:float -> out[..., d]:x", reference.layer_norm
)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return the LayerNorm of the last dimension, (x - mean) / sqrt(variance + eps) * weight + bias (Ba et al., 2016).

    x: [..., d]; weight, bias: [d] of the same dtype. Returns [..., d], contiguous. Computed in fp32, rounded once.
    """
    return _LAYER_NORM(x, weight, bias, eps)


_GELU = Contract("gelu: x[..., d]:f32|bf16 tanh:bool -> out[..., d]:x", reference.gelu)


def gelu(x: Tensor, tanh: bool) -> Tensor:
    """Return the GELU of every element (Hendrycks and Gimpel, 2016), computed in fp32 and rounded once.

    x: [..., d]. Returns [..., d], contiguous.
    tanh=False: x * Phi(x), with Phi the normal distribution function. tanh=True: its approximation
    x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))).
    """
    return _GELU(x, tanh)


_ROTARY_FLOAT = Contract(
    "rotary_float_: q[t, hq, d]:f32|bf16 k[t, hk, d]:q angles[t, 2, d // 2]:f32", reference.rotary_float_
)


def rotary_float_(q: Tensor, k: Tensor, angles: Tensor) -> None:
    """Rotate the heads of q and k in place, by angles whose cosines and sines are float32.

    q: [t, hq, d]; k: [t, hk, d]; angles: [t, 2, d / 2] float32, cosines and sines. All d dims are rotated in pairs
    (i, i + d / 2). Products and sum are fp32, rounded once. The 2-D rotation of Qwen2-VL's encoder (arXiv 2409.12191).
    """
    _ROTARY_FLOAT.check(q, k)
    if q.shape[2] % 2:
        raise KernelError(f"rotary_float_: q: expected an even head dimension, found {q.shape[2]}")
    _ROTARY_FLOAT.run(q, k, angles)


_INTERPOLATE_ROWS = Contract(
    "interpolate_rows: table[p, d]:f32|bf16 rows[t, 4]:i64 weights[t, 4]:f32 -> out[t, d]:table",
    reference.interpolate_rows,
)


def interpolate_rows(table: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sums of four rows of a table, such as of position embeddings that are resampled bilinearly.

    table: [p, d]; rows: [t, 4] int64, each in [0, p); weights: [t, 4] float32.
    Returns [t, d] of the table's dtype: sum over i of weights[:, i] * table[rows[:, i]], in fp32, rounded once.
    """
    return _INTERPOLATE_ROWS(table, rows, weights)


_TANH_GATE = Contract("tanh_gate_: x[m, d]:f32|bf16 gate[1]:x shown[m]?:f32", reference.tanh_gate_)


def tanh_gate_(x: Tensor, gate: Tensor, shown: Tensor | None = None) -> None:
    """Multiply x by tanh(gate), in place: the gates of Flamingo (arXiv 2204.14198) and Llama-3.2-Vision.

    x: [m, d]; gate: [1] of the same dtype, whose tanh is rounded to it before the product. shown: [m] float32; rows
    whose number is 0 become 0.
    """
    _TANH_GATE.run(x, gate, shown)


_CLAMP = Contract("clamp: x[..., d]:f32|bf16 low[1]:x high[1]:x -> out[..., d]:x", reference.clamp)


def clamp(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return min(max(x, low), high), which is exact; NaN stays NaN.

    x: [..., d]; low, high: [1] of the same dtype, the first not above the second. Returns [..., d], contiguous. The
    bounds of Gemma 4's towers.
    """
    return _CLAMP(x, low, high)
