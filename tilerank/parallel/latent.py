"""The projections of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), cut by heads.

Queries and the cache go through latents. The projections to the latents are whole on every rank, because every rank
needs whole latents; those from the latents to the heads are cut by heads.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tilerank.kernels.heads import split_heads
from tilerank.kernels.latent import head_linear
from tilerank.kernels.weight_formats import BlockFormat, Float

from .experts import ExpertsParameter
from .linear import Linear
from .parameters import Layer
from .shard import TILE, Cut, Span
from .sharding import Sharding, row_unit


class JoinedLinear(Linear):
    """Several projections [size, in] of one input, whole on every rank and computed as one.

    x[..., in] -> one view [..., size] of the result for each projection, the same bits on every rank. names, sizes:
    of the projections.
    """

    def __init__(
        self, names: Sequence[str], in_features: int, sizes: Sequence[int], sharding: Sharding, *, bias: bool = False
    ) -> None:
        spans = [Span(0, size, size) for size in sizes]
        held = sharding.fused_format(names, spans)
        # Each projection begins a block of the format. The rows between them are zero, and their outputs are not used.
        unit = row_unit(held) if isinstance(held, BlockFormat) else 1
        self._columns: list[slice] = []
        row = 0
        for size in sizes:
            row = -(-row // unit) * unit
            self._columns.append(slice(row, row + size))
            row += size
        super().__init__(row, in_features, held, sharding.dtype if bias else None)
        for name, span, columns in zip(names, spans, self._columns, strict=True):
            self.fill_rows(name, (span.size, in_features), span, columns.start)

    def __call__(self, x: Tensor) -> list[Tensor]:
        rows = self.project(x)
        return [rows[..., columns] for columns in self._columns]


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
    """A projection [heads * dim, in] cut by heads: x[..., in] -> [t, span.size, dim]. span: this rank's heads."""

    def __init__(self, name: str, in_features: int, heads: int, dim: int, sharding: Sharding, *, span: Span) -> None:
        self.span, self.dim = span, dim
        rows = span.scaled(dim)
        super().__init__(rows.size, in_features, sharding.format_of(name, rows=rows), None)
        self.fill_rows(name, (heads * dim, in_features), rows)

    def __call__(self, x: Tensor) -> Tensor:
        return split_heads(self.project(x), 0, self.span.size, self.dim)


class _TransposedHeads(ExpertsParameter):
    """A matrix [n, k] for every head, filled from k rows of n elements. Rows of the parameter count head by head."""

    def write(self, rows: Tensor, row: int) -> None:
        head, column = divmod(row, self.k)
        self.packed.write(rows.T, head, col=column)


class AbsorbedHeads(Layer):
    """The projection `name` [heads * (key_dim + value_dim), latent] of latents to keys and values, split by heads.

    Scores of q . (W_k c) are those of (q W_k) . c, so that few queries need no keys of the cached latents c:
    `keys` maps queries [t, heads, key_dim] to [t, heads, latent], and `values` maps sums of latents
    [t, heads, latent] to [t, heads, value_dim]. Held as floats. span: this rank's heads.
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
        held = Float(sharding.dtype)
        self._keys = _TransposedHeads(span.size, latent, key_dim, held)
        self._values = ExpertsParameter(span.size, value_dim, latent, held)
        shape, rows = (heads * (key_dim + value_dim), latent), key_dim + value_dim
        for local, head in enumerate(range(span.start, span.stop)):
            first, border = head * rows, head * rows + key_dim
            columns = slice(0, latent)
            self._keys.fill(f"{name}.weight", shape, slice(first, border), columns, row=local * key_dim)
            self._values.fill(
                f"{name}.weight", shape, slice(border, border + value_dim), columns, row=local * value_dim
            )
        if not span.real:  # the model uses the tensor all the same
            self._values.fill(f"{name}.weight", shape, slice(0, 0), slice(0, 0))

    def keys(self, q: Tensor) -> Tensor:
        return head_linear(q, self._keys.packed)

    def values(self, latent: Tensor) -> Tensor:
        return head_linear(latent, self._values.packed)
