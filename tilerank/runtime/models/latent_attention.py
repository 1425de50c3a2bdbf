"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) over a paged cache of latents."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from tilerank.kernels import core, ops
from tilerank.kernels.attention import attention
from tilerank.kernels.heads import join_heads, part_of_heads, split_heads
from tilerank.kernels.kv_pages import MAX_HEAD_DIM
from tilerank.kernels.latent import expanded_pages, latent_attention, load_latent, store_latent, weigh_part
from tilerank.kernels.latent_pages import LatentPages
from tilerank.kernels.weight_formats import Float
from tilerank.parallel.cost import Cost, Work, context_split_pays
from tilerank.parallel.latent import AbsorbedHeads, ContextSplit, HeadColumnsLinear, cut_latent_heads
from tilerank.parallel.linear import RowParallelLinear
from tilerank.parallel.norm import RMSNorm
from tilerank.parallel.shard import Cut
from tilerank.parallel.sharding import Sharding
from tilerank.parallel.stacked import JoinedLinear

from ..step.batch import Batch, LogitRows
from ..step.cache import PagedLatent
from ..step.latent_forms import ContextPart, Expanded, LatentForms, Runs
from .decoder import Mixer

_LATENT_EPS = 1e-6
"""Epsilon of the norms of latents, whatever `rms_norm_eps` says."""


@dataclass(frozen=True)
class LatentConfig:
    """The shape of latent attention.

    query_latent: the width of the latent that queries come from; None if they come from the hidden state. latent: the
    width of the latent that keys and values come from. A head's queries and keys have nope_dim dimensions without
    positions and rope_dim rotated ones, its values value_dim. neighbours: which dimensions are rotated together
    (ops.rotary_). score_factor: factor of the scores beside 1 / sqrt(nope_dim + rope_dim). bias: of the projections to
    the latents and of the output projection.
    """

    query_latent: int | None
    latent: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    neighbours: bool
    score_factor: float
    bias: bool

    def expands(self, rows: int, length: int) -> bool:
        """Return whether computing keys and values of `length` tokens takes fewer operations than attention of the
        last `rows` of them to latents (latent_forms.py)."""
        dims = self.nope_dim + self.value_dim
        pairs = rows * length - rows * (rows - 1) // 2
        saved = pairs * (2 * self.latent - dims)  # products a head
        fits = max(self.nope_dim + self.rope_dim, self.value_dim) <= MAX_HEAD_DIM
        return fits and saved > length * self.latent * dims


