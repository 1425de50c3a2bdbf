"""What a sharded model is made of: layers that declare their weights, parameters that hold this rank's part of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tilerank.kernels import core
from tilerank.kernels.linear import PackedWeight

from .errors import ShardError
from .shard import TILE, Cut, HeadCut, Strategy, cut_even_padded, cut_heads, cut_uneven

if TYPE_CHECKING:
    from .group import Group

PIECE_ELEMENTS = 1 << 24
"""A piece is cut into blocks of rows no larger than this, so that a loader never holds more than a block."""

HUGE_PAGE = 2 << 20
"""Bytes. Below, a vector shares the heap's pages; from here on, a table gets its own."""


@dataclass(frozen=True)
class Sharding:
    """Which part of a model this rank holds, how it is cut, and with whom it adds up.

    A model gets one and hands it to its layers without looking inside. `group` is None where nothing is computed (a
    plan). `cached_tokens` is the expected size of the cache in the cost rule of `cut_heads`.
    """

    rank: int
    size: int
    dtype: torch.dtype
    group: Group | None
    strategy: Strategy = "auto"
    cached_tokens: int = 0

    def cut(self, total: int, unit: int = TILE) -> Cut:
        """A width or a vocabulary: uneven on tile edges, which no padding beats, unless padding was asked for."""
        return (cut_even_padded if self.strategy == "pad" else cut_uneven)(total, self.size, unit)

    def cut_width(self, name: str, width: int) -> Cut:
        """The width of the gated MLP (or experts) `name`, of which every rank must get a part, else ShardError."""
        cut = self.cut(width)
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
            bytes_per_weight=self.dtype.itemsize,
            bytes_per_kv=self.dtype.itemsize,
        )

    def sum(self, x: Tensor) -> Tensor:
        """`x` added up over the ranks; may overwrite it."""
        return x if self.size == 1 else self._group.all_reduce(x)

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
    """

    name: str
    shape: tuple[int, ...]
    index: tuple[slice, ...]
    store: Callable[[Tensor], None]
    optional: bool = False

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

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape = shape
        self.dtype = dtype
        self._sources: list[_Source] = []

    def fill(self, name: str, shape: tuple[int, ...], *index: slice, row: int = 0) -> None:
        """Rows from `row` on come from `index` of the checkpoint tensor `name` of shape `shape`."""
        self._sources.append(_Source(name, shape, index, row))

    def pieces(self) -> Iterator[Piece]:
        for source in self._sources:
            rows, *columns = source.index
            width = max(1, prod(part.stop - part.start for part in columns))
            # Whole tiles of rows at a time; at least one block, even of no rows.
            block = max(PIECE_ELEMENTS // width // TILE, 1) * TILE
            for start in range(rows.start, max(rows.stop, rows.start + 1), block):
                index = (slice(start, min(start + block, rows.stop)), *columns)
                yield Piece(source.name, source.shape, index, self._store_at(source.row + start - rows.start))

    def _store_at(self, row: int) -> Callable[[Tensor], None]:
        def store(rows: Tensor) -> None:
            if rows.numel():
                self.write(rows, row)

        return store

    def write(self, rows: Tensor, row: int) -> None:
        raise NotImplementedError


class PackedParameter(Parameter):
    """A matrix [n, k] in the layout of the linear kernel. `packed` exists after `allocate()`, and only if n, k > 0."""

    packed: PackedWeight

    def __init__(self, n: int, k: int, dtype: torch.dtype) -> None:
        super().__init__((n, k), dtype)
        self.n, self.k = n, k

    @property
    def is_empty(self) -> bool:
        return not (self.n and self.k)

    def nbytes(self) -> int:
        return 0 if self.is_empty else PackedWeight.nbytes(self.n, self.k, self.dtype)

    def allocate(self) -> None:
        if not self.is_empty:
            self.packed = PackedWeight.empty(self.n, self.k, self.dtype)

    def write(self, rows: Tensor, row: int) -> None:
        self.packed.write(rows, row, 0)


class PlainParameter(Parameter):
    """A vector, or a table whose rows are looked up, as a torch tensor. `data` exists after `allocate()`."""

    data: Tensor

    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def allocate(self) -> None:
        if self.nbytes() < HUGE_PAGE:
            self.data = torch.zeros(self.shape, dtype=self.dtype)
        else:
            self.data = core.alloc(self.nbytes()).view(self.dtype).view(self.shape)

    def write(self, rows: Tensor, row: int) -> None:
        self.data[row : row + len(rows)] = rows
