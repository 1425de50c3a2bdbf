"""The base of the towers of pictures and of sound: transformer blocks over the rows of a medium, computed in tasks.

    x += attention(norm(x));  x += mlp(norm(x))        per block; either sum may be scaled by the tanh of a number

An encode is a sequence of tasks: a few rows of one layer each, so that no task takes long, whatever the size of the
medium. The bits of a row do not depend on how the rows are cut.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tilerank.kernels import ops
from tilerank.kernels.attention import store_kv
from tilerank.kernels.heads import join_heads
from tilerank.kernels.kv_pages import KVPages
from tilerank.kernels.linear import Activation
from tilerank.kernels.packed_sequences import PackedSequences
from tilerank.kernels.tower_ops import tanh_gate_
from tilerank.parallel.linear import ColumnParallelLinear, RowParallelLinear
from tilerank.parallel.norm import LayerNorm, RMSNorm
from tilerank.parallel.parameters import Layer, WholeParameter
from tilerank.parallel.shard import Cut, HeadCut
from tilerank.parallel.sharding import Sharding
from tilerank.parallel.stacked import QKVParallelLinear

from ..padded_heads import attention_scale, head_multiple

ROW_UNIT = 32
"""Rows of the smallest task. Fewer would leave a tile of attention half empty."""
_FRESH = 700.0
"""Operations that take as long as the first write to a byte of memory."""

Grid = tuple[int, int, int]


def cut_rows(rows: int, cost: float, limit: float, unit: int = 1) -> Iterator[tuple[slice, float]]:
    """Cut rows that take `cost` operations each into about equal parts of at most `limit`, or of `unit` rows. Yields
    each part and its operations."""
    units = -(-rows // unit)
    parts = -(-units // max(int(min(limit / cost, units * unit)) // unit, 1))
    step = -(-units // parts) * unit
    for row in range(0, rows, step):
        part = slice(row, min(row + step, rows))
        yield part, cost * (part.stop - part.start)


def pieces(tasks: Iterator[float], operations: float) -> Iterator[None]:
    """Compute tasks that yield their operations before they are computed, and yield between pieces of them, of up to
    `operations` operations or one task."""
    piece = 0.0
    for cost in tasks:
        if piece and piece + cost > operations:
            yield None
            piece = 0.0
        piece += cost


def floats_alone(sharding: Sharding) -> Sharding:
    """Return the sharding of a tower: its weights are floats also where those of the decoder are quantised, and it
    caches nothing."""
    return replace(sharding, cached_tokens=0, formats=None, kv_dtype=None)


class RowLayout:
    """The t rows of a medium, as blocks need them: which of them attend to each other, and what rotates them.

    numbers: [t] int64, 0 to t. slots: [t] int64, where `store_kv` writes keys and values into `pages`. seen: how many
    rows a row attends to at most, for the cost.
    """

    numbers: Tensor
    slots: Tensor
    seen: int

    @abstractmethod
    def pages(self, kv_heads: int, head_dim: int, dtype: torch.dtype) -> KVPages:
        """Return uninitialised pages for the keys and values of all rows."""

    @abstractmethod
    def attend(self, q: Tensor, first: int, pages: KVPages, kv_map: Tensor, scale: float) -> Tensor:
        """Return the attention [n, heads, head_dim] of the n rows from `first` on; q: their queries, of this shape."""

    def rotate(self, q: Tensor, k: Tensor, rows: slice) -> None:
        """Rotate the queries and keys [n, heads, head_dim] of n rows in place. Without positions, nothing."""


class PackedLayout(RowLayout):
    """Rows of several sequences, such as the frames of a video; every row attends to all rows of its sequence."""

    def __init__(self, edges: Tensor, seen: int) -> None:
        """edges: [sequences + 1] int32, as cu_seqlens of `attention_varlen`."""
        self._sequences = PackedSequences(edges)
        self.numbers, self.slots, self.seen = torch.arange(self._sequences.rows), self._sequences.slots, seen

    def pages(self, kv_heads: int, head_dim: int, dtype: torch.dtype) -> KVPages:
        return self._sequences.pages(kv_heads, head_dim, dtype)

    def attend(self, q: Tensor, first: int, pages: KVPages, kv_map: Tensor, scale: float) -> Tensor:
        return self._sequences.attend(q, first, pages, kv_map, scale)


@dataclass(frozen=True)
class BlockNames:
    """The names of the parts of a block in a checkpoint, after that of the block.

    norms: before attention and before the MLP. qkv: the query, key and value projections, or one name if they are
    stored as one. mlp: the two projections of a plain MLP. gates: the numbers that scale attention and MLP; none in
    most towers.
    """

    norms: tuple[str, str]
    attention: str
    qkv: tuple[str, ...]
    out: str
    mlp: tuple[str, ...] = ()
    gates: tuple[str, ...] = ()


@dataclass(frozen=True)
class BlockShape:
    """The shape of a block.

    head_dim: of a head, before any padding of their number. width: of the MLP. bias: of all projections of attention.
    kind: begins the names of its cut dimensions in plans.
    """

    hidden: int
    heads: int
    head_dim: int
    width: int
    eps: float
    activation: Activation
    bias: bool
    kind: str


class TowerAttention(Layer):
    """Attention of rows to rows of the same medium, cut by heads."""

    qkv_type: type[QKVParallelLinear] = QKVParallelLinear
    out_type: type[RowParallelLinear] = RowParallelLinear

    def __init__(self, name: str, shape: BlockShape, names: BlockNames, sharding: Sharding) -> None:
        hidden, heads, bias = shape.hidden, shape.heads, shape.bias
        self.qkv = self.qkv_type(
            name,
            hidden,
            heads,
            heads,
            shape.head_dim,
            sharding,
            bias=bias,
            projections=names.qkv,
            head_multiple=head_multiple(shape.head_dim, sharding),
        )
        self.out = self.out_type(f"{name}.{names.out}", hidden, hidden, sharding, span=self.qkv.q_columns, bias=bias)
        self.scale = attention_scale(hidden, self.qkv.heads, heads)
        self._dtype = sharding.dtype
        self._dimension = f"{shape.kind} heads"

    def pages(self, layout: RowLayout) -> KVPages:
        """Return uninitialised pages for the keys and values of all rows."""
        return layout.pages(self.qkv.kv_heads, self.qkv.head_dim, self._dtype)

    def project(self, x: Tensor, rows: slice, layout: RowLayout, pages: KVPages) -> Tensor:
        """Return the queries [n, heads, head_dim] of n rows, and write their keys and values into `pages`.

        x: [n, hidden], the input of these rows.
        """
        q, k, v = self.qkv(x)
        layout.rotate(q, k, rows)
        store_kv(k, v, pages, layout.slots[rows])
        return q

    def attend(self, q: Tensor, first: int, layout: RowLayout, pages: KVPages) -> Tensor:
        """Return this rank's part of the output [n, hidden] for the queries of n rows from `first` on."""
        return self.out(join_heads(layout.attend(q, first, pages, self.qkv.kv_map, self.scale)))

    def cuts(self) -> Iterator[tuple[str, Cut]]:
        spans = self.qkv.heads.q
        yield self._dimension, Cut(max(span.stop for span in spans), 1, spans)

    def head_cuts(self) -> Iterator[HeadCut]:
        """Yield nothing: only heads of the decoder are asked for."""
        yield from ()


