"""The kernels of gated delta nets (Yang et al., arXiv 2412.06464), as Qwen3-Next, Qwen3.5 and later have them.

A layer has `key_heads` heads of queries and keys of size dk and `value_heads` heads of values of size dv. value_heads
is a multiple of key_heads, and value head j belongs to key head j / (value_heads / key_heads). Each request has a slot
with two states: the last inputs of the convolution, and a matrix [dk, dv] for each value head.

Every argument may be strided as long as its last dimension is contiguous. Activations are float32 or bfloat16. A step
consists of sequences: sequence i has the rows query_starts[i] to query_starts[i + 1], the last of its seq_lens[i]
tokens. A sequence whose tokens are all in this step begins with states of zeros, whatever its slot holds. No two
sequences have the same slot.

Padding of recorded steps: a sequence of one row whose slot is -1 - j repeats row j, which must be the row of a sequence
of one row with a slot of its own. Its output is a copy of row j, and it touches no state.

A wrong argument raises KernelError naming it, what was expected and what was found.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import check, core
from .errors import KernelError
from .reference import delta as reference

_CAUSAL_CONV = core.kernel("causal_conv")
_DELTA_GATING = core.kernel("delta_gating")
_DELTA_RULE = core.kernel("delta_rule")
_DELTA_STEP = core.kernel("delta_step")
_GATED_NORM = core.kernel("gated_norm")
_SIGMOID_GATE = core.kernel("sigmoid_gate")

MAX_CONV_WIDTH = 8
MAX_HEAD_DIM = 256


def causal_conv(
    x: Tensor, weight: Tensor, conv: Tensor, slots: Tensor, query_starts: Tensor, seq_lens: Tensor
) -> Tensor:
    """Return the SiLU of the causal depthwise convolution of every sequence, and keep its last inputs.

    x: [t, c]; weight: [c, width], width 1 to 8, of x's dtype. conv: [slots, width - 1, c] of x's dtype, the last inputs
    of the sequence in each slot, the oldest first; zeros stand for the inputs before a sequence. slots, seq_lens: [s]
    int32; query_starts: [s + 1] int32.
    Returns [t, c], contiguous: silu(sum over i of weight[:, i] * input[row - (width - 1) + i]), in fp32, rounded once.
    """
    check.tensor("causal_conv", "x", x, (None, None), check.ACTIVATION_DTYPES)
    check.tensor("causal_conv", "weight", weight, (x.shape[1], None), x.dtype)
    width = weight.shape[1]
    if not 1 <= width <= MAX_CONV_WIDTH:
        raise KernelError(f"causal_conv: weight: expected a width of 1 to {MAX_CONV_WIDTH}, found {width}")
    check.tensor("causal_conv", "conv", conv, (None, width - 1, x.shape[1]), x.dtype)
    _check_batch("causal_conv", slots, query_starts, seq_lens)
    if core.isa() == "reference":
        return reference.causal_conv(x, weight, conv, slots, query_starts, seq_lens)
    out = core.empty(x.shape, x.dtype)
    core.launch(_CAUSAL_CONV, (x, weight, conv, slots, query_starts, seq_lens, out))
    return out


def delta_gating(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-decays and the learning rates of the delta rule.

    a, b: [t, value_heads]; a_log, dt_bias: [value_heads], each float32 or bfloat16.
    Returns g = -exp(a_log) * softplus(a + dt_bias) in fp32 and beta = sigmoid(b), rounded to b's dtype as transformers
    does: both [t, value_heads] float32, contiguous.
    """
    _check_gates("delta_gating", a, b, a_log, dt_bias)
    if core.isa() == "reference":
        return reference.delta_gating(a, b, a_log, dt_bias)
    g, beta = core.empty(a.shape, torch.float32), core.empty(a.shape, torch.float32)
    core.launch(_DELTA_GATING, (a, b, a_log, dt_bias, g, beta))
    return g, beta


def delta_rule(
    qkv: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    slots: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    key_heads: int,
) -> Tensor:
    """Return the outputs of the gated delta rule and update the states in place, for any mixture of sequences.

    qkv: [t, 2 * key_heads * dk + value_heads * dv], the columns of q, k and v; g, beta: [t, value_heads] float32 from
    `delta_gating`; state: [slots, value_heads, dk, dv] float32, contiguous within a slot, dk and dv up to 256;
    slots, seq_lens: [s] int32; query_starts: [s + 1] int32.
    q and k are first divided by their length, x / sqrt(sum x^2 + 1e-6), and q by sqrt(dk). For each token and value
    head: S = exp(g) S; u = beta (v - S^T k); S = S + k u^T; o = S^T q.
    Returns o, [t, value_heads * dv] of qkv's dtype, contiguous. All is computed in fp32 and rounded once. A sequence of
    one row is computed as written here, one of several rows in chunks of 64 (Yang et al., section 3.3). A row's bits
    depend only on its sequence's state and rows in this step.
    """
    shape = _check_rule("delta_rule", qkv, g, state, key_heads)
    check.tensor("delta_rule", "g", g, (qkv.shape[0], None), torch.float32)
    check.tensor("delta_rule", "beta", beta, g.shape, torch.float32)
    _check_batch("delta_rule", slots, query_starts, seq_lens)
    if core.isa() == "reference":
        return reference.delta_rule(qkv, g, beta, state, slots, query_starts, seq_lens, key_heads)
    out = core.empty(shape, qkv.dtype)
    core.launch(_DELTA_RULE, (qkv, g, beta, state, slots, query_starts, seq_lens, out), (key_heads,))
    return out


