"""Causal grouped-query self-attention over a paged KV cache."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilerank.kernels import ops
from tilerank.kernels.attention import attention, store_kv
from tilerank.kernels.delta import sigmoid_gate_
from tilerank.kernels.heads import join_heads, part_of_heads, split_heads
from tilerank.kernels.kv_pages import KVPages
from tilerank.kernels.temperature import scale_by_position_
from tilerank.parallel.linear import RowParallelLinear
from tilerank.parallel.norm import JointNorm, RMSNorm
from tilerank.parallel.parameters import PlainParameter
from tilerank.parallel.sharding import Sharding
from tilerank.parallel.stacked import QKVParallelLinear

from ..step.batch import Batch, LogitRows
from ..step.cache import HeadPlace, PagedKV
from ..step.rope import Rotation
from .decoder import Mixer
from .padded_heads import attention_scale, head_multiple
from .text_config import TextConfig


@dataclass(frozen=True)
class Temperature:
    """The factor 1 + beta * ln(1 + floor(position / original)) of queries (Ministral 3)."""

    beta: float
    original: int


class SelfAttention(Mixer[KVPages]):
    """out(softmax(q k^T / sqrt(head_dim)) v), several query heads to a KV head, positions as rotations of q and k.

    With an output gate (Qwen3.5): out(sigmoid(gate) * softmax(q k^T / sqrt(head_dim)) v).

    qkv_bias, out_bias: biases of the q, k and v, and of the output projection, each zero if the checkpoint lacks it.
    head_norms: q and k are normalised head by head before the rotation (`q_norm`, `k_norm`). joint_norm: all heads of q
    are normalised together instead, and so are all of k (MiniMax-M2). gated: the query projection yields a gate for
    each head as well. scale: factor of the scores in place of 1 / sqrt(head_dim). window: a token attends to so many
    tokens, itself included; 0: to all before it. both_sides: it attends to as many tokens after it as before it, so
    that a text is computed as a whole and the tokens before a window stay. sinks: every query head has a learned logit
    beside its scores, without a value (`sinks`, gpt-oss). rotated: positions rotate q and k; a layer without head norms
    may leave them as they are (SmolLM3). temperature: of q, after the rotation. projections: as in QKVParallelLinear.
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
        joint_norm: bool = False,
        gated: bool = False,
        scale: float | None = None,
        window: int = 0,
        both_sides: bool = False,
        sinks: bool = False,
        rotated: bool = True,
        temperature: Temperature | None = None,
        projections: Sequence[str] = ("q_proj", "k_proj", "v_proj"),
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
            optional_bias=True,
            projections=projections,
            head_multiple=head_multiple(dim, sharding),
            gated=gated,
        )
        self.out = RowParallelLinear(
            f"{name}.o_proj",
            heads * dim,
            hidden,
            sharding,
            span=self.qkv.q_columns,
            bias=out_bias,
            optional_bias=True,
        )
        self.head_norms = [
            RMSNorm(f"{name}.{norm}", dim, config.rms_norm_eps, sharding, zero_centered=config.zero_centered_norms)
            for norm in (("q_norm", "k_norm") if head_norms else ())
        ]
        self.joint_norm: JointNorm | None = None
        if joint_norm:
            cut, eps = self.qkv.heads, config.rms_norm_eps
            self.joint_norm = JointNorm(name, heads, config.num_kv_heads, cut, eps, sharding)
        self.gated = gated
        self.scale = attention_scale(heads * dim, self.qkv.heads, heads) if scale is None else scale
        self.rotation = Rotation(config.rope, config.rotary_dim)
        self.rotated = rotated
        self.temperature = temperature
        self.window = window
        self.both_sides = both_sides
        self.reach = window - 1 if both_sides and window else 0
        self.sinks: PlainParameter | None = None
        if sinks:
            span = self.qkv.heads.q[sharding.rank]
            self.sinks = PlainParameter((span.size,), torch.float32)
            self.sinks.fill(f"{name}.sinks", (heads,), slice(span.start, span.stop))
        kept = 0 if both_sides else window
        place = HeadPlace.of(self.qkv.heads, sharding.rank)
        self.cache_spec = PagedKV(self.qkv.kv_heads, dim, sharding.cache_dtype, kept, place)

    def __call__(self, x: Tensor, rope: Tensor, batch: Batch, cache: KVPages, only: LogitRows | None = None) -> Tensor:
        queries, k, v = self.qkv(x)
        dim = self.qkv.head_dim
        q = part_of_heads(queries, 0, dim)
        self._rotate(q, k, rope, batch.positions)
        tables = batch.tables(0 if self.both_sides else self.window)
        visible = batch.visible if only is None else only.visible
        store_kv(k, v, cache, tables.slots)
        starts = batch.query_starts
        if only is not None:
            queries, starts = split_heads(only.take(join_heads(queries)), 0, *queries.shape[1:]), only.starts
            q = part_of_heads(queries, 0, dim)
        heads = attention(
            q,
            cache,
            tables.page_tables,
            batch.seq_lens,
            starts,
            self.qkv.kv_map,
            self.scale,
            window=self.window,
            sinks=None if self.sinks is None else self.sinks.data,
            visible=None if visible is None else visible.of(self.window),
        )
        if self.gated:
            sigmoid_gate_(heads, part_of_heads(queries, dim, dim))
        return self.out(join_heads(heads))

    def _rotate(self, q: Tensor, k: Tensor, rope: Tensor, positions: Tensor) -> None:
        """Normalise the heads, rotate them by their positions [axes, t], and scale the queries, as far as the layer
        does."""
        if self.joint_norm is not None:
            self.joint_norm(q, k)
        if self.head_norms:
            q_norm, k_norm = self.head_norms
            q_weight, k_weight, centered = q_norm.weight.data, k_norm.weight.data, q_norm.zero_centered
            ops.norm_rotary_(q, k, q_weight, k_weight, q_norm.eps, rope, zero_centered=centered)
        elif self.rotated:
            ops.rotary_(q, k, rope)
        if self.temperature is not None:
            scale_by_position_(q, positions[0], self.temperature.beta, self.temperature.original)
