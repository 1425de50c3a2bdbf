"""Llama 3.x (arXiv 2407.21783), and the dense decoder that the families after it share.

    x += attention(norm(x));  x += mlp(norm(x))        per layer, then a last norm and the head

Attention is causal and grouped: several query heads share a KV head. Positions enter as rotations of queries and keys.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence

from torch import Tensor

from tilerank.kernels import ops
from tilerank.kernels.attention import KVLayer, attention, store_kv
from tilerank.kernels.heads import join_heads, split_heads
from tilerank.loader.config import ModelConfig
from tilerank.parallel.layers import (
    GateUpParallelLinear,
    Layer,
    ParallelLMHead,
    QKVParallelLinear,
    RMSNorm,
    RowParallelLinear,
    Sharding,
    TiedEmbedding,
    VocabParallelEmbedding,
)

from ..batch import Batch, Wanted
from ..cache import CacheSpec, PagedKV
from ..model import Model
from ..rope import RotaryTable


class Attention(Layer):
    """x[t, hidden] -> this rank's part of [t, hidden], a sum over the ranks; of the `wanted` rows alone if some are
    given, while the keys and values of all go into the cache.
    """

    def __init__(self, name: str, config: ModelConfig, sharding: Sharding, *, qkv_bias: bool, out_bias: bool) -> None:
        heads, dim = config.num_heads, config.head_dim
        self.qkv = QKVParallelLinear(name, config.hidden_size, heads, config.num_kv_heads, dim, sharding, bias=qkv_bias)
        self.out = RowParallelLinear(
            f"{name}.o_proj", heads * dim, config.hidden_size, sharding, span=self.qkv.q_columns, bias=out_bias
        )
        self.scale = dim**-0.5
        self.cache_spec = PagedKV(self.qkv.kv_heads, dim, sharding.cache_dtype)

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor, rope: RotaryTable) -> None:
        """In place. Some families normalise every head before."""
        ops.rotary_(q, k, positions, rope.cos, rope.sin)

    def __call__(
        self, x: Tensor, rope: RotaryTable, batch: Batch, cache: KVLayer, wanted: Wanted | None = None
    ) -> Tensor:
        q, k, v = self.qkv(x)
        self.rotate(q, k, batch.positions, rope)
        store_kv(k, v, cache, batch.slots)
        starts = batch.query_starts
        if wanted is not None:
            q, starts = split_heads(wanted.take(join_heads(q)), 0, *q.shape[1:]), wanted.starts
        heads = attention(q, cache, batch.block_tables, batch.seq_lens, starts, self.qkv.kv_map, self.scale)
        return self.out(join_heads(heads))


class FeedForward(Layer):
    """What follows attention in a layer: x[t, hidden] -> this rank's part of [t, hidden], a sum over the ranks."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor: ...


class MLP(FeedForward):
    """down(silu(gate(x)) * up(x))"""

    def __init__(self, name: str, config: ModelConfig, sharding: Sharding) -> None:
        hidden, width, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up = GateUpParallelLinear(name, hidden, width, sharding, bias=bias)
        self.down = RowParallelLinear(f"{name}.down_proj", width, hidden, sharding, span=self.gate_up.span, bias=bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.gate_up(x))


class DecoderLayer(Layer):
    def __init__(
        self, name: str, config: ModelConfig, attention: Attention, mlp: FeedForward, sharding: Sharding
    ) -> None:
        self.input_norm = RMSNorm(f"{name}.input_layernorm", config.hidden_size, config.rms_norm_eps, sharding)
        self.attention = attention
        self.mlp_norm = RMSNorm(f"{name}.post_attention_layernorm", config.hidden_size, config.rms_norm_eps, sharding)
        self.mlp = mlp


class Llama(Model):
    """LlamaForCausalLM."""

    def __init__(self, config: ModelConfig, sharding: Sharding) -> None:
        hidden, vocab = config.hidden_size, config.vocab_size
        self.tied = config.tie_word_embeddings
        self.embed: VocabParallelEmbedding | TiedEmbedding
        self.head: Callable[[Tensor], Tensor]
        if self.tied:
            self.embed = TiedEmbedding("model.embed_tokens", vocab, hidden, sharding)
            self.head = self.embed.logits
        else:
            self.embed = VocabParallelEmbedding("model.embed_tokens", vocab, hidden, sharding)
            self.head = ParallelLMHead("lm_head", hidden, vocab, sharding)
        self.rope = RotaryTable(config.rope, config.head_dim, config.max_position_embeddings, sharding.dtype)
        self.layers = [
            DecoderLayer(
                name,
                config,
                self.attention(f"{name}.self_attn", config, sharding),
                self.mlp(f"{name}.mlp", config, sharding, i),
                sharding,
            )
            for i, name in enumerate(f"model.layers.{i}" for i in range(config.num_layers))
        ]
        self.norm = RMSNorm("model.norm", hidden, config.rms_norm_eps, sharding)

    def attention(self, name: str, config: ModelConfig, sharding: Sharding) -> Attention:
        bias = config.attention_bias
        return Attention(name, config, sharding, qkv_bias=bias, out_bias=bias)

    def mlp(self, name: str, config: ModelConfig, sharding: Sharding, layer: int) -> FeedForward:
        return MLP(name, config, sharding)

    def cache_specs(self) -> list[CacheSpec]:
        return [layer.attention.cache_spec for layer in self.layers]

    def forward(self, batch: Batch, caches: Sequence[KVLayer]) -> Tensor:
        """Of the last layer, rows whose logits nobody wants need keys and values alone."""
        residual = self.embed(batch.token_ids)
        x = self.layers[0].input_norm(residual)
        next_norms = [layer.input_norm for layer in self.layers[1:]] + [self.norm]
        last = len(self.layers) - 1
        for i, (layer, next_norm, cache) in enumerate(zip(self.layers, next_norms, caches, strict=True)):
            wanted = batch.wanted if i == last else None
            # Each sum, over the ranks and into the residual stream, is one kernel with the norm that follows it.
            x = layer.attention(x, self.rope, batch, cache, wanted)
            if wanted is not None:
                residual = wanted.take(residual)
            x = layer.mlp_norm.add(x, residual)
            x = layer.mlp(x)
            x = next_norm.add(x, residual, whole=batch.wanted is not None and i + 1 == last)
        return self.head(x)

    def ignore(self, name: str) -> bool:
        return name.endswith(".rotary_emb.inv_freq") or (self.tied and name == "lm_head.weight")


MODELS = {"llama": Llama}
