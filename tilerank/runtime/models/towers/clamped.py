"""Projections that clamp their inputs and their outputs, as in the towers of Gemma 4 E2B and E4B.

    clamp(W clamp(x, input_min, input_max), output_min, output_max)

The bounds are numbers beside each projection in the checkpoint. The output of a projection whose inputs are cut over
the ranks is clamped after the sum over the ranks.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

from torch import Tensor

from tilerank.kernels import ops
from tilerank.kernels.tower_ops import clamp, gelu
from tilerank.parallel.linear import GATE_UP, ColumnParallelLinear, RowParallelLinear
from tilerank.parallel.parameters import Layer, NumberParameter
from tilerank.parallel.shard import Cut, Span
from tilerank.parallel.sharding import Sharding
from tilerank.parallel.stacked import QKVParallelLinear

from .tower import BlockShape

LINEAR = ".linear"
"""The checkpoint has the weight of a projection X as X.linear.weight, and its bounds as X.input_min and others."""


class Clamp(Layer):
    """min(max(x, low), high) with the bounds of the inputs or of the outputs of projection `name`."""

    def __init__(self, name: str, side: Literal["input", "output"], sharding: Sharding) -> None:
        stored = name.removesuffix(LINEAR)
        self.low = NumberParameter(f"{stored}.{side}_min", sharding.dtype)
        self.high = NumberParameter(f"{stored}.{side}_max", sharding.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return clamp(x, self.low.data, self.high.data)


class ClampedQKV(QKVParallelLinear):
    """Queries, keys and values, each a product of its own, because each clamps the input between its own bounds."""

    apart = True

    def __init__(
        self,
        name: str,
        hidden: int,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        sharding: Sharding,
        *,
        projections: Sequence[str],
        bias: bool = False,
        head_multiple: int | None = None,
    ) -> None:
        super().__init__(
            name,
            hidden,
            q_heads,
            kv_heads,
            head_dim,
            sharding,
            projections=projections,
            bias=bias,
            head_multiple=head_multiple,
        )
        names = [f"{name}.{projection}" for projection in projections]
        self.inputs = [Clamp(projection, "input", sharding) for projection in names]
        self.outputs = [Clamp(projection, "output", sharding) for projection in names]

    def project(self, x: Tensor) -> list[Tensor]:
        parts = zip(self.inputs, self.stacks, self.outputs, strict=True)
        return [after(stack.project(before(x))) for before, stack, after in parts]


class ClampedRowParallelLinear(RowParallelLinear):
    """A row parallel projection that clamps its inputs; the sum over the ranks is clamped by the caller."""

    def __init__(
        self, name: str, in_features: int, out_features: int, sharding: Sharding, *, span: Span, bias: bool = False
    ) -> None:
        super().__init__(name, in_features, out_features, sharding, span=span, bias=bias)
        self.input = Clamp(name, "input", sharding)

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(self.input(x))


class ClampedMLP(Layer):
    """down(gelu_tanh(gate(x)) * up(x)) of a block, cut by its width: x[t, hidden] -> a part of [t, hidden]."""

    def __init__(self, name: str, shape: BlockShape, sharding: Sharding) -> None:
        hidden, width = shape.hidden, shape.width
        names = [f"{name}.{projection}{LINEAR}" for projection in GATE_UP]
        self.gate_up = [ColumnParallelLinear(projection, hidden, width, sharding) for projection in names]
        self.inputs = [Clamp(projection, "input", sharding) for projection in names]
        self.outputs = [Clamp(projection, "output", sharding) for projection in names]
        span = self.gate_up[0].span
        self.down = ClampedRowParallelLinear(f"{name}.down_proj{LINEAR}", width, hidden, sharding, span=span)
        self._dimension = f"{shape.kind} MLP width"

    def __call__(self, x: Tensor) -> Tensor:
        parts = zip(self.inputs, self.gate_up, self.outputs, strict=True)
        gate, up = (after(project(before(x))) for before, project, after in parts)
        gated = gelu(gate, tanh=True)
        ops.mul_(gated, up)
        return self.down(gated)

    def cuts(self) -> Iterator[tuple[str, Cut]]:
        yield self._dimension, self.gate_up[0].cut
