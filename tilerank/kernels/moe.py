"""Mixture of experts: the routers, and the experts' gated MLPs.

A row's result depends only on that row. A wrong argument raises KernelError naming it, what was expected and what was
found.
"""

from typing import Literal

from torch import Tensor

from . import core
from .contract import Contract
from .errors import KernelError
from .packed_experts import PackedExperts
from .reference import moe as reference
from .weight import TILE_ROWS, WORK_QUEUE_BYTES
from .weight_formats import EXPERT_LAYOUTS, are_expert_formats

_SOFTMAX_TOP_K = Contract(
    "softmax_top_k: logits[m, experts]:f32|bf16 top_k:size renormalize:bool scales[experts]?:f32 -> "
    "ids[m, top_k]:i32 weights[m, top_k]:f32",
    reference.softmax_top_k,
)


def softmax_top_k(
    logits: Tensor, top_k: int, *, renormalize: bool, scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choose the `top_k` most probable experts of every token (the Qwen MoE router).

    logits: [m, experts] float32 or bfloat16. Returns ids [m, top_k] int32, most probable first, the lower id first of
    equals, and weights [m, top_k] float32: the softmax over all experts in fp32, divided by the sum of the chosen ones
    if `renormalize`, rounded to logits.dtype. scales: [experts] float32, factors of each expert's weights (Gemma 4).
    """
    _SOFTMAX_TOP_K.check(logits)
    _check_top_k("softmax_top_k", top_k, logits.shape[1])
    ids, weights = _SOFTMAX_TOP_K.run(logits, top_k, renormalize, scales)
    return ids, weights


_SIGMOID_TOP_K = Contract(
    "sigmoid_top_k: logits[m, experts]:f32 bias[experts]:f32 top_k:size groups:int top_groups:int renormalize:bool "
    "scale:float -> ids[m, top_k]:i32 weights[m, top_k]:f32",
    reference.sigmoid_top_k,
)


def sigmoid_top_k(
    logits: Tensor, bias: Tensor, top_k: int, *, groups: int, top_groups: int, renormalize: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Choose the `top_k` experts of every token from its best groups of experts (DeepSeek-V3, arXiv 2412.19437).

    logits: [m, experts] float32; bias: [experts] float32. With s = sigmoid(logits) and c = s + bias: keep those
    `top_groups` of the `groups` equal groups of experts with the largest sum of their two largest c; of their experts
    choose the `top_k` with the largest c. Of equals the first is chosen.
    Returns ids [m, top_k] int32 in descending order of c, and weights [m, top_k] float32:
    s * scale, or s / (sum of the chosen s + 1e-20) * scale if `renormalize`.
    """
    _SIGMOID_TOP_K.check(logits, bias)
    experts = logits.shape[1]
    if groups < 1 or experts % groups or experts // groups < 2:
        raise KernelError(
            f"sigmoid_top_k: groups: expected a number that cuts {experts} experts into equal groups of at least 2, "
            f"found {groups}"
        )
    if not 1 <= top_groups <= groups:
        raise KernelError(f"sigmoid_top_k: top_groups: expected 1 to {groups}, found {top_groups}")
    _check_top_k("sigmoid_top_k", top_k, experts // groups * top_groups)
    ids, weights = _SIGMOID_TOP_K.run(logits, bias, top_k, groups, top_groups, renormalize, scale)
    return ids, weights


def _check_top_k(kernel: str, top_k: int, experts: int) -> None:
    if not 1 <= top_k <= experts:
        raise KernelError(f"{kernel}: top_k: expected 1 to {experts} experts, found {top_k}")


ExpertActivation = Literal["silu_mul", "swiglu_clamped", "gelu_tanh_mul"]

_ACTIVATIONS: dict[str, int] = {"silu_mul": 0, "swiglu_clamped": 1, "gelu_tanh_mul": 2}
"""Numbers of the enum in csrc/moe/experts-inl.h."""

_MOE = {
    layout: Contract(
        "moe: x[m, gate_up.k]:gate_up.format.activations gate_up:weight down:weight ids[m, top]:i32 "
        "weights[m, top]:f32 experts:int width:int rows:size "
        "gate_up_bias[experts, (width + 31) // 32 * 64]?:f32 down_bias[experts, (gate_up.k + 31) // 32 * 32]?:f32 "
        "activation:int -> out[m, gate_up.k]:x "
        "middle[rows, (width + 31) // 32 * 32]:f32 expert_out[m * top, (gate_up.k + 31) // 32 * 32]:f32 "
        f"queues[{2 * WORK_QUEUE_BYTES}]:u8",
        layout=layout,
    )
    for layout in dict.fromkeys(EXPERT_LAYOUTS.values())
}


def moe(
    x: Tensor,
    gate_up: PackedExperts,
    down: PackedExperts,
    ids: Tensor,
    weights: Tensor,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: ExpertActivation = "silu_mul",
) -> Tensor:
    """Return sum over each token's experts of weight * (down(h) + down_bias), h = activation(gate(x), up(x)).

    x: [m, hidden], dtype `gate_up.weight.format.activations`; gate_up: two parts of [width, hidden]; down:
    [hidden, width] in the same format, or in another type of GGUF files; ids: [m, k] int32, the experts of each token;
    weights: [m, k] float32.
    gate_up_bias, down_bias: float32 [experts, biases], padded to whole blocks of 32, those of gate and up in turn
    (`parallel.experts.ExpertsBias`); biases of gate and up are added before the activation.
    activation: "silu_mul", h = silu(gate) * up; or "swiglu_clamped" of gpt-oss, h = (u + 1) * g * sigmoid(1.702 * g)
    with g = min(gate, 7) and u = up clamped to [-7, 7]; or "gelu_tanh_mul" of Gemma 4, with the tanh approximation of
    gelu in place of silu.
    Returns [m, hidden] in x.dtype.
    With float weights gate, up, silu and their product are rounded as in `linear` and `ops.silu_mul`. With quantised
    weights they stay in fp32 until the down projection rounds or quantises its inputs. The experts' outputs are fp32;
    their weighted sum, in the order of ids, is rounded once. Weights of experts that ids does not contain are not read.
    """
    width = gate_up.n
    found, wanted = (down.experts, down.parts, down.n, down.k), (gate_up.experts, 1, gate_up.k, width)
    if gate_up.parts != 2 or found != wanted or not are_expert_formats(gate_up.weight.format, down.weight.format):
        raise KernelError(
            f"moe: down: expected 1 part of {gate_up.experts} experts [{gate_up.k}, {width}] {gate_up.weight.format} "
            f"after 2 parts of gate_up, found {down.parts} of {down.experts} experts [{down.n}, {down.k}] "
            f"{down.weight.format} after {gate_up.parts}"
        )
    if activation not in _ACTIVATIONS:
        raise KernelError(f"moe: activation: expected one of {', '.join(_ACTIVATIONS)}, found {activation!r}")
    contract = _MOE[EXPERT_LAYOUTS[gate_up.weight.format.layout]]
    contract.check(x, gate_up.weight, down.weight, ids, weights, gate_up.experts, width, 0, gate_up_bias, down_bias)
    if ids.shape[1] == 0:
        raise KernelError("moe: ids: expected at least one expert a token, found none")
    if core.isa() == "reference" or gate_up.weight.is_plain or down.weight.is_plain:
        return reference.moe(
            x,
            gate_up,
            down,
            ids,
            weights,
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
            activation=activation,
        )
    pairs = ids.numel()
    # AMX kernels start every expert's rows at a new tile. Kernels that round to bfloat16 use half of the memory.
    rows = (pairs // TILE_ROWS + min(pairs, gate_up.experts)) * TILE_ROWS
    biases = gate_up_bias, down_bias
    number = _ACTIVATIONS[activation]
    return contract(x, gate_up.weight, down.weight, ids, weights, gate_up.experts, width, rows, *biases, number)
