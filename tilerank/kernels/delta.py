"""The kernels of gated delta nets (Yang et al., arXiv 2412.06464), as Qwen3-Next, Qwen3.5 and later have them.

A layer has `key_heads` heads of queries and keys of size dk and `value_heads` heads of values of size dv. value_heads
is a multiple of key_heads, and value head j belongs to key head j / (value_heads / key_heads). Each request has a slot
with two states: the last inputs of the convolution, and a matrix [dk, dv] for each value head.

Every argument may be strided as long as its last dimension is contiguous. Activations are float32 or bfloat16. A step
consists of sequences: sequence i has the rows query_starts[i] to query_starts[i + 1], the last of its seq_lens[i]
tokens. A sequence whose tokens are all in this step begins with states of zeros, whatever its slot holds.

Drafts: after a sequence of one row there may be others of one row with the same slot, drafts of the tokens that follow.
No other sequences have the same slot. A draft has the output that it would have as the next row of the sequence, bit
for bit, but the states take in the row before the drafts alone. What they need of each draft to take it in later is
stored beside them in the slot, in place of the drafts of the step before. kept[i] says how many of those, from the
first on, are tokens of the sequence now: the states take them in before its row. Drafts that are not kept cost nothing.

Padding of recorded steps: a sequence of one row whose slot is -1 - j repeats row j, which must be the row of a sequence
of one row with a slot. Its output is a copy of row j, and it touches no state.

A wrong argument raises KernelError naming it, what was expected and what was found.
"""

from __future__ import annotations

from torch import Tensor

from .contract import Contract
from .errors import KernelError
from .reference import delta as reference
from .state_slots import StateSlots

MAX_CONV_WIDTH = 8
MAX_HEAD_DIM = 256


_CAUSAL_CONV = Contract(
    "causal_conv: x[t, c]:f32|bf16 weight[c, width]:x conv[n, _, c]:x slots[s]:i32 kept[s]:i32 query_starts[s + 1]:i32 "
    "seq_lens[s]:i32 -> out[t, c]:x",
    reference.causal_conv,
)


def causal_conv(
    x: Tensor, weight: Tensor, conv: Tensor, slots: Tensor, kept: Tensor, query_starts: Tensor, seq_lens: Tensor
) -> Tensor:
    """Return the SiLU of the causal depthwise convolution of every sequence, and keep its last inputs.

    x: [t, c]; weight: [c, width], width 1 to 8, of x's dtype. conv: [slots, width - 1 + drafts, c] of x's dtype, the
    last inputs of the sequence in each slot, the oldest first, and those of its drafts; zeros stand for the inputs
    before a sequence. slots, kept, seq_lens: [s] int32; query_starts: [s + 1] int32.
    Returns [t, c], contiguous: silu(sum over i of weight[:, i] * input[row - (width - 1) + i]), in fp32, rounded once.
    """
    _CAUSAL_CONV.check(x, weight, conv)
    if not 1 <= weight.shape[1] <= MAX_CONV_WIDTH:
        raise KernelError(f"causal_conv: weight: expected a width of 1 to {MAX_CONV_WIDTH}, found {weight.shape[1]}")
    if conv.shape[1] < weight.shape[1] - 1:
        raise KernelError(f"causal_conv: conv: expected at least {weight.shape[1] - 1} rows, found {conv.shape[1]}")
    return _CAUSAL_CONV(x, weight, conv, slots, kept, query_starts, seq_lens)


_DELTA_GATING = Contract(
    "delta_gating: a[t, heads]:f32|bf16 b[t, heads]:a a_log[heads]:f32|bf16 dt_bias[heads]:f32|bf16 "
    "-> g[t, heads]:f32 beta[t, heads]:f32",
    reference.delta_gating,
)


