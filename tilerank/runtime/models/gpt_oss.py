"""gpt-oss (arXiv 2508.10925): windows in every other layer, attention sinks, and experts with biases.

mlp(x) = sum over the chosen experts e of weight_e * (down_e(h) + bias_e), h = (u + 1) * g * sigmoid(1.702 * g),
where g = min(gate_e(x), 7) and u = up_e(x) clamped to [-7, 7]. The weights of the chosen experts are the softmax of
their logits.
"""

from torch import Tensor

from tilerank.kernels.moe import softmax_top_k
from tilerank.loader.card import ModelCard
from tilerank.loader.fields import Fields
from tilerank.loader.rope import FULL_ATTENTION, SLIDING_ATTENTION
from tilerank.parallel.experts import ParallelExperts
from tilerank.parallel.linear import ReplicatedLinear
from tilerank.parallel.sharding import Sharding

from .attention import SelfAttention
from .decoder import Decoder, DecoderNames, FeedForward
from .qwen_moe import read_expert_count
from .text_config import MAX_WIDTH, read_layer_types, read_text_config

_KINDS = (SLIDING_ATTENTION, FULL_ATTENTION)
_ACTIVATION = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}
"""The numbers of the activation that the kernel has."""


class ClampedExperts(FeedForward):
    """A router with a bias and its experts, whose gate and up are stored in turns."""

    def __init__(self, name: str, hidden: int, width: int, experts: int, top_k: int, sharding: Sharding) -> None:
        # Whole on every rank: all ranks compute the same bits and so choose the same experts.
        self.router = ReplicatedLinear(f"{name}.router", hidden, experts, sharding, bias=True)
        self.experts = ParallelExperts(
            f"{name}.experts",
            hidden,
            width,
            experts,
            sharding,
            top_k=top_k,
            fused="in_out_turns",
            biases=True,
            activation="swiglu_clamped",
        )
        self.top_k = top_k

    def __call__(self, x: Tensor) -> Tensor:
        ids, weights = softmax_top_k(self.router(x), self.top_k, renormalize=True)
        return self.experts(x, ids, weights)


def gpt_oss(card: ModelCard, sharding: Sharding) -> Decoder:
    """GptOssForCausalLM."""
    fields = card.fields
    c = read_text_config(fields, dense=False, layer_kinds=_KINDS)
    for key, value in _ACTIVATION.items():
        if fields.has(key) and fields.values[key] != value:
            raise fields.fail(key, f"{value:g}")
    bias = not fields.has("attention_bias") or fields.flag("attention_bias")
    kinds = read_layer_types(fields, c.num_layers, _KINDS) or [_KINDS[i % 2] for i in range(c.num_layers)]
    window = fields.integer("sliding_window", 1, card.context_length) if SLIDING_ATTENTION in kinds else 0
    experts = read_expert_count(fields, "num_experts", 1)
    top_k, width = _read_top_k(fields, experts), fields.integer("intermediate_size", 1, MAX_WIDTH)

    def mixer(name: str, layer: int) -> SelfAttention:
        seen = window if kinds[layer] == SLIDING_ATTENTION else 0
        return SelfAttention(name, c, sharding, qkv_bias=bias, out_bias=bias, head_norms=False, window=seen, sinks=True)

    def mlp(name: str, _: int) -> ClampedExperts:
        return ClampedExperts(name, c.hidden_size, width, experts, top_k, sharding)

    return Decoder(card, c, sharding, DecoderNames(), mixer, mlp)


def _read_top_k(c: Fields, experts: int) -> int:
    """Return how many experts a token chooses; the released files have both keys."""
    keys = [key for key in ("num_experts_per_tok", "experts_per_token") if c.has(key)] or ["num_experts_per_tok"]
    top_k, *others = (c.integer(key, 1, experts) for key in keys)
    if any(other != top_k for other in others):
        raise c.fail(keys[1], f"the {top_k} of {keys[0]}")
    return top_k


MODELS = {"gpt_oss": gpt_oss}