class LatentAttention(Mixer[LatentPages]):
    """out(softmax(q k^T) v), where k and v of all heads are projections of one latent a token, and a rotated key.

    Every rank caches the latents of all tokens and computes its own heads. Few queries are mapped to latents, so that
    attention reads the cache alone; for many, latents are mapped to keys and values (kernels/latent.py).

    context_part: what this rank reads of a context for the heads of all ranks, where a sequence has one row in a step;
    None if it reads whole contexts for its own heads.
    """

    def __init__(self, name: str, hidden: int, heads: int, config: LatentConfig, sharding: Sharding) -> None:
        self.config = c = config
        dim = c.nope_dim + c.rope_dim
        self.cut = cut_latent_heads(heads, (dim, c.nope_dim + c.value_dim, c.value_dim), sharding)
        self.heads = span = self.cut.spans[sharding.rank]
        names, sizes = [f"{name}.kv_a_proj_with_mqa"], [c.latent + c.rope_dim]
        self.query_norm: RMSNorm | None = None
        if c.query_latent is not None:
            names, sizes = [f"{name}.q_a_proj", *names], [c.query_latent, *sizes]
            self.query_norm = RMSNorm(f"{name}.q_a_layernorm", c.query_latent, _LATENT_EPS, sharding)
        self.latents = JoinedLinear(names, hidden, sizes, sharding, bias=c.bias, optional_bias=True)
        queries, width = ("q_proj", hidden) if c.query_latent is None else ("q_b_proj", c.query_latent)
        self.queries = HeadColumnsLinear(f"{name}.{queries}", width, heads, dim, sharding, span=span)
        self.latent_norm = RMSNorm(f"{name}.kv_a_layernorm", c.latent, _LATENT_EPS, sharding)
        self.absorbed = AbsorbedHeads(
            f"{name}.kv_b_proj", c.latent, heads, c.nope_dim, c.value_dim, sharding, span=span
        )
        # The same weights again, which the loader reads one after the other: the second time from the page cache.
        self.expand = HeadColumnsLinear(
            f"{name}.kv_b_proj", c.latent, heads, c.nope_dim + c.value_dim, sharding, span=span, values=True
        )
        values = span.scaled(c.value_dim)
        self.out = RowParallelLinear(
            f"{name}.o_proj", heads * c.value_dim, hidden, sharding, span=values, bias=c.bias, optional_bias=True
        )
        self.scale = dim**-0.5 * c.score_factor
        self.cache_spec = PagedLatent(c.latent, c.rope_dim, sharding.cache_dtype)
        self._activations = sharding.dtype
        self.context_part: ContextPart | None = None
        if self._splits_contexts(sharding):
            self.context_part = ContextPart(sharding.rank, sharding.size)
        self._context_split = ContextSplit(self.cut, c.latent, c.latent + c.rope_dim, sharding)
        self._kv_map = torch.tensor([[head, 1] for head in range(span.size)], dtype=torch.int32)

    def __call__(
        self, x: Tensor, rope: Tensor, batch: Batch, cache: LatentPages, only: LogitRows | None = None
    ) -> Tensor:
        c = self.config
        if not self.heads.size and self.context_part is None:  # nothing on this rank reads the cache
            return self.out((x if only is None else only.take(x))[:, :0])
        *query_latent, joined = self.latents(x)
        q = self.queries(x if self.query_norm is None else self.query_norm(query_latent[0]))
        latent, rope_key = self.latent_norm(joined[:, : c.latent]), joined[:, c.latent :]
        q_rope = part_of_heads(q, c.nope_dim, c.rope_dim)
        ops.rotary_(q_rope, rope_key[:, None], rope, neighbours=c.neighbours)
        store_latent(latent, rope_key, cache, batch.slots)
        if batch.latent_forms is not None:
            # All rows also where only some are used: the form, and so the bits, do not depend on that.
            rows = join_heads(self._in_forms(q, batch.latent_forms, cache))
            return self.out(rows if only is None else only.take(rows))
        starts = batch.query_starts
        if only is not None:
            q, starts = _take(q, only.rows), only.starts
        return self.out(join_heads(self._absorbed(q, Runs(None, batch.page_tables, batch.seq_lens, starts), cache)))

    def _absorbed(self, q: Tensor, runs: Runs, cache: LatentPages) -> Tensor:
        """q [t, heads, nope + rope] -> [t, heads, value_dim]"""
        c = self.config
        q_latent = self.absorbed.keys(part_of_heads(q, 0, c.nope_dim))
        q_rope = part_of_heads(q, c.nope_dim, c.rope_dim)
        tables, lengths, starts = runs.page_tables, runs.seq_lens, runs.query_starts
        return self.absorbed.values(latent_attention(q_latent, q_rope, cache, tables, lengths, starts, self.scale))

    def _split(self, q: Tensor, runs: Runs, cache: LatentPages) -> Tensor:
        """The same for sequences with one row each, of which this rank reads a part for the heads of all ranks."""
        c = self.config
        q_latent = self.absorbed.keys(part_of_heads(q, 0, c.nope_dim))
        everyone = self._context_split.gather(q_latent, part_of_heads(q, c.nope_dim, c.rope_dim))
        q_latent, q_rope = part_of_heads(everyone, 0, c.latent), part_of_heads(everyone, c.latent, c.rope_dim)
        lse = core.empty(everyone.shape[:2], torch.float32)
        part = latent_attention(
            q_latent,
            q_rope,
            cache,
            runs.page_tables,
            runs.seq_lens,
            runs.query_starts,
            self.scale,
            causal=False,
            lse=lse,
            kv_starts=runs.kv_starts,
        )
        return self.absorbed.values(self._context_split.merge(part, lse))

    def _expanded(self, q: Tensor, sequence: Expanded, cache: LatentPages) -> Tensor:
        """The same for a sequence in the expanded form, piece by piece, which bounds the memory."""
        c, parts = self.config, list[Tensor]()
        last = len(sequence.pieces) - 1
        lse = core.empty((last + 1, *q.shape[:2]), torch.float32)
        for i, (pages, runs) in enumerate(sequence.pieces):
            latent, rope_key = load_latent(cache, pages, self._activations)
            kv = self.expand(latent)
            k, v = part_of_heads(kv, 0, c.nope_dim), part_of_heads(kv, c.nope_dim, c.value_dim)
            keys = expanded_pages(k, v, rope_key)
            batch = (runs.page_tables, runs.seq_lens, runs.query_starts)
            part = attention(q, keys, *batch, self._kv_map, self.scale, causal=i == last, lse=lse[i] if last else None)
            parts.append(part)
        if not last:
            return parts[0]
        return reduce(ops.add, [weigh_part(part, lse, i) for i, part in enumerate(parts)])

    def _in_forms(self, q: Tensor, forms: LatentForms, cache: LatentPages) -> Tensor:
        """The same for a step with sequences in several forms. Those in the expanded form are computed one after the
        other, which bounds the memory."""

        def take(rows: Tensor | None) -> Tensor:
            return q if rows is None else _take(q, rows)

        parts = list[tuple[Tensor | None, Tensor]]()
        if self.heads.size:
            for sequence in forms.expanded:
                parts.append((sequence.rows, self._expanded(take(sequence.rows), sequence, cache)))
            if (rest := forms.absorbed) is not None:
                parts.append((rest.rows, self._absorbed(take(rest.rows), rest, cache)))
        if (split := forms.split) is not None:
            parts.append((split.rows, self._split(take(split.rows), split, cache)))
        if len(parts) == 1 and parts[0][0] is None:
            return parts[0][1]
        heads = core.empty((q.shape[0], self.heads.size, self.config.value_dim), q.dtype)
        if self.heads.size:
            for rows, part in parts:
                assert rows is not None
                ops.put_rows_(join_heads(heads), rows, join_heads(part))
        return heads

    def _splits_contexts(self, sharding: Sharding) -> bool:
        """Return whether ranks share contexts out, as asked for or if it pays for a row of `sharding.cached_tokens`."""
        if sharding.kv_split != "auto" or sharding.size == 1:
            return sharding.kv_split == "on" and sharding.size > 1
        c, heads, tokens = self.config, self.cut.total, sharding.cached_tokens

        def work(heads: int, tokens: int) -> Work:
            return Work(self.cache_spec.nbytes(tokens), bf16=heads * tokens * self._operations)

        most = max(span.size for span in self.cut.spans)
        exchanged = heads * (2 * c.latent + c.latent + c.rope_dim) * sharding.dtype.itemsize
        return context_split_pays(work(most, tokens), work(heads, -(-tokens // sharding.size)), exchanged)

    @property
    def _operations(self) -> int:
        """The operations of a head for each pair of a query and a token: a score, and adding to a sum of latents."""
        return 2 * (2 * self.config.latent + self.config.rope_dim)

    def cost(self) -> Cost:
        heads = self.heads.size if self.context_part is None else self.cut.total / self.context_part.ranks
        pairs = Cost(pair=Work(**{Float(self._activations).operands: heads * self._operations}))
        absorbed = super().cost() - self.expand.cost()  # of the absorbed form, which has few rows
        return absorbed + pairs + self._cost_of_latents()

    def cost_of_caching(self) -> Cost:
        return self.latents.cost() + self.queries.cost() + self._cost_of_latents()

    def _cost_of_latents(self) -> Cost:
        """The norms of latents, the rotation of queries and of the key, and storing latent and key."""
        c = self.config
        in_place = (c.query_latent or 0) + c.latent + (self.heads.size + 1) * c.rope_dim
        return Cost(elementwise=2 * (in_place + c.latent + c.rope_dim) * self._activations.itemsize)

    def cuts(self) -> Iterator[tuple[str, Cut]]:
        yield "heads", self.cut


def _take(q: Tensor, rows: Tensor) -> Tensor:
    """Return rows of q [t, heads, dim]."""
    return split_heads(ops.take_rows(join_heads(q), rows), 0, *q.shape[1:])
