"""The experts of a mixture, cut by their width: every rank has a part of every expert.

Whatever tokens ask for, all ranks have the same work, and one sum over the ranks makes a layer whole.
"""

from __future__ import annotations

from torch import Tensor

from tilerank.kernels.formats import Format
from tilerank.kernels.linear import Weight
from tilerank.kernels.moe import PackedExperts, moe

from .layer import Layer, Sharding, WeightParameter


class ExpertsParameter(WeightParameter):
    """`parts` matrices [n, k] of every expert. Their rows are counted through: expert by expert, part by part.

    `packed` exists after `allocate()`.
    """

    packed: PackedExperts

    def __init__(self, experts: int, n: int, k: int, format: Format, *, parts: int = 1) -> None:
        super().__init__((experts * parts * n, k), format)
        self.experts, self.parts, self.n, self.k = experts, parts, n, k

    def nbytes(self) -> int:
        return PackedExperts.nbytes(self.experts, self.n, self.k, self.format, parts=self.parts)

    def allocate(self) -> None:
        self.packed = PackedExperts.empty(self.experts, self.n, self.k, self.format, parts=self.parts)

    def place(self, row: int) -> tuple[Weight, int]:
        matrix, row = divmod(row, self.n)
        return self.packed.part(*divmod(matrix, self.parts)), row


class ParallelExperts(Layer):
    """Gated MLPs [hidden -> width -> hidden], one checkpoint tensor a projection: `name.EXPERT.gate_proj.weight`, ...

    x[t, hidden], ids and weights [t, k] of the router -> [t, hidden], what this rank adds to the weighted sum over a
    token's experts. `span` is this rank's part of the width.
    """

    def __init__(self, name: str, hidden: int, width: int, experts: int, sharding: Sharding) -> None:
        self.cut = sharding.cut_width(name, width)
        self.span = span = self.cut.spans[sharding.rank]
        projections = ("gate_proj", "up_proj")
        held = sharding.fused_format([f"{name}.0.{projection}" for projection in projections], [span.start] * 2)
        self.gate_up = ExpertsParameter(experts, span.size, hidden, held, parts=2)
        down_name = f"{name}.0.down_proj"
        self.down = ExpertsParameter(experts, hidden, span.size, sharding.format_of(down_name, column=span.start))
        taken = slice(span.start, span.stop)
        everything = slice(0, hidden)
        for expert in range(experts):
            for part, projection in enumerate(projections):
                row = (2 * expert + part) * span.size
                self.gate_up.fill(f"{name}.{expert}.{projection}.weight", (width, hidden), taken, everything, row=row)
            row = expert * hidden
            self.down.fill(f"{name}.{expert}.down_proj.weight", (hidden, width), everything, taken, row=row)

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return moe(x, self.gate_up.packed, self.down.packed, ids, weights)
