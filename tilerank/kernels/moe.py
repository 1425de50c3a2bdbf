"""Mixture of experts: the routers, and the experts' gated MLPs.

A row's result depends only on that row. A wrong argument raises KernelError naming it, what was expected and what was
found.
"""

import torch
from torch import Tensor

from . import check, core
from .errors import KernelError
from .packed_experts import PackedExperts
from .reference import moe as reference
from .weight import BLOCK_N, TILE_ROWS, WORK_QUEUE_BYTES, round_up

_SOFTMAX_TOP_K = core.kernel("softmax_top_k")
_SIGMOID_TOP_K = core.kernel("sigmoid_top_k")


def softmax_top_k(logits: Tensor, top_k: int, *, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Choose the `top_k` most probable experts of every token (the Qwen MoE router).

    logits: [m, experts] float32 or bfloat16. Returns ids [m, top_k] int32, most probable first, the lower id first of
    equals, and weights [m, top_k] float32: the softmax over all experts in fp32, divided by the sum of the chosen ones
    if `renormalize`, rounded to logits.dtype.
    """
    check.tensor("softmax_top_k", "logits", logits, (None, None), check.ACTIVATION_DTYPES)
    _check_top_k("softmax_top_k", top_k, logits.shape[1])
    if core.isa() == "reference":
        return reference.softmax_top_k(logits, top_k, renormalize=renormalize)
    ids, weights = _choices(logits.shape[0], top_k)
    core.launch(_SOFTMAX_TOP_K, (logits, ids, weights), (renormalize,))
    return ids, weights


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
    check.tensor("sigmoid_top_k", "logits", logits, (None, None), torch.float32)
    check.tensor("sigmoid_top_k", "bias", bias, logits.shape[1:], torch.float32)
    experts = logits.shape[1]
    if groups < 1 or experts % groups or experts // groups < 2:
        raise KernelError(
            f"sigmoid_top_k: groups: expected a number that cuts {experts} experts into equal groups of at least 2, "
            f"found {groups}"
        )
    if not 1 <= top_groups <= groups:
        raise KernelError(f"sigmoid_top_k: top_groups: expected 1 to {groups}, found {top_groups}")
    _check_top_k("sigmoid_top_k", top_k, experts // groups * top_groups)
    if core.isa() == "reference":
        return reference.sigmoid_top_k(
            logits, bias, top_k, groups=groups, top_groups=top_groups, renormalize=renormalize, scale=scale
        )
    ids, weights = _choices(logits.shape[0], top_k)
    core.launch(_SIGMOID_TOP_K, (logits, bias, ids, weights), (groups, top_groups, renormalize), (scale,))
    return ids, weights


def _check_top_k(kernel: str, top_k: int, experts: int) -> None:
    if not 1 <= top_k <= experts:
        raise KernelError(f"{kernel}: top_k: expected 1 to {experts} experts, found {top_k}")


def _choices(m: int, top_k: int) -> tuple[Tensor, Tensor]:
    return core.empty((m, top_k), torch.int32), core.empty((m, top_k), torch.float32)


def moe(x: Tensor, gate_up: PackedExperts, down: PackedExperts, ids: Tensor, weights: Tensor) -> Tensor:
    """Return sum over each token's experts of weight * down(silu(gate(x)) * up(x)).

    x: [m, hidden], dtype `gate_up.weight.format.activations`; gate_up: two parts of [width, hidden]; down:
    [hidden, width] in the same format; ids: [m, k] int32, the experts of each token; weights: [m, k] float32.
    Returns [m, hidden] in x.dtype.
    With float weights gate, up, silu and their product are rounded as in `linear` and `ops.silu_mul`. With quantised
    weights they stay in fp32 until the down projection rounds or quantises its inputs. The experts' outputs are fp32;
    their weighted sum, in the order of ids, is rounded once. Weights of experts that ids does not contain are not read.
    """
    width = gate_up.n
    check.tensor("moe", "x", x, (None, gate_up.k), gate_up.weight.format.activations)
    check.tensor("moe", "ids", ids, (x.shape[0], None), torch.int32)
    if ids.shape[1] == 0:
        raise KernelError("moe: ids: expected at least one expert a token, found none")
    check.tensor("moe", "weights", weights, ids.shape, torch.float32)
    found = (down.experts, down.parts, down.n, down.k, down.weight.moe_kernel)
    if gate_up.parts != 2 or found != (gate_up.experts, 1, gate_up.k, width, gate_up.weight.moe_kernel):
        raise KernelError(
            f"moe: down: expected 1 part of {gate_up.experts} experts [{gate_up.k}, {width}] {gate_up.weight.format} "
            f"after 2 parts of gate_up, found {down.parts} of {down.experts} experts [{down.n}, {down.k}] "
            f"{down.weight.format} after {gate_up.parts}"
        )
    if core.isa() == "reference" or gate_up.weight.is_plain or down.weight.is_plain:
        return reference.moe(x, gate_up, down, ids, weights)
    m, hidden = x.shape
    out = core.empty((m, hidden), x.dtype)
    if m == 0:
        return out
    pairs = ids.numel()
    # AMX kernels start every expert's rows at a new tile. Kernels that round to bfloat16 use half of the memory.
    rows = (pairs // TILE_ROWS + min(pairs, gate_up.experts)) * TILE_ROWS
    middle = core.empty((rows, round_up(width, BLOCK_N)), torch.float32)
    expert_out = core.empty((pairs, round_up(hidden, BLOCK_N)), torch.float32)
    operands = (*gate_up.weight.operands(), *down.weight.operands())
    queues = core.empty((2 * WORK_QUEUE_BYTES,), torch.uint8)  # one per projection
    arguments = (x, ids, weights, middle, expert_out, out, queues, *operands)
    core.launch(gate_up.weight.moe_kernel, arguments, (gate_up.experts, width))
    return out
