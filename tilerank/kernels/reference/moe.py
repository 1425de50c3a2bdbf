"""`moe.py` in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import KernelError
from ..packed_experts import PackedExperts
from ..weight import BLOCK_N
from .ops import by_row, gelu_tanh_mul, silu_mul

_ALPHA, _LIMIT = 1.702, 7.0  # of gpt-oss


def softmax_top_k(
    logits: Tensor, top_k: int, *, renormalize: bool, scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Route as Qwen3MoeTopKRouter of transformers, or, with scales, as Gemma4TextRouter."""
    probabilities = torch.softmax(logits.float(), dim=-1)
    ids = _top_k(probabilities, top_k)
    weights = probabilities.gather(1, ids)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    weights = weights.to(logits.dtype).float()
    return ids.int(), weights if scales is None else weights * scales[ids]


def sigmoid_top_k(
    logits: Tensor, bias: Tensor, top_k: int, *, groups: int, top_groups: int, renormalize: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Route as DeepseekV3TopkRouter of transformers."""
    scores = by_row(logits, torch.sigmoid)
    for_choice = (scores + bias).view(logits.shape[0], groups, logits.shape[1] // groups)
    best = _top_k(for_choice.topk(2, dim=-1).values.sum(dim=-1), top_groups)
    kept = torch.zeros(best.shape[0], groups, dtype=torch.bool).scatter(1, best, True)
    ids = _top_k(for_choice.masked_fill(~kept[..., None], -torch.inf).flatten(1), top_k)
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return ids.int(), weights * scale


def _top_k(values: Tensor, k: int) -> Tensor:
    """Return the indices of the k largest values of every row in descending order, the first of equals first."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :k]


def moe(
    x: Tensor,
    gate_up: PackedExperts,
    down: PackedExperts,
    ids: Tensor,
    weights: Tensor,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu_mul",
) -> Tensor:
    """Compute the experts one by one, as transformers does, but keep their outputs in fp32."""
    bad = ids[(ids < 0) | (ids >= gate_up.experts)]
    if bad.numel():
        raise KernelError(f"moe: ids: expected values in [0, {gate_up.experts}), found {int(bad[0])}")
    outputs = torch.empty(*ids.shape, x.shape[1])
    for expert in sorted(set(ids.flatten().tolist())):
        tokens, choices = torch.where(ids == expert)
        projected = torch.cat([gate_up.part(expert, part).product(x[tokens]) for part in (0, 1)], dim=-1)
        if gate_up_bias is not None:
            turns = gate_up_bias[expert].view(-1, 2, BLOCK_N)
            projected += torch.cat([turns[:, part].flatten()[: gate_up.n] for part in (0, 1)])
        projected = projected if gate_up.weight.format.is_quantised else projected.to(x.dtype)
        product = down.part(expert).product(_GATES[activation](projected))
        outputs[tokens, choices] = product if down_bias is None else product + down_bias[expert, : down.n]
    total = torch.zeros(x.shape)
    for choice in range(ids.shape[1]):
        total += weights[:, choice, None] * outputs[:, choice]
    return total.to(x.dtype)


def swiglu_clamped(gate_up: Tensor) -> Tensor:
    """Return (u + 1) * g * sigmoid(1.702 * g), rounded once, as GptOssExperts of transformers in fp32."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    g, u = gate.clamp(max=_LIMIT), up.clamp(-_LIMIT, _LIMIT)
    return ((u + 1) * g * by_row(_ALPHA * g, torch.sigmoid)).to(gate_up.dtype)


_GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu_mul": silu_mul,
    "swiglu_clamped": swiglu_clamped,
    "gelu_tanh_mul": gelu_tanh_mul,
}
