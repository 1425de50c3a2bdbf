"""Cross-attention of text to the encodings of pictures, whose keys and values are computed once and kept in pages."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from tilerank.kernels import ops
from tilerank.kernels.attention import attention, store_kv
from tilerank.kernels.heads import join_heads, split_heads
from tilerank.kernels.kv_pages import KVPages
from tilerank.kernels.tower_ops import tanh_gate_
from tilerank.loader.card import ModelCard
from tilerank.loader.fields import Fields
from tilerank.parallel.cost import Cost
from tilerank.parallel.linear import ColumnParallelLinear, RowParallelLinear
from tilerank.parallel.norm import RMSNorm
from tilerank.parallel.parameters import WholeParameter
from tilerank.parallel.shard import Cut, HeadCut
from tilerank.parallel.sharding import Sharding

from ..step.batch import Batch, LogitRows
from ..step.cache import EncoderKV, HeadPlace
from ..step.model import Encoder
from .decoder import Decoder, DecoderNames, Mixer, RowGate
from .gated_mlp import dense_mlps
from .padded_heads import attention_scale, head_multiple
from .text_config import TextConfig


def read_crossing_layers(text: Fields, layers: int) -> frozenset[int]:
    """Read which layers are cross-attention. text: the fields of a language model of so many layers."""
    listed = text.values.get("cross_attention_layers")
    if not isinstance(listed, list) or any(type(i) is not int or not 0 <= i < layers - 1 for i in listed):
        raise text.fail("cross_attention_layers", f"a list of layers from 0 to {layers - 2}, all but the last")
    return frozenset(listed)


class TanhGate(RowGate):
    """Scales rows by tanh of a number of the checkpoint, and hides those that `batch.source` does not show."""

    def __init__(self, name: str, sharding: Sharding) -> None:
        self.weight = WholeParameter(name, (1,), sharding.dtype)

    def __call__(self, x: Tensor, batch: Batch) -> None:
        assert batch.source is not None
        tanh_gate_(x, self.weight.data, batch.source.shown)


class CrossAttention(Mixer[KVPages]):
    """tanh(gate) * out(softmax(q k^T / sqrt(head_dim)) v), where k and v are those of the source of each row.

    Query and key heads are normalised (`q_norm`, `k_norm`) and, if `rotates_source`, rotated by the positions of
    tokens and of source tokens. A row that sees nothing gets zeros, also from projections with a bias.
    """

    def __init__(
        self,
        name: str,
        config: TextConfig,
        sharding: Sharding,
        gate: str,
        *,
        rotates_source: bool = False,
        bias: bool = False,
    ) -> None:
        """gate: the name of its tensor. bias: of all projections."""
        heads, kv_heads, dim, hidden = config.num_heads, config.num_kv_heads, config.head_dim, config.hidden_size
        self.heads = sharding.cut_heads(heads, kv_heads, dim, hidden, head_multiple(dim, sharding))
        self._dim = dim
        self._q_heads, self._kv_heads = self.heads.q[sharding.rank].size, self.heads.kv[sharding.rank].size
        self.kv_map = torch.tensor(self.heads.kv_map[sharding.rank], dtype=torch.int32)
        queries, keys = (
            Cut(count * dim, dim, tuple(span.scaled(dim) for span in spans))
            for count, spans in ((heads, self.heads.q), (kv_heads, self.heads.kv))
        )
        width = heads * dim
        self.q = ColumnParallelLinear(
            f"{name}.q_proj", hidden, width, sharding, cut=queries, bias=bias, optional_bias=True
        )
        self.k, self.v = (
            ColumnParallelLinear(
                f"{name}.{part}",
                hidden,
                kv_heads * dim,
                sharding,
                cut=keys,
                bias=bias,
                optional_bias=True,
                values=part == "v_proj",
            )
            for part in ("k_proj", "v_proj")
        )
        self.out = RowParallelLinear(
            f"{name}.o_proj", width, hidden, sharding, span=self.q.span, bias=bias, optional_bias=True
        )
        self.q_norm, self.k_norm = (
            RMSNorm(f"{name}.{norm}", dim, config.rms_norm_eps, sharding) for norm in ("q_norm", "k_norm")
        )
        self.gate = WholeParameter(gate, (1,), sharding.dtype)
        self.scale = attention_scale(heads * dim, self.heads, heads)
        self.rotates_source = rotates_source
        self._has_bias = bias
        self.cache_spec = EncoderKV(self._kv_heads, dim, sharding.cache_dtype, HeadPlace.of(self.heads, sharding.rank))

    def store_source(self, rows: Tensor, rope: Tensor | None, slots: Tensor, cache: KVPages) -> None:
        """Store the keys and values of an encoding: rows [n, hidden], slots [n] int64 (attention.py: store_kv).

        rope: [n, 2, head_dim / 2], what keys are rotated with, if they are.
        """
        projected = self.k(rows)
        k = split_heads(projected, 0, self._kv_heads, self._dim)
        if rope is None:
            k = self.k_norm(k)
        else:
            self._norm_rotary(split_heads(projected, 0, 0, self._dim), k, rope)
        store_kv(k, split_heads(self.v(rows), 0, self._kv_heads, self._dim), cache, slots)

    def is_idle(self, batch: Batch) -> bool:
        return batch.source is None  # the gates and the MLP give zeros to rows that see nothing

    def __call__(self, x: Tensor, rope: Tensor, batch: Batch, cache: KVPages, only: LogitRows | None = None) -> Tensor:
        source = batch.source
        assert source is not None and only is None  # the last layer is self-attention
        projected = self.q(x)
        q = split_heads(projected, 0, self._q_heads, self._dim)
        if self.rotates_source:
            self._norm_rotary(q, split_heads(projected, 0, 0, self._dim), rope)
        else:
            q = self.q_norm(q)
        tables, lengths, starts = source.page_tables, source.lengths, source.starts
        heads = attention(
            q, cache, tables, lengths, source.run_starts, self.kv_map, self.scale, causal=False, kv_starts=starts
        )
        part = self.out(join_heads(heads))
        tanh_gate_(part, self.gate.data, source.shown if self._has_bias else None)
        return part

    def _norm_rotary(self, q: Tensor, k: Tensor, rope: Tensor) -> None:
        """Normalise and rotate heads in place; one of q and k has none."""
        ops.norm_rotary_(q, k, self.q_norm.weight.data, self.k_norm.weight.data, self.q_norm.eps, rope)

    def cost(self) -> Cost:
        """Without the projections to keys and values, which a step does not compute."""
        return Cost.total(layer.cost() for layer in (self.q, self.q_norm, self.out, self.gate))

    def cuts(self) -> Iterator[tuple[str, Cut]]:
        for name, spans in (("query heads", self.heads.q), ("KV heads", self.heads.kv)):
            yield name, Cut(max(span.stop for span in spans), 1, spans)

    def head_cuts(self) -> Iterator[HeadCut]:
        yield self.heads


def crossing_decoder(
    card: ModelCard,
    c: TextConfig,
    text: Fields,
    sharding: Sharding,
    names: DecoderNames,
    self_attention: Callable[[str, int], Mixer[KVPages]],
    tower: Encoder | None,
    *,
    rotates_source: bool = False,
    bias: bool = False,
    spare_ids: int = 0,
) -> Decoder:
    """Return a decoder with gated layers of cross-attention among those that `self_attention` makes.

    text: the fields of the language model. names: without those of mixers. rotates_source, bias: of cross-attention.
    spare_ids: as in Decoder. Raises ConfigError.
    """
    crossing = read_crossing_layers(text, c.num_layers)

    def gate(layer: int, part: str) -> str:
        return f"{names.layer.format(layer)}.cross_attn_{part}_gate"

    def mixer(name: str, layer: int) -> Mixer[KVPages]:
        if layer not in crossing:
            return self_attention(name, layer)
        return CrossAttention(name, c, sharding, gate(layer, "attn"), rotates_source=rotates_source, bias=bias)

    def mlp_gate(layer: int) -> TanhGate | None:
        return TanhGate(gate(layer, "mlp"), sharding) if layer in crossing else None

    mixers = tuple("cross_attn" if layer in crossing else "self_attn" for layer in range(c.num_layers))
    return Decoder(
        card,
        c,
        sharding,
        replace(names, mixer=mixers),
        mixer,
        dense_mlps(c, sharding),
        tower,
        mlp_gate=mlp_gate,
        spare_ids=spare_ids,
    )
