"""Qwen2-MoE (arXiv 2407.10671) and Qwen3-MoE (arXiv 2505.09388): a mixture of experts in place of most MLPs.

    mlp(x) = sum over the chosen experts e of weight_e * e(x),  e(x) = down_e(silu(gate_e(x)) * up_e(x))

Qwen2-MoE adds sigmoid(x w) * shared(x), an expert for all tokens with a gate of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from tilerank.kernels import ops
from tilerank.kernels.delta import sigmoid_gate_
from tilerank.kernels.moe import softmax_top_k
from tilerank.loader.card import ModelCard
from tilerank.loader.fields import Fields
from tilerank.parallel.experts import EXPERT_PROJECTIONS, FusedOrder, ParallelExperts
from tilerank.parallel.linear import ReplicatedLinear
from tilerank.parallel.sharding import Sharding

from .decoder import Decoder, FeedForward
from .gated_mlp import GatedMLP
from .qwen import qwen2_decoder, qwen3_decoder
from .text_config import MAX_WIDTH, TextConfig, read_text_config

_MAX_EXPERTS = 1 << 14


@dataclass(frozen=True)
class ExpertsConfig:
    """Every token goes to `top_k` of `count` experts, each `width` columns wide."""

    count: int
    top_k: int
    width: int
    renormalize: bool
    """Whether the weights of the chosen experts are scaled to a sum of one."""
    dense_layers: frozenset[int]
    """Layers that keep a dense MLP, `intermediate_size` columns wide."""


def read_expert_count(c: Fields, key: str, least: int) -> int:
    """Return the number of experts: `key`, or `num_local_experts`, as transformers 5 writes it. Raises ConfigError."""
    new_key = "num_local_experts"
    count = c.integer(key if c.has(key) else new_key, least, _MAX_EXPERTS)
    if c.has(new_key) and c.integer(new_key, least, _MAX_EXPERTS) != count:
        raise c.fail(new_key, f"the {count} of {key}")
    return count


def read_experts_config(c: Fields, num_layers: int) -> ExpertsConfig:
    """Read the fields of the mixture. Layer i is sparse if i + 1 is a multiple of `decoder_sparse_step`."""
    count = read_expert_count(c, "num_experts", 1)
    step = c.integer("decoder_sparse_step", 1, 1 << 12) if c.has("decoder_sparse_step") else 1
    listed = c.values["mlp_only_layers"] if c.has("mlp_only_layers") else []
    if not isinstance(listed, list) or any(type(i) is not int or not 0 <= i < num_layers for i in listed):
        raise c.fail("mlp_only_layers", f"a list of layers from 0 to {num_layers - 1}")
    return ExpertsConfig(
        count=count,
        top_k=c.integer("num_experts_per_tok", 1, count),
        width=c.integer("moe_intermediate_size", 1, MAX_WIDTH),
        renormalize=c.flag("norm_topk_prob"),
        dense_layers=frozenset(i for i in range(num_layers) if i in listed or (i + 1) % step),
    )


class SparseMLP(FeedForward):
    """A router and its experts. fused, projections: as in ParallelExperts."""

    def __init__(
        self,
        name: str,
        hidden: int,
        experts: ExpertsConfig,
        sharding: Sharding,
        *,
        fused: FusedOrder | None = None,
        projections: tuple[str, str, str] = EXPERT_PROJECTIONS,
    ) -> None:
        # Whole on every rank: all ranks compute the same bits and so choose the same experts.
        self.router = ReplicatedLinear(f"{name}.gate", hidden, experts.count, sharding)
        self.experts = ParallelExperts(
            f"{name}.experts",
            hidden,
            experts.width,
            experts.count,
            sharding,
            top_k=experts.top_k,
            fused=fused,
            projections=projections,
        )
        self.top_k = experts.top_k
        self.renormalize = experts.renormalize

    def __call__(self, x: Tensor) -> Tensor:
        ids, weights = softmax_top_k(self.router(x), self.top_k, renormalize=self.renormalize)
        return self.experts(x, ids, weights)


class SharedSparseMLP(FeedForward):
    """A router and its experts, and one more expert for all tokens, with a gate of its own."""

    def __init__(
        self,
        name: str,
        hidden: int,
        experts: ExpertsConfig,
        shared_width: int,
        sharding: Sharding,
        *,
        fused: FusedOrder | None = None,
    ) -> None:
        self.sparse = SparseMLP(name, hidden, experts, sharding, fused=fused)
        self.shared = GatedMLP(f"{name}.shared_expert", hidden, shared_width, sharding)
        self.gate = ReplicatedLinear(f"{name}.shared_expert_gate", hidden, 1, sharding)

    def __call__(self, x: Tensor) -> Tensor:
        shared = self.shared(x)
        sigmoid_gate_(shared, self.gate(x))
        return ops.add(self.sparse(x), shared)


def qwen2_moe(card: ModelCard, sharding: Sharding) -> Decoder:
    """Qwen2MoeForCausalLM."""
    c = read_text_config(card.fields)
    experts = read_experts_config(card.fields, c.num_layers)
    shared_width = card.fields.integer("shared_expert_intermediate_size", 1, MAX_WIDTH)
    return qwen2_decoder(card, c, sharding, mlp=sparse_mlps(c, experts, sharding, shared_width=shared_width))


def qwen3_moe(card: ModelCard, sharding: Sharding) -> Decoder:
    """Qwen3MoeForCausalLM."""
    c = read_text_config(card.fields)
    experts = read_experts_config(card.fields, c.num_layers)
    return qwen3_decoder(card, c, sharding, mlp=sparse_mlps(c, experts, sharding))


def sparse_mlps(
    c: TextConfig, experts: ExpertsConfig, sharding: Sharding, *, fused: FusedOrder | None = None, shared_width: int = 0
) -> Callable[[str, int], FeedForward]:
    """Return what makes the mixture of a layer, or its MLP where that is dense.

    fused: see ParallelExperts. shared_width: of the expert for all tokens; 0 without one.
    """

    def mlp(name: str, layer: int) -> FeedForward:
        if layer in experts.dense_layers:
            return GatedMLP(name, c.hidden_size, c.intermediate_size, sharding)
        if shared_width:
            return SharedSparseMLP(name, c.hidden_size, experts, shared_width, sharding, fused=fused)
        return SparseMLP(name, c.hidden_size, experts, sharding, fused=fused)

    return mlp


MODELS = {"qwen2_moe": qwen2_moe, "qwen3_moe": qwen3_moe}
