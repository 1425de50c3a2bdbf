"""Qwen2 / Qwen2.5 (arXiv 2412.15115) and Qwen3 (arXiv 2505.09388), dense: Llama's decoder with two changes.

Qwen2 has biases on q, k and v, always (no key of config.json says so). Qwen3 has none unless `attention_bias`, but
normalises every query and key head before the rotation.
"""

from torch import Tensor

from tilerank.kernels import ops
from tilerank.loader.config import ModelConfig
from tilerank.parallel.layers import RMSNorm, Sharding

from ..rope import RotaryTable
from .llama import Attention, Llama


class Qwen2(Llama):
    """Qwen2ForCausalLM."""

    def attention(self, name: str, config: ModelConfig, sharding: Sharding) -> Attention:
        return Attention(name, config, sharding, qkv_bias=True, out_bias=False)


class Qwen3Attention(Attention):
    def __init__(self, name: str, config: ModelConfig, sharding: Sharding) -> None:
        bias = config.attention_bias
        super().__init__(name, config, sharding, qkv_bias=bias, out_bias=bias)
        self.q_norm = RMSNorm(f"{name}.q_norm", config.head_dim, config.rms_norm_eps, sharding)
        self.k_norm = RMSNorm(f"{name}.k_norm", config.head_dim, config.rms_norm_eps, sharding)

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor, rope: RotaryTable) -> None:
        weights = self.q_norm.weight.data, self.k_norm.weight.data
        ops.norm_rotary_(q, k, *weights, self.q_norm.eps, positions, rope.cos, rope.sin)


class Qwen3(Llama):
    """Qwen3ForCausalLM."""

    def attention(self, name: str, config: ModelConfig, sharding: Sharding) -> Attention:
        return Qwen3Attention(name, config, sharding)


MODELS = {"qwen2": Qwen2, "qwen3": Qwen3}
