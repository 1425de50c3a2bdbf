"""Linear layers cut over the ranks.

Each layer is built from *logical* shapes, those of the config and the checkpoint, and a `Sharding`. It declares which
rectangles of which checkpoint tensors this rank holds and computes this rank's part. Names are opaque prefixes of
checkpoint tensors. Projections are held in the format that the sharding gives, everything else in `sharding.dtype`,
whatever the checkpoint's dtype. A rank may hold nothing of a layer; it takes part in the collectives all the same.

Tensor parallelism has two patterns (Shoeybi et al., 2019, arXiv 1909.08053). Column parallel, named after the paper's
transposed notation: the rows of a weight are cut and every rank computes some of the outputs. Row parallel: the columns
are cut and every rank computes a partial sum of all outputs. Column then row needs one sum over the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tilerank.kernels import ops
from tilerank.kernels.heads import split_heads
from tilerank.kernels.linear import Activation, linear
from tilerank.kernels.weight_formats import Float, Format

from .cost import Cost, Work
from .parameters import GatedBias, GatedParameter, Layer, PackedParameter, PlainParameter
from .shard import Cut, HeadCut, Span
from .sharding import Sharding, first_rows


class Linear(Layer):
    """x @ weight.T + bias for this rank's rectangle of the weight; the base of the layers below.

    optional_bias, of the layers below: the checkpoint may lack the bias, which then is zero.
    """

    def __init__(self, n: int, k: int, format: Format, bias: torch.dtype | None) -> None:
        self.weight = PackedParameter(n, k, format)
        self.bias = None if bias is None else PlainParameter((n,), bias)

    def fill_rows(
        self,
        name: str,
        features: tuple[int, int],
        rows: Span,
        row: int = 0,
        first: int = 0,
        *,
        optional_bias: bool = False,
    ) -> None:
        """Declare that local rows from `row` on hold `rows` of the weight and bias of a projection [out, in].

        first: the row of the projection at which `rows` count from 0, if the projection is several in one.
        """
        taken = slice(first + rows.start, first + rows.stop)
        self.weight.fill(f"{name}.weight", features, taken, slice(0, features[1]), row=row)
        if self.bias is not None:
            self.bias.fill(f"{name}.bias", features[:1], taken, row=row, optional=optional_bias)

    def project(
        self, x: Tensor, *, activation: Activation | None = None, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return activation(x[..., k] @ weight.T + bias), [..., n]; zeros and the bias if the rank holds nothing."""
        bias = self.bias.data if self.bias is not None and self.bias.shape[0] else None
        if self.weight.is_empty:
            rows, n = x.shape[:-1], self.weight.n
            return ops.repeat_row(bias, rows.numel(), n, out_dtype or x.dtype).view(*rows, n)
        return linear(x, self.weight.packed, bias, activation=activation, out_dtype=out_dtype)


class ReplicatedLinear(Linear):
    """A projection [out, in] that is too small to be cut: x[..., in] -> [..., out], the same bits on every rank."""

    def __init__(
        self, name: str, in_features: int, out_features: int, sharding: Sharding, *, bias: bool = False
    ) -> None:
        super().__init__(out_features, in_features, Float(sharding.dtype), sharding.dtype if bias else None)
        self.fill_rows(name, (out_features, in_features), Span(0, out_features, out_features))

    def __call__(self, x: Tensor) -> Tensor:
        return self.project(x)


