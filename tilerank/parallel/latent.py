"""The projections of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), cut by heads.

Queries and the cache go through latents. The projections to the latents are whole on every rank, because every rank
needs whole latents; those from the latents to the heads are cut by heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from math import gcd

import torch
from torch import Tensor

from tilerank.kernels import core
from tilerank.kernels.heads import split_heads
from tilerank.kernels.latent import head_linear, join_queries, weigh_part
from tilerank.kernels.weight_formats import (
    BlockFormat,
    BlockInt8,
    Float,
    Format,
    OutputScaledFormat,
    TokenInt8,
    Weight,
)
from tilerank.kernels.weight_formats.byte_codes import ByteCodesWeight

from .experts import ExpertsParameter
from .linear import Linear
from .parameters import Layer, PlainParameter, whole_tiles
from .shard import TILE, Cut, Span
from .sharding import Sharding


def cut_latent_heads(heads: int, dims: Sequence[int], sharding: Sharding) -> Cut:
    """Cut the heads of latent attention, which have nothing to pad. dims: of a head, for each projection.

    Every rank's part of a quantised projection begins at a tile, since scales are not cut within one.
    """
    formats = sharding.formats
    unit = 1
    if formats is not None and formats.projections.is_quantised:
        while any(unit * dim % TILE for dim in dims):
            unit *= 2
    return sharding.cut(heads, unit)


class HeadColumnsLinear(Linear):
    """A projection [heads * dim, in] cut by heads: x[..., in] -> [t, span.size, dim].

    span: this rank's heads. values: whether the heads contain values of attention.
    """

    def __init__(
        self,
        name: str,
        in_features: int,
        heads: int,
        dim: int,
        sharding: Sharding,
        *,
        span: Span,
        values: bool = False,
    ) -> None:
        self.span, self.dim = span, dim
        rows = span.scaled(dim)
        super().__init__(rows.size, in_features, sharding.format_of(name, rows=rows, values=values), None)
        self.fill_rows(name, (heads * dim, in_features), rows)

    def __call__(self, x: Tensor) -> Tensor:
        return split_heads(self.project(x), 0, self.span.size, self.dim)


class _KeyHeads(ExpertsParameter):
    """A matrix [n, k] for every head, filled from k rows of n elements. Rows of the parameter count head by head."""

    transposed = True

    def preset(self) -> None:
        if not self.is_empty and isinstance(weight := self.packed.weight, ByteCodesWeight):
            # An int8 checkpoint with a scale a row has none for blocks. Other checkpoints overwrite these.
            weight.scales.fill_(1)

    def place(self, row: int) -> tuple[Weight, int]:
        return self.packed.part(row // self.k), 0

    def write(self, rows: Tensor, row: int) -> None:
        """Store rows that are held as floats."""
        head, column = divmod(row, self.k)
        self.packed.write(rows.T, head, col=column)


class AbsorbedHeads(Layer):
    """The projection `name` [heads * (key_dim + value_dim), latent] of latents to keys and values, split by heads.

    Scores of q . (W_k c) are those of (q W_k) . c, so that few queries need no keys of the cached latents c:
    `keys` maps queries [t, heads, key_dim] to [t, heads, latent], and `values` maps sums of latents
    [t, heads, latent] to [t, heads, value_dim]. span: this rank's heads.

    Weights stay in the 8 bits of a quantised checkpoint where blocks with a scale fit heads, and are floats otherwise.
    W_k is multiplied from its other side: a scale of one of its rows is a factor of a query (`key_scales`).
    """

    def __init__(
        self,
        name: str,
        latent: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        sharding: Sharding,
        *,
        span: Span,
    ) -> None:
        rows = key_dim + value_dim
        of_keys, of_values = _absorbed_formats(name, key_dim, rows, sharding)
        self._keys = _KeyHeads(span.size, latent, key_dim, of_keys)
        self._values = ExpertsParameter(span.size, value_dim, latent, of_values)
        self._key_scales: PlainParameter | None = None
        if isinstance(of_values, TokenInt8):
            self._key_scales = PlainParameter((span.size * key_dim, 1), torch.float32)
        shape, columns = (heads * rows, latent), slice(0, latent)
        for local, head in enumerate(range(span.start, span.stop)):
            keys = slice(head * rows, head * rows + key_dim)
            self._keys.fill(f"{name}.weight", shape, keys, columns, row=local * key_dim)
            values = slice(keys.stop, keys.stop + value_dim)
            self._values.fill(f"{name}.weight", shape, values, columns, row=local * value_dim)
            if self._key_scales is not None:
                scales = f"{name}.weight_scale"
                self._key_scales.fill(scales, (shape[0], 1), keys, slice(0, 1), row=local * key_dim)
        self._key_dim, self._latent, self._value_dim = key_dim, latent, value_dim

    def keys(self, q: Tensor) -> Tensor:
        if self._keys.is_empty:
            return core.empty((q.shape[0], 0, self._latent), q.dtype)
        scales = None if self._key_scales is None else self._key_scales.data.view(-1, self._key_dim)
        return head_linear(q, self._keys.packed, scales)

    def values(self, latent: Tensor) -> Tensor:
        if self._values.is_empty:
            return core.empty((latent.shape[0], 0, self._value_dim), latent.dtype)
        return head_linear(latent, self._values.packed)


def _absorbed_formats(name: str, key_dim: int, rows: int, sharding: Sharding) -> tuple[Format, Format]:
    """Return the formats of W_k and W_v. rows: of both, for one head."""
    floats, formats = Float(sharding.dtype), sharding.formats
    stored = None if formats is None or formats.encoded is None else formats.encoded(name)
    if isinstance(stored, TokenInt8):
        return BlockInt8(block_k=gcd(128, whole_tiles(key_dim))), stored
    if isinstance(stored, OutputScaledFormat):
        return floats, stored  # W_k is multiplied from its other side, where its outputs share no scale
    if not isinstance(stored, BlockFormat):
        return floats, floats
    block = gcd(stored.block_n, key_dim, rows)  # has an edge where any head's keys or values begin
    if block % TILE:
        return floats, floats
    return replace(stored, block_n=stored.block_k, block_k=block), replace(stored, block_n=block)


class ContextSplit:
    """Exchanges queries and results where every rank reads a part of a context for the heads of all ranks.

    cut: of the heads. latent, dim: dimensions of a latent, and of a query: a latent and a rotated part.
    """

    def __init__(self, cut: Cut, latent: int, dim: int, sharding: Sharding) -> None:
        self._heads, self._latent, self._dim, self._sharding = cut.total, latent, dim, sharding
        self._own = cut.spans[sharding.rank]
        self._most = max(span.size for span in cut.spans)
        self._words = dim * sharding.dtype.itemsize // 4  # of a head, as the 4-byte values that are gathered
        self._starts = torch.tensor([0, *accumulate(span.size * self._words for span in cut.spans)])

    def gather(self, q_latent: Tensor, q_rope: Tensor) -> Tensor:
        """Return the queries of all heads [t, heads, dim] from those of this rank."""
        joined = join_queries(q_latent, q_rope, self._most)
        words = joined.view(-1, self._most * self._dim).view(torch.float32)
        everyone = self._sharding.gather_columns(words, self._starts, self._heads * self._words)
        return split_heads(everyone.view(joined.dtype), 0, self._heads, self._dim)

    def merge(self, part: Tensor, lse: Tensor) -> Tensor:
        """Return the attention of this rank's heads [t, h, latent] to the whole context.

        part: [t, heads, latent], that of all heads to this rank's part. lse: [t, heads] float32, its log-sum-exp.
        """
        lse = self._sharding.gather(lse)
        merged = self._sharding.sum(weigh_part(part, lse, self._sharding.rank))
        shape = (merged.shape[0], self._own.size, self._latent)
        return core.view(merged, shape, merged.stride(), self._own.start * self._latent)