def delta_step(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    slots: Tensor,
    seq_lens: Tensor,
    key_heads: int,
) -> Tensor:
    """Return what `delta_gating` and `delta_rule` do for sequences of one row each, bit for bit, in one kernel.

    qkv: [s, 2 * key_heads * dk + value_heads * dv]; the other arguments are those of `delta_gating` and `delta_rule`.
    Every state is read from memory and written once.
    """
    shape = _check_rule("delta_step", qkv, a, state, key_heads)
    _check_gates("delta_step", a, b, a_log, dt_bias)
    check.tensor("delta_step", "a", a, (qkv.shape[0], None), qkv.dtype)
    check.tensor("delta_step", "slots", slots, (qkv.shape[0],), torch.int32)
    check.tensor("delta_step", "seq_lens", seq_lens, (qkv.shape[0],), torch.int32)
    if core.isa() == "reference":
        return reference.delta_step(qkv, a, b, a_log, dt_bias, state, slots, seq_lens, key_heads)
    out = core.empty(shape, qkv.dtype)
    core.launch(_DELTA_STEP, (qkv, a, b, a_log, dt_bias, state, slots, seq_lens, out), (key_heads,))
    return out


def gated_norm(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm of every head, gated: o / sqrt(mean(o^2) + eps) * weight * silu(z) (Qwen3_5RMSNormGated).

    o, z: [t, heads * dv]; weight: [dv] of the same dtype. Returns [t, heads * dv] with contiguous rows
    (`core.empty_rows`). The norm is rounded before and after the product with weight; silu and its product are fp32,
    rounded once.
    """
    check.tensor("gated_norm", "weight", weight, (None,), check.ACTIVATION_DTYPES)
    check.tensor("gated_norm", "o", o, (None, None), weight.dtype)
    check.tensor("gated_norm", "z", z, o.shape, weight.dtype)
    if o.shape[1] % max(weight.shape[0], 1):
        raise KernelError(f"gated_norm: o: expected heads of {weight.shape[0]} columns, found {o.shape[1]} columns")
    if core.isa() == "reference":
        return reference.gated_norm(o, z, weight, eps)
    out = core.empty_rows(o.shape, o.dtype)
    core.launch(_GATED_NORM, (o, z, weight, out), (), (eps,))
    return out


def sigmoid_gate_(x: Tensor, gate: Tensor) -> None:
    """Multiply x by sigmoid(gate), in place; the sigmoid and the product are rounded as transformers does.

    x: [..., d]; gate: the same shape and dtype, or [..., 1], a number for each row. The output gate of Qwen3.5's
    attention, whose gate is a part of the query projection, and the gate of the shared expert of Qwen3.5-MoE.
    """
    check.tensor("sigmoid_gate_", "x", x, (*x.shape[:-1], None), check.ACTIVATION_DTYPES)
    check.tensor("sigmoid_gate_", "gate", gate, (*x.shape[:-1], None), x.dtype)
    if gate.shape[-1] not in (1, x.shape[-1]):
        raise KernelError(f"sigmoid_gate_: gate: expected {x.shape[-1]} or 1 columns, found {gate.shape[-1]}")
    if core.isa() == "reference":
        reference.sigmoid_gate_(x, gate)
    else:
        core.launch(_SIGMOID_GATE, (x, gate))


def _check_batch(kernel: str, slots: Tensor, query_starts: Tensor, seq_lens: Tensor) -> None:
    check.tensor(kernel, "slots", slots, (None,), torch.int32)
    check.tensor(kernel, "seq_lens", seq_lens, slots.shape, torch.int32)
    check.tensor(kernel, "query_starts", query_starts, (slots.shape[0] + 1,), torch.int32)


def _check_gates(kernel: str, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> None:
    check.tensor(kernel, "a", a, (None, None), check.ACTIVATION_DTYPES)
    check.tensor(kernel, "b", b, a.shape, a.dtype)
    check.tensor(kernel, "a_log", a_log, a.shape[1:], check.ACTIVATION_DTYPES)
    check.tensor(kernel, "dt_bias", dt_bias, a.shape[1:], check.ACTIVATION_DTYPES)


def _check_rule(kernel: str, qkv: Tensor, gates: Tensor, state: Tensor, key_heads: int) -> tuple[int, int]:
    """Check the shapes of a delta rule and return that of its output."""
    check.tensor(kernel, "state", state, (None, None, None, None), torch.float32)
    _, value_heads, dk, dv = state.shape
    if state.stride()[1:3] != (dk * dv, dv):
        raise KernelError(f"{kernel}: state: expected contiguous slots, found strides {list(state.stride())}")
    if not (0 < dk <= MAX_HEAD_DIM and 0 < dv <= MAX_HEAD_DIM):
        raise KernelError(
            f"{kernel}: state: expected matrices of 1 to {MAX_HEAD_DIM} rows and columns, found {dk}, {dv}"
        )
    if value_heads % key_heads if key_heads > 0 else value_heads:
        raise KernelError(f"{kernel}: key_heads: expected a divisor of {value_heads} value heads, found {key_heads}")
    check.tensor(kernel, "qkv", qkv, (None, 2 * key_heads * dk + value_heads * dv), check.ACTIVATION_DTYPES)
    if gates.dim() == 2 and gates.shape[1] != value_heads:
        raise KernelError(f"{kernel}: state: expected {gates.shape[1]} value heads, found {value_heads}")
    return qkv.shape[0], value_heads * dv
