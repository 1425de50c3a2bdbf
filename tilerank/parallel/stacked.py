"""Several projections of one input, computed as one product for each weight format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import torch
from torch import Tensor

from tilerank.kernels.heads import columns_of, split_heads
from tilerank.kernels.weight_formats import Float, Format

from .cost import Cost, Work
from .linear import Linear
from .parameters import Layer
from .shard import Cut, HeadCut, Span
from .sharding import Sharding, first_rows


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


@dataclass(frozen=True)
class Projection:
    """The rows of projection `name` that this rank holds, one after the other, and in which format."""

    name: str
    rows: Sequence[Rows]
    format: Format

    @property
    def width(self) -> int:
        return sum(rows.span.size for rows in self.rows)


class StackedLinear(Layer):
    """Projections [.., in] of one input. Neighbours of one format are rows of one weight (`stacks`), and one product.

    bias: the dtype of the biases, if there are any. optional_bias: the checkpoint may lack them, which then are zero.
    """

    apart = False
    """Whether each projection is a product of its own."""

    def __init__(
        self,
        projections: Sequence[Projection],
        in_features: int,
        bias: torch.dtype | None = None,
        *,
        optional_bias: bool = False,
    ) -> None:
        self.stacks: list[Linear] = []
        self._columns: list[list[tuple[int, int]]] = []  # for each stack, the first and the number of a projection's
        for (held, _), group in groupby(projections, lambda one: (one.format, one.name if self.apart else "")):
            members = list(group)
            widths = [member.width for member in members]
            firsts = first_rows(held, widths)
            stack = Linear(firsts[-1] + widths[-1], in_features, held, bias)
            for member, row in zip(members, firsts, strict=True):
                for part in member.rows:
                    features = (part.total, in_features)
                    stack.fill_rows(member.name, features, part.span, row, part.first, optional_bias=optional_bias)
                    row += part.span.size
            self.stacks.append(stack)
            self._columns.append(list(zip(firsts, widths, strict=True)))

    def project(self, x: Tensor) -> list[Tensor]:
        """Return the outputs of each projection, x[t, in] -> [t, width], views of the results of the stacks."""
        columns = []
        for stack, places in zip(self.stacks, self._columns, strict=True):
            rows = stack.project(x)
            columns += [columns_of(rows, first, width) for first, width in places]
        return columns


class JoinedLinear(StackedLinear):
    """Several projections [size, in] of one input, whole on every rank.

    x[t, in] -> [t, size] for each projection, the same bits on every rank. names, sizes: of the projections.
    """

    def __init__(
        self,
        names: Sequence[str],
        in_features: int,
        sizes: Sequence[int],
        sharding: Sharding,
        *,
        bias: bool = False,
        optional_bias: bool = False,
    ) -> None:
        rows = [Rows(size, 0, Span(0, size, size)) for size in sizes]
        formats = sharding.stacked_formats(names, [part.stored for part in rows])
        held = [Projection(name, [part], format) for name, part, format in zip(names, rows, formats, strict=True)]
        super().__init__(held, in_features, sharding.dtype if bias else None, optional_bias=optional_bias)

    def __call__(self, x: Tensor) -> list[Tensor]:
        return self.project(x)


class QKVParallelLinear(StackedLinear):
    """The query, key and value projections of an attention layer, cut by heads.

    x[t, hidden] -> q[t, q_heads, head_dim], k and v [t, kv_heads, head_dim], with the local head counts `q_heads` and
    `kv_heads`. `kv_map` [kv_heads, 2] int32, an argument of the attention kernel: for each KV head the first query head
    that it serves, and how many. `q_columns` is this rank's span of the output projection's inputs. head_multiple: what
    head counts are padded to a multiple of, itself a multiple of the number of ranks (default: the number of ranks).
    `cost` includes the attention over these heads, their rotation and storing keys and values.

    projections: their names in the checkpoint, or one name if it stores them as one, the queries first. gated: a gate
    of the same size follows each head of the queries (Qwen3.5); then q is [t, q_heads, 2 * head_dim].
    held: the projections of this layer. "qk": its keys are its values as well. "q": it reads the keys and values of
    another layer, cut in the same way, and its k and v have no heads (Gemma 4).
    """

    def __init__(
        self,
        name: str,
        hidden: int,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        sharding: Sharding,
        *,
        bias: bool = False,
        optional_bias: bool = False,
        projections: Sequence[str] = ("q_proj", "k_proj", "v_proj"),
        head_multiple: int | None = None,
        gated: bool = False,
        held: Literal["qkv", "qk", "q"] = "qkv",
    ) -> None:
        self.heads = sharding.cut_heads(q_heads, kv_heads, head_dim, hidden, head_multiple)
        q, kv = self.heads.q[sharding.rank], self.heads.kv[sharding.rank]
        self.q_heads, self.kv_heads, self.head_dim = q.size, kv.size, head_dim
        self.q_columns = q.scaled(head_dim)
        self._activations = sharding.dtype
        self.kv_map = torch.tensor(self.heads.kv_map[sharding.rank], dtype=torch.int32)
        names = [f"{name}.{projection}" for projection in projections]
        dims = self._q_dim, _, _ = (2 * head_dim if gated else head_dim, head_dim, head_dim)
        sizes = [heads * dim for heads, dim in zip((q_heads, kv_heads, kv_heads), dims, strict=True)]
        parts = [span.scaled(dim) for span, dim in zip((q, kv, kv), dims, strict=True)]
        rows = [Rows(size, 0, part) for size, part in zip(sizes, parts, strict=True)]
        if len(names) == 1:
            names *= 3
            rows = [Rows(sum(sizes), sum(sizes[:i]), part) for i, part in enumerate(parts)]
        names, rows = names[: len(held)], rows[: len(held)]
        formats = sharding.stacked_formats(names, [part.stored for part in rows])
        if held != "q":
            formats[-1] = sharding.value_format(formats[-1])
        self._kv_columns = 0 if held == "q" else self.kv_heads * head_dim
        parts_held = [Projection(name, [part], format) for name, part, format in zip(names, rows, formats, strict=True)]
        super().__init__(parts_held, hidden, sharding.dtype if bias else None, optional_bias=optional_bias)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, *others = self.project(x)
        queries = split_heads(q, 0, self.q_heads, self._q_dim)
        if not others:
            none = split_heads(q, 0, 0, self.head_dim)
            return queries, none, none
        keys, values = (split_heads(part, 0, self.kv_heads, self.head_dim) for part in (others[0], others[-1]))
        return queries, keys, values

    def cost(self) -> Cost:
        heads, itemsize = self.q_heads * self.head_dim, self._activations.itemsize
        attention = {Float(self._activations).operands: 2 * 2 * heads}  # Q K^T and P V
        # The output gate reads itself and the heads, which it changes in place.
        gate = 3 * heads * itemsize if self._q_dim > self.head_dim else 0
        return self.cost_of_caching() + Cost(pair=Work(**attention), elementwise=gate)

    def cost_of_caching(self) -> Cost:
        # Queries and keys are normalised and rotated in place, keys and values are copied into the pages.
        columns = 2 * (self.q_heads * self.head_dim + self._kv_columns) + 2 * 2 * self._kv_columns
        return super().cost() + Cost(elementwise=columns * self._activations.itemsize)

    def cuts(self) -> Iterator[tuple[str, Cut]]:
        for name, spans in (("query heads", self.heads.q), ("KV heads", self.heads.kv)):
            yield name, Cut(max(span.stop for span in spans), 1, spans)

    def head_cuts(self) -> Iterator[HeadCut]:
        yield self.heads
