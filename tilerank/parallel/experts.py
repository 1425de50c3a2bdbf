"""Mixture of experts, cut by the experts' width: every rank holds a part of every expert.

All ranks therefore have equal work whichever experts the tokens choose, and one sum over the ranks completes the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from typing import Literal

import torch
from torch import Tensor

from tilerank.kernels import ops
from tilerank.kernels.moe import ExpertActivation, moe
from tilerank.kernels.packed_experts import PackedExperts
from tilerank.kernels.weight_formats import Float, Format, Weight, are_expert_formats

from .cost import Cost, ExpertBytes, Products
from .parameters import FusedPlace, Layer, PlainParameter, Rectangle, WeightParameter, whole_tiles
from .shard import TILE, Cut
from .sharding import Sharding

FusedOrder = Literal["in_out", "out_in", "in_out_turns"]
"""The last two dimensions of a tensor of all experts, as a family publishes it: inputs of Qwen3-VL first, outputs of
Qwen3.5. The outputs of gate lie before those of up, or in turns with them (gpt-oss)."""


EXPERT_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class ExpertsParameter(WeightParameter):
    """`parts` matrices [n, k] of every expert. Rows of the parameter count expert by expert, part by part.

    `packed` exists after `allocate()`, and only if experts, n, k > 0.
    """

    packed: PackedExperts

    def __init__(self, experts: int, n: int, k: int, format: Format, *, parts: int = 1) -> None:
        super().__init__((experts * parts * n, k), format)
        self.experts, self.parts, self.n, self.k = experts, parts, n, k
        self._of_expert: Callable[[int], Iterator[Rectangle]] = lambda _: iter(())

    def fill_experts(self, of_expert: Callable[[int], Iterator[Rectangle]]) -> None:
        """Declare what fills one expert, given its number, which takes the same of the checkpoint for each of them.

        The rectangles are made when they are asked for, because a large model has tens of thousands.
        """
        self._of_expert = of_expert

    def filled_from(self) -> Iterator[Rectangle]:
        yield from super().filled_from()
        for expert in range(self.experts):
            yield from self._of_expert(expert)

    def samples(self) -> Iterator[Rectangle]:
        yield from super().samples()
        if self.experts:
            yield from self._of_expert(0)

    def tensors(self) -> Iterator[tuple[str, int]]:
        yield from super().tensors()
        for rectangle in self._of_expert(0):
            yield rectangle.name, self.experts * prod(rectangle.shape)

    @property
    def elements(self) -> int:
        each = sum(rectangle.elements for rectangle in self._of_expert(0))
        return sum(rectangle.elements for rectangle in super().filled_from()) + self.experts * each

    @property
    def is_empty(self) -> bool:
        return not (self.experts and self.n and self.k)

    def nbytes(self) -> int:
        if self.is_empty:
            return 0
        return PackedExperts.nbytes(self.experts, self.n, self.k, self.format, parts=self.parts)

    def allocate(self) -> None:
        if not self.is_empty:
            self.packed = PackedExperts.empty(self.experts, self.n, self.k, self.format, parts=self.parts)

    def place(self, row: int) -> tuple[Weight, int]:
        matrix, row = divmod(row, self.n)
        return self.packed.part(*divmod(matrix, self.parts)), row


class ExpertsBias(PlainParameter):
    """Biases of a projection of every expert, or of gate and up, as `moe` reads them: float32 [experts, whole tiles],
    32 of each part in turn. A checkpoint has one of each part in turn."""

    def __init__(self, experts: int, n: int, *, parts: int = 1) -> None:
        super().__init__((experts, parts * whole_tiles(n)), torch.float32)
        self.experts, self.n, self.parts = experts, n, parts

    def write(self, rows: Tensor, row: int) -> None:
        """rows: [r, biases], of the experts from `row` on; with a padded cut, zeros follow those of each part."""
        by_part = torch.unflatten(rows, 1, (-1, self.parts)).transpose(1, 2)
        by_part = torch.nn.functional.pad(by_part, (0, whole_tiles(self.n) - by_part.shape[2]))
        turns = torch.unflatten(by_part, 2, (-1, TILE)).transpose(1, 2)
        super().write(turns.flatten(1), row)


class ParallelExperts(Layer):
    """Gated MLPs [hidden -> width -> hidden], of which each token chooses `top_k`.

    x[t, hidden], ids and weights [t, top_k] of the router -> [t, hidden], this rank's part of the weighted sum over a
    token's experts; the parts of all ranks add up to that sum. `span` is this rank's part of the width. The checkpoint
    has one tensor for each projection: `name.EXPERT.gate_proj.weight`, up_proj and down_proj, or the three names of
    `projections`. fused: it may have those of all experts in one tensor (`_fused`). biases: it has those of all experts
    in `name.gate_up_proj_bias`, in turns, and `name.down_proj_bias`; the latter are added on rank 0. activation: of
    gate and up (`moe`). on_input: is called with x and ids (input_squares.py).

    Where the checkpoint stores the projections in formats that no kernel takes together, they are held as floats.
    """

    on_input: Callable[[Tensor, Tensor], None] | None = None

    def __init__(
        self,
        name: str,
        hidden: int,
        width: int,
        experts: int,
        sharding: Sharding,
        *,
        top_k: int,
        projections: tuple[str, str, str] = EXPERT_PROJECTIONS,
        fused: FusedOrder | None = None,
        biases: bool = False,
        activation: ExpertActivation = "silu_mul",
    ) -> None:
        self.activation: ExpertActivation = activation
        self.cut = sharding.cut_width(width, hidden)
        self.span = span = self.cut.spans[sharding.rank]
        self.share = top_k / experts
        self._hidden = hidden
        # The outputs of a token's experts in fp32, and their sum, which is then added to the residual.
        self._summed_bytes = hidden * (4 * top_k + sharding.dtype.itemsize) + sharding.added_bytes(hidden)
        *gate_and_up, last = projections
        held = [
            sharding.fused_format([f"{name}.0.{projection}" for projection in gate_and_up], [span, span]),
            sharding.format_of(f"{name}.0.{last}", columns=span, inputs=width),
        ]
        if not are_expert_formats(*held):
            held = [Float(sharding.dtype)] * 2
        self.gate_up = ExpertsParameter(experts, span.size, hidden, held[0], parts=2)
        self.down = ExpertsParameter(experts, hidden, span.size, held[1])
        taken, everything = slice(span.start, span.stop), slice(0, hidden)

        def gate_up(expert: int) -> Iterator[Rectangle]:
            for part, projection in enumerate(gate_and_up):
                yield Rectangle(
                    f"{name}.{expert}.{projection}.weight",
                    (width, hidden),
                    (taken, everything),
                    self.gate_up,
                    (2 * expert + part) * span.size,
                    places=_fused_gate_up(f"{name}.gate_up_proj", (experts, 2 * width, hidden), expert, part, fused),
                )

        def down(expert: int) -> Iterator[Rectangle]:
            yield Rectangle(
                f"{name}.{expert}.{last}.weight",
                (hidden, width),
                (everything, taken),
                self.down,
                expert * hidden,
                places=_fused(f"{name}.down_proj", (experts, hidden, width), (expert, 0, 0), fused),
            )

        self.gate_up.fill_experts(gate_up)
        self.down.fill_experts(down)
        self.gate_up_bias: ExpertsBias | None = None
        self.down_bias: ExpertsBias | None = None
        if biases:
            every = slice(0, experts)
            self.gate_up_bias = ExpertsBias(experts, span.size, parts=2)
            in_turns = slice(2 * span.start, 2 * span.stop)
            self.gate_up_bias.fill(f"{name}.gate_up_proj_bias", (experts, 2 * width), every, in_turns)
            outputs = hidden if sharding.rank == 0 else 0
            self.down_bias = ExpertsBias(experts, outputs)
            self.down_bias.fill(f"{name}.down_proj_bias", (experts, hidden), every, slice(0, outputs))

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        if self.gate_up.is_empty:
            return ops.repeat_row(None, x.shape[0], self._hidden, x.dtype)
        if self.on_input is not None:
            self.on_input(x, ids)
        down_bias = self.down_bias if self.down_bias is not None and self.down_bias.n else None
        return moe(
            x,
            self.gate_up.packed,
            self.down.packed,
            ids,
            weights,
            gate_up_bias=None if self.gate_up_bias is None else self.gate_up_bias.data,
            down_bias=None if down_bias is None else down_bias.data,
            activation=self.activation,
        )

    def cost(self) -> Cost:
        products = (self.gate_up.products() + self.down.products()) * self.share
        by_format = Products(self.gate_up.format.layout.format, 0, products, of_experts=True)
        experts = (ExpertBytes(self.nbytes(), self.share),)
        return Cost(experts=experts, token=products, products=(by_format,), elementwise=self._summed_bytes)

    def cuts(self) -> Iterator[tuple[str, Cut]]:
        yield "expert width", self.cut


def _fused_gate_up(
    name: str, shape: tuple[int, int, int], expert: int, part: int, order: FusedOrder | None
) -> tuple[FusedPlace, ...]:
    """Return the places of gate (part 0) or up (1) in a tensor of both; shape: in the order [experts, out, in]."""
    if order == "in_out_turns":
        return tuple(replace(place, step=2) for place in _fused(name, shape, (expert, part, 0), order))
    return _fused(name, shape, (expert, part * shape[1] // 2, 0), order)


def _fused(
    name: str, shape: tuple[int, int, int], origin: tuple[int, int, int], order: FusedOrder | None
) -> tuple[FusedPlace, ...]:
    """Return the places of a projection in a tensor of all experts.

    shape and origin: in the order [experts, out, in], which transformers 5 has in memory and writes for every family.
    The order that the family publishes comes first: it counts where `out` equals `in`.
    """
    if order is None:
        return ()
    experts, rows, columns = shape
    expert, row, column = origin
    straight = FusedPlace(name, shape, origin)
    transposed = FusedPlace(name, (experts, columns, rows), (expert, column, row), transposed=True)
    return (straight, transposed) if order == "out_in" else (transposed, straight)
