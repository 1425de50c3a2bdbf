"""DeepSeek-V3 and V3.1 (arXiv 2412.19437), DeepSeek-R1, Kimi-K2 and GLM-4.7-Flash: latent attention and a mixture of
experts, whose router computes sigmoids. GLM-4.5 and MiniMax-M2 have the same mixture. The layer after the last, which
GLM-4.5 has as well, is a multi-token-prediction head (mtp.py).

mlp(x) = shared(x) + sum over the chosen experts e of weight_e * down_e(silu(gate_e(x)) * up_e(x))
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tilerank.kernels import ops
from tilerank.kernels.latent_pages import MAX_LATENT_DIM, MAX_ROPE_DIM
from tilerank.kernels.moe import sigmoid_top_k
from tilerank.loader.card import ModelCard
from tilerank.loader.fields import Fields
from tilerank.parallel.experts import EXPERT_PROJECTIONS, ParallelExperts
from tilerank.parallel.linear import ReplicatedLinear
from tilerank.parallel.parameters import WholeParameter
from tilerank.parallel.sharding import Sharding

from .decoder import Decoder, DecoderNames, FeedForward
from .gated_mlp import GatedMLP
from .latent_attention import LatentAttention, LatentConfig
from .mtp import MTPHead, names_after_last
from .qwen_moe import read_expert_count
from .text_config import MAX_WIDTH, TextConfig, read_text_config

_MAX_SHARED = 1 << 8
_MAX_DIM = 1 << 12


@dataclass(frozen=True)
class RoutedConfig:
    """Every token goes to `top_k` of `count` experts, from the best `top_groups` of `groups` equal groups.

    width: of an expert. shared: the width of the MLP that every token takes as well, 0 if there is none. scale: factor
    of the weights, which are divided by their sum before if `renormalize`. dense_layers: those that have a dense MLP
    instead.
    """

    count: int
    top_k: int
    width: int
    groups: int = 1
    top_groups: int = 1
    shared: int = 0
    renormalize: bool = True
    scale: float = 1.0
    dense_layers: frozenset[int] = frozenset()


def read_routed_config(c: Fields, num_layers: int) -> RoutedConfig:
    """Read the fields of the mixture under the names of DeepSeek. Raises ConfigError."""
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
        width=width,
        groups=groups,
        top_groups=top_groups,
        shared=width * c.integer("n_shared_experts", 0, _MAX_SHARED) if c.has("n_shared_experts") else 0,
        renormalize=c.flag("norm_topk_prob") if c.has("norm_topk_prob") else True,
        scale=c.number("routed_scaling_factor", 0.0, 1e6),
        dense_layers=_dense_layers(c, num_layers),
    )


def _dense_layers(c: Fields, num_layers: int) -> frozenset[int]:
    """Return the layers with a dense MLP: the first ones, or those of the list that transformers 5 writes."""
    first, kinds = "first_k_dense_replace", "mlp_layer_types"
    if not c.has(kinds):
        return frozenset(range(c.integer(first, 0, num_layers)))
    listed = c.values[kinds]
    if (
        not isinstance(listed, list)
        or len(listed) != num_layers
        or any(one not in ("dense", "sparse") for one in listed)
    ):
        raise c.fail(kinds, f"'dense' or 'sparse' for each of the {num_layers} layers")
    dense = frozenset(layer for layer, kind in enumerate(listed) if kind == "dense")
    if c.has(first) and dense != frozenset(range(c.integer(first, 0, num_layers))):
        raise c.fail(first, f"the dense layers of {kinds}")
    return dense


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


class RoutedMLP(FeedForward):
    """A router, its experts, and the MLP that all tokens share.

    bias: the name of what is added to the scores by which experts are chosen. projections: as in ParallelExperts.
    """

    def __init__(
        self,
        name: str,
        hidden: int,
        config: RoutedConfig,
        sharding: Sharding,
        *,
        bias: str = "gate.e_score_correction_bias",
        projections: tuple[str, str, str] = EXPERT_PROJECTIONS,
    ) -> None:
        self.config = c = config
        # Whole on every rank: all ranks compute the same bits and so choose the same experts.
        self.router = ReplicatedLinear(f"{name}.gate", hidden, c.count, sharding)
        self.bias = WholeParameter(f"{name}.{bias}", (c.count,), torch.float32)
        self.experts = ParallelExperts(
            f"{name}.experts", hidden, c.width, c.count, sharding, top_k=c.top_k, projections=projections
        )
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


def routed_mlps(c: TextConfig, routed: RoutedConfig, sharding: Sharding) -> Callable[[str, int], FeedForward]:
    """Return what makes the mixture of a layer, or its MLP where that is dense."""

    def mlp(name: str, layer: int) -> FeedForward:
        if layer in routed.dense_layers:
            return GatedMLP(name, c.hidden_size, c.intermediate_size, sharding)
        return RoutedMLP(name, c.hidden_size, routed, sharding)

    return mlp


class DeepseekDecoder(Decoder):
    """A decoder with latent attention."""

    def __init__(self, card: ModelCard, sharding: Sharding) -> None:
        text, latent = read_latent_config(card.fields)
        routed = read_routed_config(card.fields, text.num_layers)

        def mixer(name: str, _: int) -> LatentAttention:
            return LatentAttention(name, text.hidden_size, text.num_heads, latent, sharding)

        mlp = routed_mlps(text, routed, sharding)
        head = MTPHead(card, text, sharding, names_after_last(text.num_layers), mixer, mlp) if card.draft_head else None
        super().__init__(card, text, sharding, DecoderNames(drafts=True), mixer, mlp, draft_head=head)
        self.expands = latent.expands
        first = self.layers[0].mixer
        assert isinstance(first, LatentAttention)
        self.context_part = first.context_part


MODELS = {"deepseek_v3": DeepseekDecoder, "kimi_k2": DeepseekDecoder, "glm4_moe_lite": DeepseekDecoder}