def delta_gating(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-decays and the learning rates of the delta rule.

    a, b: [t, value_heads]; a_log, dt_bias: [value_heads], each float32 or bfloat16.
    Returns g = -exp(a_log) * softplus(a + dt_bias) in fp32 and beta = sigmoid(b), rounded to b's dtype as transformers
    does: both [t, value_heads] float32, contiguous.
    """
    g, beta = _DELTA_GATING.run(a, b, a_log, dt_bias)
    return g, beta


_DELTA_RULE = Contract(
    "delta_rule: qkv[t, 2 * key_heads * dk + heads * dv]:f32|bf16 g[t, heads]:f32 beta[t, heads]:f32 "
    "states.state[n, heads, dk, dv]:f32 states.drafts[n, d, 2 * key_heads * dk + heads * dv]:qkv "
    "states.draft_gates[n, d, 2 * heads]:f32 slots[s]:i32 kept[s]:i32 query_starts[s + 1]:i32 seq_lens[s]:i32 "
    "key_heads:int -> out[t, heads * dv]:qkv",
    reference.delta_rule,
)


def delta_rule(
    qkv: Tensor,
    g: Tensor,
    beta: Tensor,
    states: StateSlots,
    slots: Tensor,
    kept: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    key_heads: int,
) -> Tensor:
    """Return the outputs of the gated delta rule and update the states in place, for any mixture of sequences.

    qkv: [t, 2 * key_heads * dk + value_heads * dv], the columns of q, k and v; g, beta: [t, value_heads] float32 from
    `delta_gating`; states.state: [slots, value_heads, dk, dv] float32, contiguous within a slot, dk and dv up to
    256; slots, kept, seq_lens: [s] int32; query_starts: [s + 1] int32.
    q and k are first divided by their length, x / sqrt(sum x^2 + 1e-6), and q by sqrt(dk). For each token and value
    head: S = exp(g) S; u = beta (v - S^T k); S = S + k u^T; o = S^T q.
    Returns o, [t, value_heads * dv] of qkv's dtype, contiguous. All is computed in fp32 and rounded once. A sequence of
    one row is computed as written here, one of several rows in chunks of 64 (Yang et al., section 3.3). A row's bits
    depend only on its sequence's state and rows in this step, and kept drafts.
    """
    _DELTA_RULE.check(qkv, g, beta, states)
    _check_states("delta_rule", states.state, key_heads)
    return _DELTA_RULE(qkv, g, beta, states, slots, kept, query_starts, seq_lens, key_heads)


_DELTA_STEP = Contract(
    "delta_step: qkv[s, 2 * key_heads * dk + heads * dv]:f32|bf16 a[s, heads]:qkv b[s, heads]:a a_log[heads]:f32|bf16 "
    "dt_bias[heads]:f32|bf16 states.state[n, heads, dk, dv]:f32 "
    "states.drafts[n, d, 2 * key_heads * dk + heads * dv]:qkv states.draft_gates[n, d, 2 * heads]:f32 slots[s]:i32 "
    "kept[s]:i32 seq_lens[s]:i32 key_heads:int -> out[s, heads * dv]:qkv",
    reference.delta_step,
)


def delta_step(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    states: StateSlots,
    slots: Tensor,
    kept: Tensor,
    seq_lens: Tensor,
    key_heads: int,
) -> Tensor:
    """Return what `delta_gating` and `delta_rule` do for sequences of one row each, bit for bit, in one kernel.

    qkv: [s, 2 * key_heads * dk + value_heads * dv]; the other arguments are those of `delta_gating` and `delta_rule`.
    Every state is read from memory and written once, whatever the number of drafts.
    """
    _DELTA_STEP.check(qkv, a, b, a_log, dt_bias, states)
    _check_states("delta_step", states.state, key_heads)
    return _DELTA_STEP(qkv, a, b, a_log, dt_bias, states, slots, kept, seq_lens, key_heads)


_GATED_NORM = Contract(
    "gated_norm: o[t, c]:f32|bf16 z[t, c]:o weight[d]:o eps:float -> apart out[t, c]:o", reference.gated_norm
)


def gated_norm(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm of every head, gated: o / sqrt(mean(o^2) + eps) * weight * silu(z) (Qwen3_5RMSNormGated).

    o, z: [t, heads * dv]; weight: [dv] of the same dtype. Returns [t, heads * dv] with contiguous rows
    (`core.empty_rows`). The norm is rounded before and after the product with weight; silu and its product are fp32,
    rounded once.
    """
    _GATED_NORM.check(o, z, weight)
    if o.shape[1] % max(weight.shape[0], 1):
        raise KernelError(f"gated_norm: o: expected heads of {weight.shape[0]} columns, found {o.shape[1]} columns")
    return _GATED_NORM(o, z, weight, eps)


_SIGMOID_GATE = Contract("sigmoid_gate_: x[..., d]:f32|bf16 gate[..., w]:x", reference.sigmoid_gate_)


def sigmoid_gate_(x: Tensor, gate: Tensor) -> None:
    """Multiply x by sigmoid(gate), in place; the sigmoid and the product are rounded as transformers does.

    x: [..., d]; gate: the same shape and dtype, or [..., 1], a number for each row. The output gate of Qwen3.5's
    attention, whose gate is a part of the query projection, and the gate of the shared expert of Qwen3.5-MoE.
    """
    _SIGMOID_GATE.check(x, gate)
    if gate.shape[-1] not in (1, x.shape[-1]):
        raise KernelError(f"sigmoid_gate_: gate: expected {x.shape[-1]} or 1 columns, found {gate.shape[-1]}")
    _SIGMOID_GATE.run(x, gate)


def _check_states(kernel: str, state: Tensor, key_heads: int) -> None:
    _, value_heads, dk, dv = state.shape
    if state.stride()[1:3] != (dk * dv, dv):
        raise KernelError(f"{kernel}: state: expected contiguous slots, found strides {list(state.stride())}")
    if not (0 < dk <= MAX_HEAD_DIM and 0 < dv <= MAX_HEAD_DIM):
        raise KernelError(
            f"{kernel}: state: expected matrices of 1 to {MAX_HEAD_DIM} rows and columns, found {dk}, {dv}"
        )
    if value_heads % key_heads if key_heads > 0 else value_heads:
        raise KernelError(f"{kernel}: key_heads: expected a divisor of {value_heads} value heads, found {key_heads}")
