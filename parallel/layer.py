"""What a sharded model is made of: layers that declare their weights, parameters that hold this rank's part of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import gcd, lcm, prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tilerank.kernels import core, ops
from tilerank.kernels.formats import Float, Format, Fp8, Int4
from tilerank.kernels.linear import Weight

from .errors import ShardError
from .shard import TILE, Cut, HeadCut, Strategy, cut_even_padded, cut_heads, cut_uneven

if TYPE_CHECKING:
    from .group import Group

PIECE_ELEMENTS = 1 << 24
"""A piece is cut into blocks of rows no larger than this, so that a loader never holds more than a block."""

_SAMPLE = 4096  # a matrix of so many rows and columns is in whole blocks of any format

HUGE_PAGE = 2 << 20
"""Bytes. Below, a vector shares the heap's pages; from here on, a table gets its own."""


def whole_tiles(n: int) -> int:
    return -(-n // TILE) * TILE


def row_unit(format: Format) -> int:
    """Rows that are written together, if not all: a tile, or what shares a scale."""
    return lcm(TILE, format.block_n) if isinstance(format, Fp8) else TILE


@dataclass(frozen=True)
class WeightFormats:
    """In which formats a model holds its weights: those of its projections, and its output head (or tied table).

    encoded: says of a module's name whether the checkpoint has its weight in that format already, in blocks of its own,
    which cuts then have to fit; what is not encoded is held as floats. None: the checkpoint has floats, which are
    quantised while they are written, in blocks that begin where a rank's part does.
    """

    projections: Format
    head: Format
    encoded: Callable[[str], bool] | None = None


@dataclass(frozen=True)
class Sharding:
    """Which part of a model this rank holds, how it is cut, and with whom it adds up.

    A model gets one and hands it to its layers without looking inside. `dtype` is that of activations, and of weights
    where `formats` (by default everywhere) has them as floats. `group` is None where nothing is computed (a plan).
    `cached_tokens` is the expected size of the cache in the cost rule of `cut_heads`, `kv_dtype` the dtype of what is
    cached (default: `dtype`).
    """

    rank: int
    size: int
    dtype: torch.dtype
    group: Group | None
    strategy: Strategy = "auto"
    cached_tokens: int = 0
    formats: WeightFormats | None = None
    kv_dtype: torch.dtype | None = None

    @property
    def cache_dtype(self) -> torch.dtype:
        return self.kv_dtype or self.dtype

    def format_of(self, name: str, *, row: int = 0, column: int = 0) -> Format:
        """The format of a projection of which this rank holds what begins at `row` and `column` of the checkpoint's.

        A scale of the checkpoint serves a block, at whose edges no part need begin: then blocks are held as much finer
        as it takes, their scales repeated. ShardError where that is too fine for the kernels.
        """
        if self.formats is None or (self.formats.encoded is not None and not self.formats.encoded(name)):
            return Float(self.dtype)
        return self.formats.projections if self.formats.encoded is None else self._fitted(name, row, column)

    def fused_format(self, names: Sequence[str], rows: Sequence[int]) -> Format:
        """The same for projections that are held as one, of which this rank's parts begin at `rows`."""
        if self.formats is not None and self.formats.encoded is not None:
            encoded = [self.formats.encoded(name) for name in names]
            if any(encoded) and not all(encoded):
                raise ShardError(
                    f"{names[encoded.index(True)]} is quantised and {names[encoded.index(False)]} is not, "
                    "expected the same of both: they are held as one"
                )
        return self.format_of(names[0], row=gcd(*rows))

    def head_format(self, name: str, *, row: int = 0) -> Format:
        """The same for the output head."""
        if self.formats is None:
            return Float(self.dtype)
        return self.formats.head if self.formats.encoded is None else self.format_of(name, row=row)

    def _fitted(self, name: str, row: int, column: int) -> Format:
        assert self.formats is not None
        stored = self.formats.projections
        if isinstance(stored, Int4):
            blocks = [gcd(stored.group, column)]
            fitted: Format = replace(stored, group=blocks[0])
        elif isinstance(stored, Fp8):
            blocks = [gcd(stored.block_n, row), gcd(stored.block_k, column)]
            fitted = replace(stored, block_n=blocks[0], block_k=blocks[1])
        else:
            return stored
        if any(block % TILE for block in blocks):
            raise ShardError(
                f"{name}: cannot be cut over {self.size} ranks: one's part begins at row {row}, column {column}, "
                f"which is no multiple of {TILE} in blocks of {stored}"
            )
        return fitted

    @property
    def _projections(self) -> Format:
        return Float(self.dtype) if self.formats is None else self.formats.projections

    def cut(self, total: int, unit: int = TILE) -> Cut:
        """A width or a vocabulary: uneven on tile edges, which no padding beats, unless padding was asked for."""
        return (cut_even_padded if self.strategy == "pad" else cut_uneven)(total, self.size, unit)

    def cut_width(self, name: str, width: int) -> Cut:
        """The width of the gated MLP (or experts) `name`, of which every rank must get a part, else ShardError.

        Its units are whole tiles and whole blocks: the width is the columns of one projection, and rows of another.
        """
        held = self._projections
        cut = self.cut(width, lcm(row_unit(held), held.k_unit))
        if cut.units < self.size:
            raise ShardError(
                f"{name}: a width of {width} is {cut.units} units of {cut.unit} columns, "
                f"so it can be cut over at most {cut.units} ranks, not {self.size}"
            )
        return cut

    def cut_heads(self, q_heads: int, kv_heads: int, head_dim: int, hidden: int) -> HeadCut:
        return cut_heads(
            q_heads,
            kv_heads,
            head_dim,
            hidden,
            self.size,
            strategy=self.strategy,
            cached_tokens=self.cached_tokens,
            bytes_per_weight=Fraction(self._projections.nbytes(_SAMPLE, _SAMPLE), _SAMPLE * _SAMPLE),
            bytes_per_kv=self.cache_dtype.itemsize,
        )

    def sum(self, x: Tensor) -> Tensor:
        """`x` added up over the ranks; may overwrite it."""
        return x if self.size == 1 else self._group.all_reduce(x)

    def add_rms_norm(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        *,
        zero_centered: bool = False,
        whole: bool = False,
    ) -> Tensor:
        """ops.add_rms_norm of the sum of `x` over the ranks (parallel/group.py: what becomes of `residual`)."""
        if self.size == 1:
            return ops.add_rms_norm(x, residual, weight, eps, zero_centered=zero_centered)
        return self._group.add_rms_norm(x, residual, weight, eps, zero_centered=zero_centered, whole=whole)

    def gather_columns(self, x: Tensor, starts: Tensor, n: int) -> Tensor:
        """[m, n] fp32: columns starts[r] to starts[r + 1] are the first ones of the `x` [m, w] of rank r."""
        return x[:, :n] if self.size == 1 else self._group.gather_columns(x, starts, n)

    @property
    def _group(self) -> Group:
        if self.group is None:
            raise RuntimeError("a model that was built for planning cannot compute: its Sharding has no group")
        return self.group


@dataclass(frozen=True)
class Piece:
    """One rectangle of a checkpoint tensor and where it lands.

    `shape` is that of the whole tensor in the checkpoint, for the loader to check; `index` one slice per dimension,
    empty where this rank holds nothing of the tensor (it is named all the same: the model does use it). `store` takes
    the tensor read with `index`, of any float dtype. `optional`: the checkpoint may lack it, zeros are meant then.

    `place`, where the weight is held in a quantised format: the weight, once it is allocated, and the first of its rows
    that the rectangle fills. A checkpoint that holds codes and scales in place of the tensor has them written there.
    """

    name: str
    shape: tuple[int, ...]
    index: tuple[slice, ...]
    store: Callable[[Tensor], None]
    optional: bool = False
    place: Callable[[], tuple[Weight, int]] | None = None

    @property
    def elements(self) -> int:
        return prod(part.stop - part.start for part in self.index)


class Layer:
    """A part of a model. Its own parts are its attributes: layers and lists of layers.

    Constructing one allocates nothing, so that a plan can build any model; `allocate()` makes the (zeroed) weights,
    `pieces()` tells a loader what to put there, `nbytes()` how much it will be.
    """

    def children(self) -> Iterator[Layer]:
        for value in vars(self).values():
            for item in value if isinstance(value, list) else (value,):
                if isinstance(item, Layer):
                    yield item

    def walk(self) -> Iterator[Layer]:
        """This layer and everything in it."""
        yield self
        for child in self.children():
            yield from child.walk()

    def pieces(self) -> Iterator[Piece]:
        for child in self.children():
            yield from child.pieces()

    def nbytes(self) -> int:
        return sum(child.nbytes() for child in self.children())

    def allocate(self) -> None:
        for child in self.children():
            child.allocate()


@dataclass(frozen=True)
class _Source:
    """A rectangle of a checkpoint tensor, and the first local row that it fills."""

    name: str
    shape: tuple[int, ...]
    index: tuple[slice, ...]
    row: int


class Parameter(Layer):
    """This rank's part of a weight, filled from rectangles of checkpoint tensors; what none fills stays zero."""

    block_rows = TILE
    """A rectangle is read in pieces of a multiple of so many rows."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self._sources: list[_Source] = []

    def fill(self, name: str, shape: tuple[int, ...], *index: slice, row: int = 0) -> None:
        """Rows from `row` on come from `index` of the checkpoint tensor `name` of shape `shape`."""
        self._sources.append(_Source(name, shape, index, row))

    def pieces(self) -> Iterator[Piece]:
        for source in self._sources:
            rows, *columns = source.index
            width = max(1, prod(part.stop - part.start for part in columns))
            # Whole tiles of rows at a time; at least one block, even of no rows.
            block = max(PIECE_ELEMENTS // width // self.block_rows, 1) * self.block_rows
            for start in range(rows.start, max(rows.stop, rows.start + 1), block):
                index = (slice(start, min(start + block, rows.stop)), *columns)
                row = source.row + start - rows.start
                yield Piece(source.name, source.shape, index, self._store_at(row), place=self._place_at(row))

    def _store_at(self, row: int) -> Callable[[Tensor], None]:
        def store(rows: Tensor) -> None:
            if rows.numel():
                self.write(rows, row)

        return store

    def _place_at(self, row: int) -> Callable[[], tuple[Weight, int]] | None:
        """`Piece.place`; None unless this is a weight in a quantised format."""
        return None

    def write(self, rows: Tensor, row: int) -> None:
        raise NotImplementedError


def whole_rows(rows: Tensor, weight: Weight) -> Tensor:
    """Rows of the weight's width, padded with zeros: what shares a scale is written together."""
    missing = weight.k - rows.shape[1]
    return torch.nn.functional.pad(rows, (0, missing)) if missing else rows


class WeightParameter(Parameter):
    """Matrices in a weight format."""

    def __init__(self, shape: tuple[int, ...], format: Format) -> None:
        super().__init__(shape)
        self.format = format
        self.block_rows = row_unit(format)

    def place(self, row: int) -> tuple[Weight, int]:
        """The weight that holds the row which pieces count as `row`, and which of its rows it is."""
        raise NotImplementedError

    def write(self, rows: Tensor, row: int) -> None:
        weight, row = self.place(row)
        weight.write(rows if isinstance(self.format, Float) else whole_rows(rows, weight), row)

    def _place_at(self, row: int) -> Callable[[], tuple[Weight, int]] | None:
        return None if isinstance(self.format, Float) else lambda: self.place(row)


class PackedParameter(WeightParameter):
    """A matrix [n, k] in the layout of the linear kernel. `packed` exists after `allocate()`, and only if n, k > 0."""

    packed: Weight

    def __init__(self, n: int, k: int, format: Format) -> None:
        super().__init__((n, k), format)
        self.n, self.k = n, k

    @property
    def is_empty(self) -> bool:
        return not (self.n and self.k)

    def nbytes(self) -> int:
        return 0 if self.is_empty else self.format.nbytes(self.n, self.k)

    def allocate(self) -> None:
        if not self.is_empty:
            self.packed = self.format.empty(self.n, self.k)

    def place(self, row: int) -> tuple[Weight, int]:
        return self.packed, row


class GatedParameter(PackedParameter):
    """Two matrices [width, k] on top of each other for `linear` with silu_mul: blocks of 32 rows of each in turn.

    Where kernels run in plain torch they lie one after the other.
    """

    def __init__(self, width: int, k: int, format: Format) -> None:
        super().__init__(2 * whole_tiles(width), k, format)
        self.width = width

    def part(self, part: int) -> Weight:
        """Gate (0) or up (1), [width, k]."""
        if self.packed.is_plain:
            return self.packed.part(part * self.n // 2, self.width)
        return self.packed.part(part * TILE, self.width, 2)

    def place(self, row: int) -> tuple[Weight, int]:
        part, row = divmod(row, self.width)
        return self.part(part), row


class PlainParameter(Parameter):
    """A vector, or a table whose rows are looked up, as a torch tensor. `data` exists after `allocate()`."""

    data: Tensor

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__(shape)
        self.dtype = dtype

    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def allocate(self) -> None:
        if self.nbytes() < HUGE_PAGE:
            self.data = torch.zeros(self.shape, dtype=self.dtype)
        else:
            self.data = core.alloc(self.nbytes(), resident=True).view(self.dtype).view(self.shape)

    def write(self, rows: Tensor, row: int) -> None:
        self.data[row : row + len(rows)] = rows


class GatedBias(PlainParameter):
    """Two vectors [width] in turns of 32, as `linear` with silu_mul adds them."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__((2 * whole_tiles(width),), dtype)
        self.width = width

    def part(self, part: int) -> Tensor:
        """That of gate (0) or up (1), [width], contiguous."""
        return self._turns()[:, part].flatten()[: self.width]

    def write(self, rows: Tensor, row: int) -> None:
        part, row = divmod(row, self.width)
        places = torch.arange(row, row + len(rows))
        self._turns()[places // TILE, part, places % TILE] = rows.to(self.dtype)

    def _turns(self) -> Tensor:
        return self.data.view(-1, 2, TILE)
