"""The part of a model that one rank holds: how dimensions are cut, in which formats, and which ranks sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from itertools import groupby
from math import gcd, lcm
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from tilerank.kernels import ops
from tilerank.kernels.weight_formats import BlockFormat, Float, Format, Gguf, OutputScaledFormat

from .errors import ShardError
from .shard import TILE, Cut, HeadCut, Span, Strategy, cut_even_padded, cut_heads, cut_uneven

if TYPE_CHECKING:
    from .group import Group

KVSplit = Literal["auto", "on", "off"]

_SAMPLE = 4096  # rows and columns of a matrix that is whole blocks in any format


def row_unit(format: Format) -> int:
    """Return the number of rows that are written together: a tile, or whole blocks that share a scale."""
    return lcm(TILE, format.block_n) if isinstance(format, BlockFormat) else TILE


def first_rows(format: Format, sizes: Sequence[int]) -> list[int]:
    """Return the row at which each of several parts of these sizes begins in a weight that stacks them.

    Each part begins a block of the format. Rows between the parts are zero, and their outputs are not used.
    """
    unit = row_unit(format) if isinstance(format, BlockFormat) else 1
    firsts, end = [], 0
    for size in sizes:
        firsts.append(-(-end // unit) * unit)
        end = firsts[-1] + size
    return firsts


@dataclass(frozen=True)
class WeightFormats:
    """The formats in which a model holds its weights.

    projections: linear layers and experts. head: the output head, or the table if it is tied. values: projections to
    the values of attention (None: as other projections).
    encoded: returns the format in which the checkpoint stores the weight of a module, given its name, in blocks of its
    own that cuts have to fit; None: as floats. `projections` is that of most modules then. No such function: the
    checkpoint stores floats, which are quantised during loading, in blocks that begin where a rank's part begins.
    """

    projections: Format
    head: Format
    encoded: Callable[[str], Format | None] | None = None
    values: Format | None = None


@dataclass(frozen=True)
class Sharding:
    """Which part of a model this rank holds, how the model is cut, and the group that adds up partial sums.

    A model receives one and hands it to its layers unread. dtype: of activations, and of weights that `formats` (None:
    all of them) leaves as floats. group: None for a plan, which computes nothing. cached_tokens: expected number of
    tokens in the KV cache, for the cost rules. kv_dtype: of cached keys and values (default: `dtype`). kv_split:
    whether ranks that all hold the whole cache read a part of a context each, for the heads of all (auto: if it pays).
    state_drafts: the most drafts of a sequence in a step of a model with states.
    """

    rank: int
    size: int
    dtype: torch.dtype
    group: Group | None
    strategy: Strategy = "auto"
    cached_tokens: int = 0
    formats: WeightFormats | None = None
    kv_dtype: torch.dtype | None = None
    kv_split: KVSplit = "auto"
    state_drafts: int = 0

    @property
    def cache_dtype(self) -> torch.dtype:
        return self.kv_dtype or self.dtype

    def format_of(
        self,
        name: str,
        *,
        rows: Span | None = None,
        columns: Span | None = None,
        inputs: int = 0,
        values: bool = False,
    ) -> Format:
        """Return the format in which this rank holds `rows` and `columns` (None: all) of projection `name`.

        values: whether it yields values of attention.
        A part need not begin at the edge of a block of a quantised checkpoint, or end there if columns of the
        projection's `inputs` follow. It is then held in smaller blocks, with the checkpoint's scales repeated. Raises
        ShardError where the kernels have no blocks that small.
        """
        held = self._format_from(name, _first(rows), columns, inputs)
        return self.value_format(held) if values else held

    def fused_format(self, names: Sequence[str], rows: Sequence[Span]) -> Format:
        """Return the format of a weight that stacks `rows` of several projections, one span for each.

        Projections that the checkpoint stores in different formats are held as floats together.
        """
        encoded = None if self.formats is None else self.formats.encoded
        if encoded is not None and len({encoded(name) for name in names}) > 1:
            return Float(self.dtype)
        return self._format_from(names[0], gcd(*(_first(span) for span in rows)))

    def stacked_formats(self, names: Sequence[str], rows: Sequence[Span]) -> list[Format]:
        """Return the format of each of several projections of one input, one span of rows for each.

        Neighbours that the checkpoint stores in one format have one here, with an edge of a block where any begins.
        """
        encoded = None if self.formats is None else self.formats.encoded
        formats = list[Format]()
        parts = zip(names, rows, strict=True)
        for _, group in groupby(parts, lambda part: None if encoded is None else encoded(part[0])):
            members = list(group)
            held = self.fused_format([name for name, _ in members], [span for _, span in members])
            formats += [held] * len(members)
        return formats

    def value_format(self, held: Format) -> Format:
        """Return the format of a projection to values, where `held` is that of other projections."""
        return held if self.formats is None or self.formats.values is None else self.formats.values

    def table_format(self, name: str) -> Gguf | None:
        """Return the format in which this rank holds rows of the embedding table `name`; None: as floats."""
        encoded = None if self.formats is None else self.formats.encoded
        stored = None if encoded is None else encoded(name)
        return stored if isinstance(stored, Gguf) else None

    def head_format(self, name: str, rows: Span) -> Format:
        """Return the format in which this rank holds `rows` of the output head `name`."""
        if self.formats is None:
            return Float(self.dtype)
        return self.formats.head if self.formats.encoded is None else self.format_of(name, rows=rows)

    def _format_from(self, name: str, row: int, columns: Span | None = None, inputs: int = 0) -> Format:
        if self.formats is None:
            return Float(self.dtype)
        if self.formats.encoded is None:
            return self.formats.projections
        stored = self.formats.encoded(name)
        return Float(self.dtype) if stored is None else self._fitted(stored, name, row, columns, inputs)

    def _fitted(self, stored: Format, name: str, row: int, columns: Span | None, inputs: int) -> Format:
        fitted, blocks = fit_blocks(stored, row, columns, inputs)
        tile = stored.tile_inputs if isinstance(stored, OutputScaledFormat) else TILE
        if any(block % tile for block in blocks):
            raise ShardError(
                f"{name}: cannot be cut over {self.size} ranks: the part of rank {self.rank} begins at row {row}, "
                f"column {_first(columns)}, expected a multiple of {tile} within the blocks of {stored}"
            )
        return fitted

    @property
    def _projections(self) -> Format:
        return Float(self.dtype) if self.formats is None else self.formats.projections

    def cut(self, total: int, unit: int = TILE) -> Cut:
        """Cut a vocabulary or a tower's width: unevenly on tile edges, or padded to equal parts if asked for."""
        return (cut_even_padded if self.strategy == "pad" else cut_uneven)(total, self.size, unit)

    def cut_width(self, width: int, hidden: int) -> Cut:
        """Cut the width of a gated MLP or of experts so that the slowest rank reads the fewest bytes.

        The width is the rows of two projections of `hidden` columns, and the columns of one of `hidden` rows. It is cut
        in units of whole tiles and whole blocks of the weights' format, or in smaller ones where that pays: parts of
        the blocks of a quantised checkpoint are held as smaller blocks, with more scales, and int8 has no blocks. With
        fewer units than ranks the last ranks get nothing.
        """
        is_stored = self.formats is not None and self.formats.encoded is not None
        return _cut_width(self._projections, is_stored, self.strategy, width, hidden, self.size)

    def cut_heads(
        self, q_heads: int, kv_heads: int, head_dim: int, hidden: int, head_multiple: int | None = None
    ) -> HeadCut:
        """Cut attention heads by the cost rule of `shard.cut_heads`, with the formats that this rank holds."""
        return cut_heads(
            q_heads,
            kv_heads,
            head_dim,
            hidden,
            self.size,
            strategy=self.strategy,
            cached_tokens=self.cached_tokens,
            head_multiple=head_multiple,
            bytes_per_weight=Fraction(self._projections.nbytes(_SAMPLE, _SAMPLE), _SAMPLE * _SAMPLE),
            bytes_per_kv=self.cache_dtype.itemsize,
        )

    def head_block(self, head_dim: int) -> tuple[int, int] | None:
        """Return rows and columns of the blocks in which heads of this size are held; None if no rows share a scale.

        A block of a checkpoint that spans heads is held as smaller ones, each with its scale (`format_of`).
        """
        held = self._projections
        return (gcd(held.block_n, head_dim), held.block_k) if isinstance(held, BlockFormat) else None

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over the ranks; may overwrite `x`."""
        return x if self.size == 1 else self._group.all_reduce(x)

    def add_rms_norm(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        *,
        post_weight: Tensor | None = None,
        scale: Tensor | None = None,
        zero_centered: bool = False,
        whole: bool = False,
        summed: bool = False,
    ) -> Tensor:
        """Apply ops.add_rms_norm to the sum of `x` over the ranks; group.py describes which rows of `residual` are
        updated on this rank. summed: `x` is this sum already; then all rows are updated."""
        if self.size == 1 or summed:
            return ops.add_rms_norm(
                x, residual, weight, eps, post_weight=post_weight, scale=scale, zero_centered=zero_centered
            )
        return self._group.add_rms_norm(
            x, residual, weight, eps, post_weight=post_weight, scale=scale, zero_centered=zero_centered, whole=whole
        )

    def added_bytes(self, columns: int) -> float:
        """Return the bytes that `add_rms_norm` reads and writes for each row on this rank, which has a share of them:
        the part, the residual twice and the norm."""
        return 4 * columns * self.dtype.itemsize / self.size

    def gather_columns(self, x: Tensor, starts: Tensor, n: int) -> Tensor:
        """Return [m, n] fp32 whose columns starts[r] to starts[r + 1] are the first columns of x[m, w] of rank r."""
        return x[:, :n] if self.size == 1 else self._group.gather_columns(x, starts, n)

    def gather(self, x: Tensor) -> Tensor:
        """Return [size, *x.shape], the contiguous `x` of every rank."""
        return self._group.all_gather(x)

    @property
    def _group(self) -> Group:
        if self.group is None:
            raise RuntimeError("a model that was built for planning cannot compute: its Sharding has no group")
        return self.group


def fit_blocks(stored: Format, row: int, columns: Span | None = None, inputs: int = 0) -> tuple[Format, Sequence[int]]:
    """Return `stored` with the largest blocks for a part, and the sizes of the blocks or of the pieces of them.

    The part begins at `row` and has `columns` (None: all) of `inputs`. Blocks have edges where it begins and ends.
    Those of a GGUF file stay whole: the part has a piece of them.
    """
    column = _edge(columns, inputs)
    if isinstance(stored, OutputScaledFormat) and stored.group:
        group = gcd(stored.group, column)
        return replace(stored, group=group), [group]
    if isinstance(stored, BlockFormat):
        blocks = gcd(stored.block_n, row), gcd(stored.block_k, column)
        return replace(stored, block_n=blocks[0], block_k=blocks[1]), blocks
    if isinstance(stored, Gguf):
        first = _first(columns) % stored.block
        return replace(stored, first=first), [gcd(stored.block, column)]
    return stored, []


@cache
def _cut_width(stored: Format, is_stored: bool, strategy: Strategy, width: int, hidden: int, ranks: int) -> Cut:
    """Return the cut of `Sharding.cut_width`. is_stored: the checkpoint is quantised in this format already."""
    unit = lcm(row_unit(stored), stored.k_unit)
    units = [unit]
    # Blocks that are quantised while loading would not be those of other numbers of ranks, if ranks cut them.
    while (is_stored or not isinstance(stored, OutputScaledFormat | BlockFormat)) and units[-1] % (2 * TILE) == 0:
        units.append(units[-1] // 2)

    def nbytes(span: Span) -> int:
        if not span.size:
            return 0
        rows, _ = fit_blocks(stored, span.start) if is_stored else (stored, [])
        columns, _ = fit_blocks(stored, 0, span, width) if is_stored else (stored, [])
        return rows.nbytes(2 * -(-span.size // TILE) * TILE, hidden) + columns.nbytes(hidden, span.size)

    cut = cut_even_padded if strategy == "pad" else cut_uneven
    cuts = [cut(width, ranks, unit) for unit in units]
    return min(cuts, key=lambda found: max(map(nbytes, found.spans)))  # the first of equal ones, with the largest unit


def _edge(part: Span | None, total: int) -> int:
    """Return a number whose divisors divide the first item of a rank's part, and its end if items of `total` follow."""
    return 0 if part is None or not part.real else gcd(part.start, part.stop if part.stop < total else 0)


def _first(part: Span | None) -> int:
    """Return the first item of a rank's part; 0 for a part without items, which fits any block."""
    return 0 if part is None or not part.real else part.start
