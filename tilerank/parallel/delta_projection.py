"""The input projections of a gated delta net (Yang et al., arXiv 2412.06464), cut over the ranks by key heads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, groupby

from torch import Tensor

from tilerank.kernels.heads import columns_of
from tilerank.kernels.weight_formats import BlockFormat, Float, Format

from .errors import ShardError
from .linear import Linear
from .parameters import Layer
from .shard import Cut, Span
from .sharding import Sharding, row_unit


@dataclass(frozen=True)
class DeltaHeads:
    """Heads of a gated delta net: value head j belongs to key head j / (value_heads / key_heads)."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def channels(self) -> int:
        """Columns of q, k and v together, which the convolution runs over."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True)
class Rows:
    """Rows of a tensor with `total` rows that this rank holds: those of `span`, counted from row `first`."""

    total: int
    first: int
    span: Span

    @property
    def stored(self) -> Span:
        """The same rows, counted from the beginning of the tensor."""
        return Span(self.first + self.span.start, self.first + self.span.stop, self.span.size)


class DeltaProjection(Layer):
    """The projections in_proj_qkv, in_proj_z, in_proj_b and in_proj_a, under their names in Qwen3.5.

    x[t, hidden] -> qkv [t, held.channels], z [t, held.value_heads * value_dim], b and a [t, held.value_heads], views of
    one tensor if the projections have one format. A key head and its value heads are on one rank, whose heads are
    `held`. Key heads are dealt out as evenly as possible, or padded with zero heads to equal parts if that is asked
    for; with fewer key heads than ranks the last ranks may have none. head_multiple: as in QKVParallelLinear. channels:
    the rows of this rank in a tensor with a row for each column of qkv, in the order of its columns. values: this
    rank's value heads.
    """

    def __init__(
        self, name: str, hidden: int, heads: DeltaHeads, sharding: Sharding, *, head_multiple: int | None = None
    ) -> None:
        self.cut = sharding.cut(heads.key_heads, (head_multiple or sharding.size) // sharding.size)
        keys = self.cut.spans[sharding.rank]
        self.values = values = keys.scaled(heads.value_heads // heads.key_heads)
        self.held = DeltaHeads(keys.size, values.size, heads.key_dim, heads.value_dim)
        keys_width, total = heads.key_heads * heads.key_dim, heads.channels
        key_rows, value_rows = keys.scaled(heads.key_dim), values.scaled(heads.value_dim)
        self.channels = [
            Rows(total, 0, key_rows),
            Rows(total, keys_width, key_rows),
            Rows(total, 2 * keys_width, value_rows),
        ]
        z = [Rows(heads.value_heads * heads.value_dim, 0, value_rows)]
        gates = [Rows(heads.value_heads, 0, values)]
        projections = [
            *(
                _projection(f"{name}.in_proj_{part}", rows, sharding)
                for part, rows in (("qkv", self.channels), ("z", z))
            ),
            *(_gate_projection(f"{name}.in_proj_{part}", gates, sharding) for part in ("b", "a")),
        ]
        stacks = [list(stack) for _, stack in groupby(projections, lambda projection: projection.format)]
        self.stacks = [_stacked(stack, hidden) for stack in stacks]
        self._widths = [[projection.width for projection in stack] for stack in stacks]

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        columns = []
        for stack, widths in zip(self.stacks, self._widths, strict=True):
            rows, first = stack.project(x), 0
            for width in widths:
                columns.append(columns_of(rows, first, width))
                first += width
        qkv, z, b, a = columns
        return qkv, z, b, a

    def cuts(self) -> Iterator[tuple[str, Cut]]:
        yield "delta net key heads", self.cut


@dataclass(frozen=True)
class _ProjectionRows:
    """The rows of a projection that this rank holds, one after the other, and in which format."""

    name: str
    rows: list[Rows]
    format: Format

    @property
    def width(self) -> int:
        return sum(rows.span.size for rows in self.rows)


def _projection(name: str, rows: list[Rows], sharding: Sharding) -> _ProjectionRows:
    """Choose blocks that have an edge wherever rows begin, in the checkpoint and in the stack, or end in the stack.

    Raises ShardError where the kernels have no blocks that small.
    """
    edges = list(accumulate(part.span.size for part in rows))
    held = sharding.fused_format([name], [*(part.stored for part in rows), *(Span(row, row + 1, 1) for row in edges)])
    unit = row_unit(held) if isinstance(held, BlockFormat) else 1
    if any(row % unit for row in edges):
        raise ShardError(
            f"{name}: cannot be held in {held}: expected heads that take a multiple of {unit} rows on a rank, "
            f"found {', '.join(str(part.span.size) for part in rows)} rows"
        )
    return _ProjectionRows(name, rows, held)


def _gate_projection(name: str, rows: list[Rows], sharding: Sharding) -> _ProjectionRows:
    """Return b or a: floats, unless the checkpoint has them quantised. They decide how fast a state decays.

    A rank may have fewer of their rows than a block; blocks are therefore dequantised.
    """
    formats = sharding.formats
    stored = None if formats is None or formats.encoded is None else formats.encoded(name)
    if stored is not None and not isinstance(stored, BlockFormat):
        return _ProjectionRows(name, rows, sharding.fused_format([name], [part.stored for part in rows]))
    return _ProjectionRows(name, rows, Float(sharding.dtype))


def _stacked(projections: list[_ProjectionRows], hidden: int) -> Linear:
    """Return a layer whose outputs are those of the projections, one after the other."""
    stack = Linear(sum(projection.width for projection in projections), hidden, projections[0].format, None)
    row = 0
    for projection in projections:
        for part in projection.rows:
            stack.fill_rows(projection.name, (part.total, hidden), part.span, row, part.first)
            row += part.span.size
    return stack
