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

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from tilerank.kernels import ops
from tilerank.kernels.heads import columns_of, split_heads
from tilerank.kernels.linear import Activation, GatedActivation, linear
from tilerank.kernels.tower_ops import gelu
from tilerank.kernels.weight_formats import Float, Format

from .cost import Cost
from .parameters import GatedBias, GatedParameter, Layer, PackedParameter, PlainParameter
from .shard import Cut, Span
from .sharding import Sharding

GATE_UP = ("gate_proj", "up_proj")
"""The usual names of the projections to the gate and to what it gates."""
_GATED = {"silu_mul": ops.silu_mul, "gelu_tanh_mul": ops.gelu_tanh_mul}
"""The gated activations where kernels run in plain torch."""
_OF_GATE: dict[GatedActivation, Callable[[Tensor], Tensor]] = {
    "silu_mul": ops.silu,
    "gelu_tanh_mul": partial(gelu, tanh=True),
}
"""What gated activations do with the gate."""


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
        self.weight.observe(x)
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


class GatheredLinear(Linear):
    """A projection [out, in] whose outputs are cut over the ranks and gathered: x[t, in] -> [t, out] on every rank.

    inputs: those of the stored projection, if it has more; x are those from `first` on.
    """

    def __init__(
        self, name: str, in_features: int, out_features: int, sharding: Sharding, *, first: int = 0, inputs: int = 0
    ) -> None:
        self.cut = sharding.cut(out_features)
        span = self.cut.spans[sharding.rank]
        stored = inputs or in_features
        columns = Span(first, first + in_features, in_features)
        # All parts are as wide as the widest, so that they can be gathered.
        width = max(each.size for each in self.cut.spans)
        super().__init__(width, in_features, sharding.format_of(name, rows=span, columns=columns, inputs=stored), None)
        rows, taken = slice(span.start, span.stop), slice(columns.start, columns.stop)
        self.weight.fill(f"{name}.weight", (out_features, stored), rows, taken)
        self._starts = torch.tensor([each.start for each in self.cut.spans] + [out_features])
        self._own = torch.tensor([0, width])
        self._out_features = out_features
        self._sharding = sharding

    def __call__(self, x: Tensor) -> Tensor:
        part = self.project(x)
        if self._sharding.size == 1:
            return columns_of(part, 0, self._out_features)
        # The rows of a product may lie apart; a gather takes contiguous ones.
        close = ops.join_columns(split_heads(part, 0, 1, part.shape[1]).transpose(0, 1), self._own, part.shape[1])
        return ops.join_columns(self._sharding.gather(close), self._starts, self._out_features)


class ColumnParallelLinear(Linear):
    """A projection [out, in] whose outputs are cut over the ranks: x[..., in] -> [..., span.size].

    cut: how the outputs are cut (default: on tile edges). `span` is this rank's part of the outputs. activation: is
    applied to them. values: whether they are the values of attention.
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
        values: bool = False,
    ) -> None:
        self.activation = activation
        self.cut = sharding.cut(out_features) if cut is None else cut
        self.span = self.cut.spans[sharding.rank]
        held = sharding.format_of(name, rows=self.span, values=values)
        super().__init__(self.span.size, in_features, held, sharding.dtype if bias else None)
        self.fill_rows(name, (out_features, in_features), self.span, optional_bias=optional_bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self.project(x, activation=self.activation)


class RowParallelLinear(Linear):
    """A projection [out, in] whose inputs are cut over the ranks: x[..., span.size] -> [..., out], this rank's part of
    a sum over the ranks.

    span: this rank's part of the inputs, as the layer before yields it: `qkv.q_columns`, `gate_up.span`. The bias is
    added once, on rank 0. `cost` includes adding the sum to the residual.
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
        self._added_bytes = sharding.added_bytes(out_features)
        super().__init__(out_features, span.size, sharding.format_of(name, columns=span, inputs=in_features), None)
        columns = slice(span.start, span.stop)
        self.weight.fill(f"{name}.weight", (out_features, in_features), slice(0, out_features), columns)
        if bias:
            held = out_features if sharding.rank == 0 else 0
            self.bias = PlainParameter((held,), sharding.dtype)
            self.bias.fill(f"{name}.bias", (out_features,), slice(0, held), optional=optional_bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self.project(x)

    def cost(self) -> Cost:
        return super().cost() + Cost(elementwise=self._added_bytes)

    def own_columns(self, x: Tensor) -> Tensor:
        """Return what this rank multiplies of inputs that every rank has whole: x[..., in] -> [..., span.size]."""
        columns = x[..., self.span.start : self.span.stop]
        return torch.nn.functional.pad(columns, (0, self.span.size - self.span.real)).contiguous()


class GateUpParallelLinear(Layer):
    """The gated half of an MLP: silu(gate(x)) * up(x), x[..., hidden] -> [..., span.size].

    It is one kernel, unless the checkpoint stores gate and up in different formats: then both are `apart`. `span` is
    this rank's part of the width, and so of the down projection's inputs; it may be empty. projections: their names in
    the checkpoint, or one name if it stores them as one, the gate first. activation: in place of silu. dimension: the
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
        projections: Sequence[str] = GATE_UP,
        activation: GatedActivation = "silu_mul",
        dimension: str = "MLP width",
    ) -> None:
        self._activation = activation
        self._dimension = dimension
        self.cut = sharding.cut_width(width, hidden)
        self.span = self.cut.spans[sharding.rank]
        names = [f"{name}.{projection}" for projection in projections]
        parts, rows = [self.span, self.span], width
        if len(names) == 1:
            names *= 2
            parts[1] = Span(width + self.span.start, width + self.span.stop, self.span.size)
            rows = 2 * width
        formats = sharding.stacked_formats(names, parts)
        self.apart: list[ColumnParallelLinear] = []
        if formats[0] != formats[1]:
            self.apart = [
                ColumnParallelLinear(
                    each, hidden, width, sharding, cut=self.cut, bias=bias, optional_bias=optional_bias
                )
                for each in names
            ]
            return
        self.weight = GatedParameter(self.span.size, hidden, formats[0])
        self.bias = GatedBias(self.span.size, sharding.dtype) if bias else None
        for part, (projection, stored) in enumerate(zip(names, parts, strict=True)):
            row, taken = part * self.span.size, slice(stored.start, stored.stop)
            self.weight.fill(f"{projection}.weight", (rows, hidden), taken, slice(0, hidden), row=row)
            if self.bias is not None:
                self.bias.fill(f"{projection}.bias", (rows,), taken, row=row, optional=optional_bias)

    def __call__(self, x: Tensor) -> Tensor:
        if not self.span.size:
            return x[..., :0]
        if self.apart:
            gate, up = (part(x) for part in self.apart)
            gated = _OF_GATE[self._activation](gate)
            ops.mul_(gated, up)
            return gated
        self.weight.observe(x)
        if self.weight.packed.is_plain:
            parts = [linear(x, self.weight.part(i), None if self.bias is None else self.bias.part(i)) for i in (0, 1)]
            return _GATED[self._activation](torch.cat(parts, -1))
        bias = None if self.bias is None else self.bias.data
        gated = linear(x, self.weight.packed, bias, activation=self._activation)
        return gated if gated.shape[-1] == self.span.size else gated[..., : self.span.size]

    def cuts(self) -> Iterator[tuple[str, Cut]]:
        yield self._dimension, self.cut
