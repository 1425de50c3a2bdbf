"""Cross-attention of text to the encodings of pictures, whose keys and values are computed once and kept in pages."""

from collections.abc import Iterator

import torch
from torch import Tensor

from tilerank.kernels.attention import attention, store_kv
from tilerank.kernels.heads import join_heads, split_heads
from tilerank.kernels.kv_pages import KVPages
from tilerank.kernels.vision import tanh_gate_
from tilerank.loader.padding import get_num_heads_padding_size
from tilerank.parallel.linear import ColumnParallelLinear, RowParallelLinear
from tilerank.parallel.norm import RMSNorm
from tilerank.parallel.parameters import PlainParameter
from tilerank.parallel.shard import Cut, HeadCut
from tilerank.parallel.sharding import Sharding

from ..batch import Batch, LogitRows
from ..cache import EncoderKV
from .decoder import Mixer, RowGate
from .text_config import TextConfig


class TanhGate(RowGate):
    """Scales rows by tanh of a number of the checkpoint, and hides those that `batch.source` does not show."""

    def __init__(self, name: str, sharding: Sharding) -> None:
        self.weight = PlainParameter((1,), sharding.dtype)
        self.weight.fill(name, (1,), slice(0, 1))

    def __call__(self, x: Tensor, batch: Batch) -> None:
        assert batch.source is not None
        tanh_gate_(x, self.weight.data, batch.source.shown)


class CrossAttention(Mixer[KVPages]):
    """tanh(gate) * out(softmax(q k^T / sqrt(head_dim)) v), where k and v are those of the source of each row.

    Query and key heads are normalised (`q_norm`, `k_norm`) and not rotated. A row that sees nothing gets zeros.
    """

    def __init__(self, name: str, config: TextConfig, sharding: Sharding, gate: str) -> None:
        """gate: the name of its tensor."""
        heads, kv_heads, dim, hidden = config.num_heads, config.num_kv_heads, config.head_dim, config.hidden_size
        multiple = get_num_heads_padding_size(sharding.size, None, dim)
        self.heads = sharding.cut_heads(heads, kv_heads, dim, hidden, multiple)
        self._dim = dim
        self._q_heads, self._kv_heads = self.heads.q[sharding.rank].size, self.heads.kv[sharding.rank].size
        self.kv_map = torch.tensor(self.heads.kv_map[sharding.rank], dtype=torch.int32)
        queries, keys = (
            Cut(count * dim, dim, tuple(span.scaled(dim) for span in spans))
            for count, spans in ((heads, self.heads.q), (kv_heads, self.heads.kv))
        )
        self.q = ColumnParallelLinear(f"{name}.q_proj", hidden, heads * dim, sharding, cut=queries)
        self.k, self.v = (
            ColumnParallelLinear(f"{name}.{part}", hidden, kv_heads * dim, sharding, cut=keys)
            for part in ("k_proj", "v_proj")
        )
        self.out = RowParallelLinear(f"{name}.o_proj", heads * dim, hidden, sharding, span=self.q.span)
        self.q_norm, self.k_norm = (
            RMSNorm(f"{name}.{norm}", dim, config.rms_norm_eps, sharding) for norm in ("q_norm", "k_norm")
        )
        self.gate = PlainParameter((1,), sharding.dtype)
        self.gate.fill(gate, (1,), slice(0, 1))
        self.scale = dim**-0.5
        self.cache_spec = EncoderKV(self._kv_heads, dim, sharding.cache_dtype)

    def store_source(self, rows: Tensor, slots: Tensor, cache: KVPages) -> None:
        """Store the keys and values of an encoding: rows [n, hidden], slots [n] int64 (attention.py: store_kv)."""
        k = self.k_norm(split_heads(self.k(rows), 0, self._kv_heads, self._dim))
        store_kv(k, split_heads(self.v(rows), 0, self._kv_heads, self._dim), cache, slots)

    def __call__(self, x: Tensor, rope: Tensor, batch: Batch, cache: KVPages, only: LogitRows | None = None) -> Tensor:
        source = batch.source
        assert source is not None and only is None  # mllama.py: the last layer is self-attention
        q = self.q_norm(split_heads(self.q(x), 0, self._q_heads, self._dim))
        tables, lengths, starts = source.page_tables, source.lengths, source.starts
        heads = attention(
            q, cache, tables, lengths, source.run_starts, self.kv_map, self.scale, causal=False, kv_starts=starts
        )
        part = self.out(join_heads(heads))
        tanh_gate_(part, self.gate.data)
        return part

    def cuts(self) -> Iterator[tuple[str, Cut]]:
        for name, spans in (("query heads", self.heads.q), ("KV heads", self.heads.kv)):
            yield name, Cut(max(span.stop for span in spans), 1, spans)

    def head_cuts(self) -> Iterator[HeadCut]:
        yield self.heads
