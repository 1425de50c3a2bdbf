"""Causal grouped-query self-attention over a paged KV cache."""

from torch import Tensor

from tilerank.kernels import ops
from tilerank.kernels.attention import attention, store_kv
from tilerank.kernels.heads import join_heads, split_heads
from tilerank.kernels.kv_pages import KVPages
from tilerank.loader.padding import get_head_dim_and_projection_size, get_num_heads_padding_size
from tilerank.parallel.linear import QKVParallelLinear, RowParallelLinear
from tilerank.parallel.norm import RMSNorm
from tilerank.parallel.sharding import Sharding

from ..batch import Batch, LogitRows
from ..cache import PagedKV
from .decoder import Mixer
from .text_config import TextConfig


class SelfAttention(Mixer[KVPages]):
    """out(softmax(q k^T / sqrt(head_dim)) v), several query heads to a KV head, positions as rotations of q and k.

    qkv_bias, out_bias: biases of the q, k and v, and of the output projection. head_norms: q and k are normalised head
    by head before the rotation (`q_norm`, `k_norm`).
    """

    def __init__(
        self,
        name: str,
        config: TextConfig,
        sharding: Sharding,
        *,
        qkv_bias: bool,
        out_bias: bool,
        head_norms: bool,
    ) -> None:
        heads, dim, hidden = config.num_heads, config.head_dim, config.hidden_size
        self.qkv = QKVParallelLinear(
            name,
            hidden,
            heads,
            config.num_kv_heads,
            dim,
            sharding,
            bias=qkv_bias,
            # Quantisation blocks set no multiple: where heads begin inside a block, its scales are repeated.
            head_multiple=get_num_heads_padding_size(sharding.size, None, dim),
        )
        padded_heads = sum(span.size for span in self.qkv.heads.q)
        head_dim, _ = get_head_dim_and_projection_size(heads * dim, padded_heads, heads)
        self.out = RowParallelLinear(
            f"{name}.o_proj", heads * dim, hidden, sharding, span=self.qkv.q_columns, bias=out_bias
        )
        self.head_norms = (
            [RMSNorm(f"{name}.{norm}", dim, config.rms_norm_eps, sharding) for norm in ("q_norm", "k_norm")]
            if head_norms
            else []
        )
        self.scale = head_dim**-0.5
        self.cache_spec = PagedKV(self.qkv.kv_heads, dim, sharding.cache_dtype)

    def __call__(self, x: Tensor, rope: Tensor, batch: Batch, cache: KVPages, only: LogitRows | None = None) -> Tensor:
        q, k, v = self.qkv(x)
        if self.head_norms:
            q_norm, k_norm = self.head_norms
            ops.norm_rotary_(q, k, q_norm.weight.data, k_norm.weight.data, q_norm.eps, rope)
        else:
            ops.rotary_(q, k, rope)
        store_kv(k, v, cache, batch.slots)
        starts = batch.query_starts
        if only is not None:
            q, starts = split_heads(only.take(join_heads(q)), 0, *q.shape[1:]), only.starts
        heads = attention(q, cache, batch.page_tables, batch.seq_lens, starts, self.qkv.kv_map, self.scale)
        return self.out(join_heads(heads))
