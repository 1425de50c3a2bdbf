"""Self-attention with norms of queries, keys and values, whose scores are not scaled (Gemma 4).

    q = rotate(q_norm(q_proj(x))),  k = rotate(k_norm(k_proj(x))),  v = v_norm(v_proj(x)),  out(softmax(q k^T) v)

v_norm has no weight. A layer may have no v_proj, and then takes k_proj(x) in its place, or neither, and then attends to
keys and values of another layer.
"""

from torch import Tensor

from tilerank.kernels import ops
from tilerank.kernels.attention import attention, store_kv
from tilerank.kernels.heads import join_heads, split_heads
from tilerank.kernels.kv_pages import KVPages
from tilerank.parallel.linear import RowParallelLinear
from tilerank.parallel.norm import RMSNorm, WeightlessNorm
from tilerank.parallel.sharding import Sharding
from tilerank.parallel.stacked import QKVParallelLinear

from ..step.batch import Batch, LogitRows
from ..step.cache import CacheSpec, HeadPlace, PagedKV, SharedKV
from ..step.rope import Rotation
from .decoder import Mixer
from .padded_heads import head_multiple
from .text_config import TextConfig


class NormedAttention(Mixer[KVPages]):
    """Self-attention as above.

    keys_are_values: there is no v_proj. window: as in SelfAttention. shared: the number of the layer whose keys and
    values it reads; None for its own.

    Tokens of pictures that attend to a whole picture do so in layers with a window alone.
    """

    def __init__(
        self,
        name: str,
        config: TextConfig,
        sharding: Sharding,
        *,
        keys_are_values: bool,
        window: int,
        shared: int | None,
    ) -> None:
        heads, dim, hidden, eps = config.num_heads, config.head_dim, config.hidden_size, config.rms_norm_eps
        self.qkv = QKVParallelLinear(
            name,
            hidden,
            heads,
            config.num_kv_heads,
            dim,
            sharding,
            head_multiple=head_multiple(dim, sharding),
            held="q" if shared is not None else "qk" if keys_are_values else "qkv",
        )
        self.out = RowParallelLinear(f"{name}.o_proj", heads * dim, hidden, sharding, span=self.qkv.q_columns)
        self.q_norm = RMSNorm(f"{name}.q_norm", dim, eps, sharding)
        self.k_norm = RMSNorm(f"{name}.k_norm", dim, eps, sharding) if shared is None else None
        self.v_norm = WeightlessNorm(dim, eps, sharding)
        self.rotation = Rotation(config.rope, config.rotary_dim)
        self.window = window
        place = HeadPlace.of(self.qkv.heads, sharding.rank)
        kept = PagedKV(self.qkv.kv_heads, dim, sharding.cache_dtype, window, place)
        self.cache_spec: CacheSpec = kept if shared is None else SharedKV(shared, kept)

    def __call__(self, x: Tensor, rope: Tensor, batch: Batch, cache: KVPages, only: LogitRows | None = None) -> Tensor:
        q, k, v = self.qkv(x)
        tables, distance = batch.tables(self.window), self.qkv.head_dim // 2
        q_weight, eps = self.q_norm.weight.data, self.q_norm.eps
        if self.k_norm is None:
            ops.norm_rotary_(q, k, q_weight, q_weight, eps, rope, distance=distance)  # k has no heads
        else:
            v = self.v_norm(v)
            ops.norm_rotary_(q, k, q_weight, self.k_norm.weight.data, eps, rope, distance=distance)
            store_kv(k, v, cache, tables.slots)
        starts, visible = batch.query_starts, batch.visible
        if only is not None:
            q = split_heads(only.take(join_heads(q)), 0, *q.shape[1:])
            starts, visible = only.starts, only.visible
        heads = attention(
            q,
            cache,
            tables.page_tables,
            batch.seq_lens,
            starts,
            self.qkv.kv_map,
            1.0,
            window=self.window,
            visible=visible.windowed if visible is not None and self.window else None,
        )
        return self.out(join_heads(heads))
