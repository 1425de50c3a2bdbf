"""The input projections of a gated delta net (Yang et al., arXiv 2412.06464), cut over the ranks by key heads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from tilerank.kernels.weight_formats import BlockFormat, Float

from .errors import ShardError
from .shard import Cut, Span
from .sharding import Sharding, row_unit
from .stacked import Projection, Rows, StackedLinear

_GATES = ("b", "a", "ba")


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


class DeltaProjection(StackedLinear):
    """The projections in_proj_qkv, in_proj_z, in_proj_b and in_proj_a, under their names in Qwen3.5.

    x[t, hidden] -> qkv [t, held.channels], z [t, held.value_heads * value_dim], b and a [t, held.value_heads], views of
    one tensor if the projections have one format. A key head and its value heads are on one rank, whose heads are
    `held`. Key heads are dealt out as evenly as possible, or padded with zero heads to equal parts if that is asked
    for; with fewer key heads than ranks the last ranks may have none. head_multiple: as in QKVParallelLinear. channels:
    the rows of this rank in a tensor with a row for each column of qkv, in the order of its columns. values: this
    rank's value heads. grouped: of the projections in_proj_qkvz and in_proj_ba of Qwen3-Next, whose rows are grouped by
    key heads, those that the checkpoint has instead ("qkvz", "ba").
    """

    def __init__(
        self,
        name: str,
        hidden: int,
        heads: DeltaHeads,
        sharding: Sharding,
        *,
        head_multiple: int | None = None,
        grouped: tuple[str, ...] = (),
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
        parts = dict[str, Sequence[list[Rows]]]()
        r = heads.value_heads // heads.key_heads
        if "qkvz" in grouped:
            q, k, v, z = _grouped_rows(
                self.cut, sharding.rank, (heads.key_dim, heads.key_dim, r * heads.value_dim, r * heads.value_dim)
            )
            parts["qkvz"] = [*q, *k, *v], z
        else:
            z = [Rows(heads.value_heads * heads.value_dim, 0, value_rows)]
            parts |= {"qkv": (self.channels,), "z": (z,)}
        if "ba" in grouped:
            b, a = _grouped_rows(self.cut, sharding.rank, (r, r))
            parts["ba"] = b, a
        else:
            gates = [Rows(heads.value_heads, 0, values)]
            parts |= {"b": (gates,), "a": (gates,)}
        projections = [
            (_gate_projection if part in _GATES else _projection)(f"{name}.in_proj_{part}", rows, sharding)
            for part, several in parts.items()
            for rows in several
        ]
        super().__init__(projections, hidden)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        qkv, z, b, a = self.project(x)
        return qkv, z, b, a

    def cuts(self) -> Iterator[tuple[str, Cut]]:
        yield "delta net key heads", self.cut


def _grouped_rows(cut: Cut, rank: int, sizes: Sequence[int]) -> list[list[Rows]]:
    """Return the rows of each part of a tensor that has, for each key head, rows of all parts, `sizes` of them.

    cut: of the key heads over the ranks. The last of the rows of a part are those of padded heads, maybe none.
    """
    group = sum(sizes)
    total, keys, parts, first = cut.total * group, cut.spans[rank], list[list[Rows]](), 0
    for size in sizes:
        begins = [head * group + first for head in range(keys.start, keys.stop)]
        rows = [Rows(total, 0, Span(begin, begin + size, size)) for begin in begins]
        padding = Rows(total, 0, Span(total, total, (keys.size - keys.real) * size))
        parts.append([*rows, padding])
        first += size
    return parts


def _projection(name: str, rows: list[Rows], sharding: Sharding) -> Projection:
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
    return Projection(name, rows, held)


def _gate_projection(name: str, rows: list[Rows], sharding: Sharding) -> Projection:
    """Return b or a: floats, unless the checkpoint has them quantised. They decide how fast a state decays.

    A rank may have fewer of their rows than a block; blocks are therefore dequantised.
    """
    formats = sharding.formats
    stored = None if formats is None or formats.encoded is None else formats.encoded(name)
    if stored is not None and not isinstance(stored, BlockFormat):
        return Projection(name, rows, sharding.fused_format([name], [part.stored for part in rows]))
    return Projection(name, rows, Float(sharding.dtype))
