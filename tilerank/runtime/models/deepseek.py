"""DeepSeek-V3 and V3.1 (arXiv 2412.19437), DeepSeek-R1, and Kimi-K2: latent attention and a mixture of experts.

mlp(x) = shared(x) + sum over the chosen experts e of weight_e * down_e(silu(gate_e(x)) * up_e(x))
"""

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from tilerank.kernels import ops
from tilerank.kernels.latent_pages import MAX_LATENT_DIM, MAX_ROPE_DIM
from tilerank.kernels.moe import sigmoid_top_k
from tilerank.loader.card import ModelCard
from tilerank.loader.fields import Fields
from tilerank.parallel.experts import ParallelExperts
from tilerank.parallel.linear import ReplicatedLinear
from tilerank.parallel.parameters import WholeParameter
from tilerank.parallel.sharding import Sharding

from .decoder import Decoder, DecoderNames, FeedForward
from .gated_mlp import GatedMLP
from .latent_attention import LatentAttention, LatentConfig
from .qwen_moe import read_expert_count
from .text_config import MAX_WIDTH, TextConfig, read_text_config

_MAX_SHARED = 1 << 8
_MAX_DIM = 1 << 12


@dataclass(frozen=True)
class RoutedConfig:
    """Every token goes to `top_k` of `count` experts, from the best `top_groups` of `groups` equal groups.

    width: of an expert. shared: the width of the MLP that every token takes as well, 0 if there is none. scale: factor
    of the weights, which are divided by their sum before if `renormalize`. dense_layers: the first layers, which have a
    dense MLP instead.
    """

    count: int
    top_k: int
    groups: int
    top_groups: int
    width: int
    shared: int
    renormalize: bool
    scale: float
    dense_layers: int


def read_latent_config(c: Fields) -> tuple[TextConfig, LatentConfig]:
    """Read the fields of the decoder and its attention. Raises ConfigError."""
    nope, rope = _dim(c, "qk_nope_head_dim", _MAX_DIM), _dim(c, "qk_rope_head_dim", MAX_ROPE_DIM)
    text = read_text_config(c, head_dims=(nope + rope, rope))
    return text, LatentConfig(
        query_latent=c.integer("q_lora_rank", 1, MAX_WIDTH) if c.has("q_lora_rank") else None,
        latent=_dim(c, "kv_lora_rank", MAX_LATENT_DIM),
        nope_dim=nope,
        rope_dim=rope,
        value_dim=_dim(c, "v_head_dim", _MAX_DIM),
        neighbours=c.flag("rope_interleave") if c.has("rope_interleave") else True,
        score_factor=text.rope.score_factor,
        bias=c.flag("attention_bias"),
    )


def _dim(c: Fields, key: str, most: int) -> int:
    """Return a number of dimensions that the kernels of kernels/latent.py take."""
    dim = c.integer(key, 8, most)
    if dim % 8:
        raise c.fail(key, f"a multiple of 8 up to {most}")
    return dim


def read_routed_config(c: Fields, num_layers: int) -> RoutedConfig:
    """Read the fields of the mixture. Raises ConfigError."""
    for key, value in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("moe_layer_freq", 1)):
        if c.has(key) and c.values[key] != value:
            raise c.fail(key, repr(value))
    count = read_expert_count(c, "n_routed_experts", 2)
    groups = c.integer("n_group", 1, count // 2)
    if count % groups:
        raise c.fail("n_group", f"a divisor of the {count} experts")
    top_groups = c.integer("topk_group", 1, groups)
    width = c.integer("moe_intermediate_size", 1, MAX_WIDTH)
    return RoutedConfig(
        count=count,
        top_k=c.integer("num_experts_per_tok", 1, count // groups * top_groups),
        groups=groups,
        top_groups=top_groups,
        width=width,
        shared=width * c.integer("n_shared_experts", 0, _MAX_SHARED) if c.has("n_shared_experts") else 0,
        renormalize=c.flag("norm_topk_prob") if c.has("norm_topk_prob") else True,
        scale=c.number("routed_scaling_factor", 0.0, 1e6),
        dense_layers=c.integer("first_k_dense_replace", 0, num_layers),
    )


class RoutedMLP(FeedForward):
    """A router, its experts, and the MLP that all tokens share."""

    def __init__(self, name: str, hidden: int, config: RoutedConfig, sharding: Sharding) -> None:
        self.config = c = config
        # Whole on every rank: all ranks compute the same bits and so choose the same experts.
        self.router = ReplicatedLinear(f"{name}.gate", hidden, c.count, sharding)
        self.bias = WholeParameter(f"{name}.gate.e_score_correction_bias", (c.count,), torch.float32)
        self.experts = ParallelExperts(f"{name}.experts", hidden, c.width, c.count, sharding, top_k=c.top_k)
        self.shared: GatedMLP | None = None
        if c.shared:
            self.shared = GatedMLP(
                f"{name}.shared_experts", hidden, c.shared, sharding, dimension="shared expert width"
            )

    def __call__(self, x: Tensor) -> Tensor:
        c = self.config
        ids, weights = sigmoid_top_k(
            self.router.project(x, out_dtype=torch.float32),
            self.bias.data,
            c.top_k,
            groups=c.groups,
            top_groups=c.top_groups,
            renormalize=c.renormalize,
            scale=c.scale,
        )
        routed = self.experts(x, ids, weights)
        return routed if self.shared is None else ops.add(routed, self.shared(x))


class DeepseekDecoder(Decoder):
    """A decoder with latent attention. Layers after its last, which predict several tokens at once, are left out."""

    def __init__(self, card: ModelCard, sharding: Sharding) -> None:
        text, latent = read_latent_config(card.fields)
        routed = read_routed_config(card.fields, text.num_layers)

        def mixer(name: str, _: int) -> LatentAttention:
            return LatentAttention(name, text.hidden_size, text.num_heads, latent, sharding)

        def mlp(name: str, layer: int) -> FeedForward:
            if layer < routed.dense_layers:
                return GatedMLP(name, text.hidden_size, text.intermediate_size, sharding)
            return RoutedMLP(name, text.hidden_size, routed, sharding)

        super().__init__(card, text, sharding, DecoderNames(), mixer, mlp)
        self.expands = latent.expands
        first = self.layers[0].mixer
        assert isinstance(first, LatentAttention)
        self.context_part = first.context_part

    def ignore(self, name: str) -> bool:
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        return super().ignore(name) or (layer is not None and int(layer[1]) >= len(self.layers))


MODELS = {"deepseek_v3": DeepseekDecoder, "kimi_k2": DeepseekDecoder}