class TowerMLP(Layer):
    """fc2(gelu(fc1(x))), cut by its width: x[t, in] -> a part of [t, out]."""

    def __init__(
        self,
        names: tuple[str, str],
        sizes: tuple[int, int, int],
        activation: Activation,
        dimension: str,
        sharding: Sharding,
        *,
        bias: bool = True,
    ) -> None:
        """names: of fc1 and fc2. sizes: of the input, the width and the output. dimension: the name of the width in
        plans. bias: of both."""
        inputs, width, outputs = sizes
        self.up = ColumnParallelLinear(names[0], inputs, width, sharding, bias=bias, activation=activation)
        self.down = RowParallelLinear(names[1], width, outputs, sharding, span=self.up.span, bias=bias)
        self._dimension = dimension

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))

    def cuts(self) -> Iterator[tuple[str, Cut]]:
        yield self._dimension, self.up.cut


class ComputedBlock(Layer):
    """The computation of a block: attention and an MLP, each after a norm; the same bits on every rank.

    mlp: x[t, hidden] -> a part of [t, hidden]. projections: of the MLP.
    """

    def __init__(
        self,
        norms: list[LayerNorm] | list[RMSNorm],
        attention: TowerAttention,
        mlp: Callable[[Tensor], Tensor],
        shape: BlockShape,
        projections: int,
        sharding: Sharding,
    ) -> None:
        hidden = shape.hidden
        self.norms = norms
        self.attention, self.mlp = attention, mlp
        # The first block touches the memory of the queries, keys and values.
        self._projection_cost = 6 * hidden**2 + _FRESH * 3 * hidden * sharding.dtype.itemsize
        self._rest_cost = 2 * hidden**2 + 2 * projections * hidden * shape.width
        self._pair_cost = 4 * hidden
        self._sharding = sharding

    @abstractmethod
    def finish(self, which: int, added: Tensor) -> Tensor:
        """Return what is added to the rows, of the sum of every rank's output of attention (0) or the MLP (1)."""

    def tasks(self, x: Tensor, layout: RowLayout, limit: float) -> Iterator[float]:
        """Update x [t, hidden] in place. Each `next` first yields the operations of a task, at most `limit`, and the
        one after it computes the task."""
        pages = self.attention.pages(layout)
        queries = []
        for rows, cost in cut_rows(x.shape[0], self._projection_cost, limit, ROW_UNIT):
            yield cost
            queries.append((rows, self.attention.project(self.norms[0](x[rows]), rows, layout, pages)))
        row_cost = self._pair_cost * layout.seen + self._rest_cost
        for projected, q in queries:
            for part, cost in cut_rows(q.shape[0], row_cost, limit, ROW_UNIT):
                yield cost
                first = projected.start + part.start
                rows = slice(first, first + part.stop - part.start)
                self._add(x, layout.numbers[rows], 0, self.attention.attend(q[part], first, layout, pages))
                self._add(x, layout.numbers[rows], 1, self.mlp(self.norms[1](x[rows])))

    def _add(self, x: Tensor, numbers: Tensor, which: int, part: Tensor) -> None:
        ops.add_rows_(x, numbers, self.finish(which, self._sharding.sum(part)))


class TowerBlock(ComputedBlock):
    """A block with LayerNorms and a plain MLP, either of whose sums may be gated."""

    def __init__(self, name: str, shape: BlockShape, names: BlockNames, sharding: Sharding) -> None:
        hidden = shape.hidden
        up, down = (f"{name}.{projection}" for projection in names.mlp)
        sizes = (hidden, shape.width, hidden)
        super().__init__(
            [LayerNorm(f"{name}.{norm}", hidden, shape.eps, sharding) for norm in names.norms],
            TowerAttention(f"{name}.{names.attention}", shape, names, sharding),
            TowerMLP((up, down), sizes, shape.activation, f"{shape.kind} MLP width", sharding),
            shape,
            2,
            sharding,
        )
        self.gates = [WholeParameter(f"{name}.{gate}", (1,), sharding.dtype) for gate in names.gates]

    def finish(self, which: int, added: Tensor) -> Tensor:
        if self.gates:
            tanh_gate_(added, self.gates[which].data)
        return added
