"""Layers declare their weights; parameters hold this rank's part of each weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from tilerank.kernels import core
from tilerank.kernels.weight_formats import Float, Format, OutputScaledWeight, Weight

from .cost import Cost, Products, Work
from .shard import TILE, Cut, HeadCut
from .sharding import row_unit

BLOCK_ELEMENTS = 1 << 24
"""A rectangle is read in blocks of rows of at most this many elements, so that a loader holds no more at a time."""


@dataclass(frozen=True)
class FusedPlace:
    """A part of a stored tensor: where a checkpoint may keep a weight instead of in a tensor of the weight's own name.

    name, shape: of the stored tensor. origin: the index of the weight's first element, one number for each dimension.
    The weight's dimensions are the last ones of the tensor, and in those before it is one element. transposed: rows of
    the weight are columns of the tensor. step: from one row of the weight to the next, in a tensor whose rows belong to
    several weights in turn.
    """

    name: str
    shape: tuple[int, ...]
    origin: tuple[int, ...]
    transposed: bool = False
    step: int = 1

    def index(self, index: tuple[slice, ...]) -> tuple[slice, ...]:
        """Return where rectangle `index` of the weight lies in the stored tensor, with the rows between its own."""
        rows, *columns = index
        if self.step > 1 and rows.stop > rows.start:
            rows = slice(rows.start * self.step, (rows.stop - 1) * self.step + 1)
        index = (rows, *columns)
        ordered = index[::-1] if self.transposed else index
        before = len(self.origin) - len(ordered)
        return (
            *(slice(first, first + 1) for first in self.origin[:before]),
            *(slice(o + p.start, o + p.stop) for o, p in zip(self.origin[before:], ordered, strict=True)),
        )

    def extract(self, part: Tensor) -> Tensor:
        """Return the rectangle as the model declares it, from the part of the stored tensor that `index` gives."""
        matrix = part.view(part.shape[-2:]) if len(self.origin) > 2 else part
        matrix = matrix.T if self.transposed else matrix
        return matrix[:: self.step] if self.step > 1 else matrix


@dataclass(frozen=True)
class Rectangle:
    """Rectangle `index` of checkpoint tensor `name`, which fills rows of `parameter` from `row` on.

    shape: of the whole tensor in the checkpoint, for the loader to check. index: one slice for each dimension; empty
    where this rank holds nothing of the tensor, which the model uses all the same. optional: the checkpoint may lack
    the tensor, which then counts as zeros. places: where the weight may be stored if there is no tensor of this name.
    """

    name: str
    shape: tuple[int, ...]
    index: tuple[slice, ...]
    parameter: Parameter
    row: int = 0
    optional: bool = False
    places: tuple[FusedPlace, ...] = ()

    @property
    def elements(self) -> int:
        return prod(part.stop - part.start for part in self.index)

    def blocks(self, unit: int) -> Iterator[Rectangle]:
        """Cut into blocks of a multiple of `unit` rows and about BLOCK_ELEMENTS elements; an empty one stays whole, as
        a number does."""
        if not self.index:
            yield self
            return
        rows, *columns = self.index
        width = max(1, prod(part.stop - part.start for part in columns))
        height = max(BLOCK_ELEMENTS // width // unit, 1) * unit
        if rows.stop - rows.start <= height:
            yield self
            return
        for start in range(rows.start, max(rows.stop, rows.start + 1), height):
            index = (slice(start, min(start + height, rows.stop)), *columns)
            yield replace(self, index=index, row=self.row + start - rows.start)


class Layer:
    """A part of a model. Its attributes that are layers or lists of layers are its children.

    The constructor allocates nothing, so that any model can be planned; `allocate` gets memory for weights (core.alloc)
    and writes nothing into it, and `rectangles` lists what a loader has to read. A layer describes itself to plans,
    benchmarks and metrics: its bytes, its cost, how it is cut. By default each answer collects those of the children.
    """

    def children(self) -> Iterator[Layer]:
        for value in vars(self).values():
            for item in value if isinstance(value, list) else (value,):
                if isinstance(item, Layer):
                    yield item

    def walk(self) -> Iterator[Layer]:
        """Yield this layer and all layers inside it."""
        yield self
        for child in self.children():
            yield from child.walk()

    def allocate(self) -> None:
        for child in self.children():
            child.allocate()

    def rectangles(self) -> Iterator[Rectangle]:
        """Yield what this rank reads of the checkpoint, in blocks that fit into memory one at a time."""
        for child in self.children():
            yield from child.rectangles()

    def tensors(self) -> Iterator[tuple[str, int]]:
        """Yield the names of the checkpoint's tensors that this rank uses, with their elements. Several equal tensors
        of experts may be one, by the name of the first."""
        for child in self.children():
            yield from child.tensors()

    def parameters(self) -> int:
        """Return the number of weights of the whole model: the elements of all tensors that it uses, each once."""
        return sum(dict(self.tensors()).values())

    def nbytes(self) -> int:
        """Return the bytes that this rank holds, padding included."""
        return sum(child.nbytes() for child in self.children())

    def cost(self) -> Cost:
        """Return what a step reads and computes in this layer on this rank."""
        return Cost.total(child.cost() for child in self.children())

    def cost_of_caching(self) -> Cost:
        """Return the part of `cost` that remains for tokens whose output is not used, only their keys and values."""
        return Cost.total(child.cost_of_caching() for child in self.children())

    def cuts(self) -> Iterator[tuple[str, Cut]]:
        """Yield each cut dimension with its name, such as "MLP width"; the same one once for each layer that has it."""
        for child in self.children():
            yield from child.cuts()

    def head_cuts(self) -> Iterator[HeadCut]:
        """Yield how the heads of each attention layer are cut."""
        for child in self.children():
            yield from child.head_cuts()


class Parameter(Layer):
    """This rank's part of a weight, filled from rectangles of checkpoint tensors; the rest stays zero."""

    block_rows = TILE
    """Rectangles are read in blocks of a multiple of this many rows."""
    may_be_infinite = False
    """Whether infinities of the checkpoint are numbers like others, as in bounds."""
    holds_integers = False
    """Whether the numbers are int64 here and in the checkpoint, not floats."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self._filled_from: list[Rectangle] = []

    def fill(
        self,
        name: str,
        shape: tuple[int, ...],
        *index: slice,
        row: int = 0,
        optional: bool = False,
        places: tuple[FusedPlace, ...] = (),
    ) -> None:
        """Declare that rows from `row` on come from rectangle `index` of checkpoint tensor `name` of shape `shape`."""
        self._filled_from.append(Rectangle(name, shape, index, self, row, optional, places))

    def filled_from(self) -> Iterator[Rectangle]:
        """Yield the rectangles of the checkpoint that fill this parameter, each whole."""
        yield from self._filled_from

    def samples(self) -> Iterator[Rectangle]:
        """Yield the rectangles of `filled_from`, but of equal ones of experts only those of the first."""
        yield from self._filled_from

    def tensors(self) -> Iterator[tuple[str, int]]:
        for rectangle in self._filled_from:
            yield rectangle.name, prod(rectangle.shape)

    def rectangles(self) -> Iterator[Rectangle]:
        for rectangle in self.filled_from():
            yield from rectangle.blocks(self.block_rows)

    def cost(self) -> Cost:
        return Cost(read=self.nbytes())

    def preset(self) -> None:
        """Store what holds where the checkpoint has nothing, if that is not zero. Called before anything is written."""

    def write(self, rows: Tensor, row: int) -> None:
        """Store floats, one or more rows, from `row` on."""
        raise NotImplementedError

    @property
    def elements(self) -> int:
        """Elements that come from the checkpoint; padding does not count."""
        return sum(rectangle.elements for rectangle in self.filled_from())


class WeightParameter(Parameter):
    """One or more matrices [.., k] in a weight format.

    transposed: a rectangle's rows become columns of a matrix.
    """

    k: int
    transposed = False

    def __init__(self, shape: tuple[int, ...], format: Format) -> None:
        super().__init__(shape)
        self.format = format
        self.block_rows = row_unit(format)

    @property
    def is_quantised(self) -> bool:
        return not isinstance(self.format, Float)

    def place(self, row: int) -> tuple[Weight, int]:
        """Return the allocated weight that holds row `row` of this parameter, and the number of that row in it."""
        raise NotImplementedError

    def write(self, rows: Tensor, row: int) -> None:
        """Store rows [r, k] from `row` on. Their k elements may have several dimensions, as those of a convolution."""
        weight, row = self.place(row)
        weight.write(rows.flatten(1), row)

    def write_by_importance(self, rows: Tensor, row: int, importance: Tensor) -> None:
        """Store rows [r, k] from `row` on in a format that takes the importance [k] of columns."""
        weight, row = self.place(row)
        assert isinstance(weight, OutputScaledWeight)
        weight.write(rows, row, importance=importance)

    def cost(self) -> Cost:
        nbytes, products = self.nbytes(), self.products()
        return Cost(nbytes, token=products, products=(Products(self.format.layout.format, nbytes, products),))

    def products(self) -> Work:
        """Return the operations that multiply one token with all matrices."""
        return Work(**{self.format.operands: 2 * self.elements})


class PackedParameter(WeightParameter):
    """A matrix [n, k] in the layout of the linear kernel. `packed` exists after `allocate()`, and only if n, k > 0.

    on_input: is called with every x[.., k] that is multiplied with the matrix (input_squares.py).
    """

    packed: Weight
    on_input: Callable[[Tensor], None] | None = None

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

    def observe(self, x: Tensor) -> None:
        if self.on_input is not None:
            self.on_input(x)


class GatedParameter(PackedParameter):
    """Gate and up matrices [width, k] as one weight for `linear` with a gated activation: 32 rows of each in turn.

    Where kernels run in plain torch, gate lies above up. Rows of the parameter count gate first, then up.
    """

    def __init__(self, width: int, k: int, format: Format) -> None:
        super().__init__(2 * whole_tiles(width), k, format)
        self.width = width

    def part(self, part: int) -> Weight:
        """Return gate (0) or up (1), [width, k]."""
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
        self.data = core.alloc(self.nbytes(), resident=True).view(self.dtype).view(self.shape)

    def write(self, rows: Tensor, row: int) -> None:
        self.data[row : row + len(rows)] = rows


class WholeParameter(PlainParameter):
    """A stored tensor of any shape, whole on every rank."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__(shape, dtype)
        self.fill(name, shape, *(slice(0, size) for size in shape))


class NumberParameter(PlainParameter):
    """A stored number, which is a tensor without dimensions, as a vector of one element."""

    may_be_infinite = True

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        super().__init__((1,), dtype)
        self.fill(name, ())

    def write(self, rows: Tensor, row: int) -> None:
        super().write(rows.view(1), row)


class GatedBias(PlainParameter):
    """The biases [width] of gate and up as one vector for such a `linear`: 32 elements of each in turn."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__((2 * whole_tiles(width),), dtype)
        self.width = width

    def part(self, part: int) -> Tensor:
        """Return the bias of gate (0) or up (1), [width], contiguous."""
        return self._turns()[:, part].flatten()[: self.width]

    def write(self, rows: Tensor, row: int) -> None:
        part, row = divmod(row, self.width)
        places = torch.arange(row, row + len(rows))
        self._turns()[places // TILE, part, places % TILE] = rows.to(self.dtype)

    def _turns(self) -> Tensor:
        return self.data.view(-1, 2, TILE)


def whole_tiles(n: int) -> int:
    """Round up to whole tiles."""
    return -(-n // TILE) * TILE