class ColumnParallelLinear(Linear):
    """A projection [out, in] whose outputs are cut over the ranks: x[..., in] -> [..., span.size].

    cut: how the outputs are cut (default: on tile edges). `span` is this rank's part of the outputs. activation: is
    applied to them.
    """

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        sharding: Sharding,
        *,
        cut: Cut | None = None,
        bias: bool = False,
        optional_bias: bool = False,
        activation: Activation | None = None,
    ) -> None:
        self.activation = activation
        self.cut = sharding.cut(out_features) if cut is None else cut
        self.span = self.cut.spans[sharding.rank]
        held = sharding.format_of(name, rows=self.span)
        super().__init__(self.span.size, in_features, held, sharding.dtype if bias else None)
        self.fill_rows(name, (out_features, in_features), self.span, optional_bias=optional_bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self.project(x, activation=self.activation)


class RowParallelLinear(Linear):
    """A projection [out, in] whose inputs are cut over the ranks: x[..., span.size] -> [..., out], this rank's part of
    a sum over the ranks.

    span: this rank's part of the inputs, as the layer before yields it: `qkv.q_columns`, `gate_up.span`. The bias is
    added once, on rank 0.
    """

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        sharding: Sharding,
        *,
        span: Span,
        bias: bool = False,
        optional_bias: bool = False,
    ) -> None:
        self.span = span
        super().__init__(out_features, span.size, sharding.format_of(name, columns=span, inputs=in_features), None)
        columns = slice(span.start, span.stop)
        self.weight.fill(f"{name}.weight", (out_features, in_features), slice(0, out_features), columns)
        if bias:
            held = out_features if sharding.rank == 0 else 0
            self.bias = PlainParameter((held,), sharding.dtype)
            self.bias.fill(f"{name}.bias", (out_features,), slice(0, held), optional=optional_bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self.project(x)

    def own_columns(self, x: Tensor) -> Tensor:
        """Return what this rank multiplies of inputs that every rank has whole: x[..., in] -> [..., span.size]."""
        columns = x[..., self.span.start : self.span.stop]
        return torch.nn.functional.pad(columns, (0, self.span.size - self.span.real)).contiguous()


class QKVParallelLinear(Linear):
    """The query, key and value projections of an attention layer, cut by heads and computed as one.

    x[t, hidden] -> q[t, q_heads, head_dim], k and v [t, kv_heads, head_dim], views of one tensor, with the local head
    counts `q_heads` and `kv_heads`. `kv_map` [kv_heads, 2] int32, an argument of the attention kernel: for each KV head
    the first query head that it serves, and how many. `q_columns` is this rank's span of the output projection's
    inputs. head_multiple: what head counts are padded to a multiple of, itself a multiple of the number of ranks
    (default: the number of ranks). `cost` includes the attention over these heads.

    projections: their names in the checkpoint, or one name if it stores them as one, the queries first. gated: a gate
    of the same size follows each head of the queries (Qwen3.5); then q is [t, q_heads, 2 * head_dim].
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
        held = sharding.fused_format(names, parts)
        rows = first_rows(held, [part.size for part in parts])
        _, self._first_k, self._first_v = rows
        super().__init__(self._first_v + parts[2].size, hidden, held, sharding.dtype if bias else None)
        if len(names) == 1:
            for first, part, row in zip((0, sizes[0], sizes[0] + sizes[1]), parts, rows, strict=True):
                self.fill_rows(names[0], (sum(sizes), hidden), part, row, first, optional_bias=optional_bias)
        else:
            for projection, size, part, row in zip(names, sizes, parts, rows, strict=True):
                self.fill_rows(projection, (size, hidden), part, row, optional_bias=optional_bias)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows = self.project(x)
        return (
            split_heads(rows, 0, self.q_heads, self._q_dim),
            split_heads(rows, self._first_k, self.kv_heads, self.head_dim),
            split_heads(rows, self._first_v, self.kv_heads, self.head_dim),
        )

    def cost(self) -> Cost:
        heads = self.q_heads * self.head_dim
        attention = {Float(self._activations).operands: 2 * 2 * heads}  # Q K^T and P V
        return super().cost() + Cost(pair=Work(**attention))

    def cost_of_caching(self) -> Cost:
        return super().cost()

    def cuts(self) -> Iterator[tuple[str, Cut]]:
        for name, spans in (("query heads", self.heads.q), ("KV heads", self.heads.kv)):
            yield name, Cut(max(span.stop for span in spans), 1, spans)

    def head_cuts(self) -> Iterator[HeadCut]:
        yield self.heads


class GateUpParallelLinear(Layer):
    """The gated half of an MLP in one kernel: silu(gate(x)) * up(x), x[..., hidden] -> [..., span.size].

    `span` is this rank's part of the width, and so of the down projection's inputs; it may be empty. dimension: the
    name of the width in plans.
    """

    def __init__(
        self,
        name: str,
        hidden: int,
        width: int,
        sharding: Sharding,
        *,
        bias: bool = False,
        optional_bias: bool = False,
        projections: Sequence[str] = ("gate_proj", "up_proj"),
        dimension: str = "MLP width",
    ) -> None:
        self._dimension = dimension
        self.cut = sharding.cut_width(width, hidden)
        self.span = self.cut.spans[sharding.rank]
        names = [f"{name}.{projection}" for projection in projections]
        held = sharding.fused_format(names, [self.span, self.span])
        self.weight = GatedParameter(self.span.size, hidden, held)
        self.bias = GatedBias(self.span.size, sharding.dtype) if bias else None
        taken = slice(self.span.start, self.span.stop)
        for part, projection in enumerate(names):
            row = part * self.span.size
            self.weight.fill(f"{projection}.weight", (width, hidden), taken, slice(0, hidden), row=row)
            if self.bias is not None:
                self.bias.fill(f"{projection}.bias", (width,), taken, row=row, optional=optional_bias)

    def __call__(self, x: Tensor) -> Tensor:
        if self.weight.is_empty:
            return x[..., :0]
        if self.weight.packed.is_plain:
            parts = [linear(x, self.weight.part(i), None if self.bias is None else self.bias.part(i)) for i in (0, 1)]
            return ops.silu_mul(torch.cat(parts, -1))
        bias = None if self.bias is None else self.bias.data
        gated = linear(x, self.weight.packed, bias, activation="silu_mul")
        return gated if gated.shape[-1] == self.span.size else gated[..., : self.span.size]

    def cuts(self) -> Iterator[tuple[str, Cut]]:
        yield self._dimension, self.cut
