"""Qwen3-MoE (arXiv 2505.09388): Qwen3 with a mixture of experts in place of the MLP of most layers.

mlp(x) = sum over the chosen experts e of weight_e * down_e(silu(gate_e(x)) * up_e(x))
"""

from torch import Tensor

from tilerank.kernels.moe import softmax_top_k
from tilerank.loader.config import ExpertsConfig, ModelConfig
from tilerank.parallel.experts import ParallelExperts
from tilerank.parallel.layers import ReplicatedLinear, Sharding

from .llama import FeedForward
from .qwen import Qwen3


class SparseMLP(FeedForward):
    def __init__(self, name: str, hidden: int, experts: ExpertsConfig, sharding: Sharding) -> None:
        # Whole on every rank: the same bits everywhere, so that all ranks choose the same experts.
        self.router = ReplicatedLinear(f"{name}.gate", hidden, experts.count, sharding)
        self.experts = ParallelExperts(f"{name}.experts", hidden, experts.width, experts.count, sharding)
        self.top_k = experts.top_k
        self.renormalize = experts.renormalize

    def __call__(self, x: Tensor) -> Tensor:
        ids, weights = softmax_top_k(self.router(x), self.top_k, renormalize=self.renormalize)
        return self.experts(x, ids, weights)


class Qwen3Moe(Qwen3):
    """Qwen3MoeForCausalLM."""

    def mlp(self, name: str, config: ModelConfig, sharding: Sharding, layer: int) -> FeedForward:
        if config.experts is None or layer in config.experts.dense_layers:
            return super().mlp(name, config, sharding, layer)
        return SparseMLP(name, config.hidden_size, config.experts, sharding)


MODELS = {"qwen3_moe": Qwen3Moe}
