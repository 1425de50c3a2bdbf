"""The mean squares of the inputs of projections, by which quantising weighs errors (loader/calibration.py)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from tilerank.kernels import ops
from tilerank.kernels.linear import linear
from tilerank.kernels.packed_experts import PackedExperts

from .experts import ExpertsParameter, ParallelExperts
from .group import Group
from .parameters import Layer, PackedParameter, Rectangle, whole_tiles


class InputSquares:
    """Sums the squares of each input of the projections of `model` from now on, column by column, in fp64.

    The model must run step by step, not as a recorded graph. An expert counts the tokens that chose it; the inputs of
    its down projection count only where its activation is silu.
    """

    def __init__(self, model: Layer) -> None:
        self._linear: dict[PackedParameter, _Sums] = {}
        self._experts: dict[ParallelExperts, _ExpertSums] = {}
        for layer in model.walk():
            if isinstance(layer, PackedParameter):
                layer.on_input = self._linear.setdefault(layer, _Sums(1, layer.k)).add
            elif isinstance(layer, ParallelExperts):
                layer.on_input = self._experts.setdefault(layer, _ExpertSums(layer)).add

    def means(self, group: Group) -> Iterator[tuple[str, Tensor]]:
        """Yield the name of each projection with its mean squares [in] float32, those of no input as zeros.

        A collective: all ranks get the same. An expert that no token chose has the means of all of its layer.
        """
        for parameter, sums in self._linear.items():
            of_all = sums.of_all()
            yield from _gathered(group, ((rectangle, of_all) for rectangle in parameter.filled_from()))
        for layer, experts in self._experts.items():
            yield from _gathered(group, _of_experts(layer.gate_up, experts.gate_up))
            yield from _gathered(group, _of_experts(layer.down, experts.down))


class _Sums:
    """Sums of squares [experts, k] and the numbers of their inputs."""

    def __init__(self, experts: int, k: int) -> None:
        self.sums = torch.zeros(experts, k, dtype=torch.float64)
        self.counts = torch.zeros(experts, dtype=torch.float64)

    def add(self, x: Tensor, expert: int = 0) -> None:
        rows = x.flatten(0, -2).double()
        self.sums[expert] += rows.square().sum(0)
        self.counts[expert] += len(rows)

    def of_all(self) -> Tensor:
        return self.sums.sum(0) / self.counts.sum().clamp(min=1)

    def of_expert(self, expert: int) -> Tensor:
        return self.sums[expert] / self.counts[expert] if self.counts[expert] else self.of_all()


class _ExpertSums:
    """The sums of the inputs of gate and up, and of down, of every expert of a layer."""

    def __init__(self, layer: ParallelExperts) -> None:
        self._layer = layer
        self.gate_up = _Sums(layer.gate_up.experts, layer.gate_up.k)
        self.down = _Sums(layer.down.experts, layer.down.k)

    def add(self, x: Tensor, ids: Tensor) -> None:
        for expert in set(ids.flatten().tolist()):
            rows = x[(ids == expert).any(1)]
            self.gate_up.add(rows, expert)
            if self._layer.activation == "silu_mul":
                self.down.add(_gated(rows, self._layer.gate_up.packed, expert), expert)


def _gated(x: Tensor, packed: PackedExperts, expert: int) -> Tensor:
    """Return silu(gate(x)) * up(x) of an expert, [m, n]."""
    if packed.weight.is_plain:
        return ops.silu_mul(torch.cat([linear(x, packed.part(expert, part)) for part in (0, 1)], -1))
    height = 2 * whole_tiles(packed.n)
    return linear(x, packed.weight.part(expert * height, height), activation="silu_mul")[:, : packed.n]


def _of_experts(parameter: ExpertsParameter, sums: _Sums) -> Iterator[tuple[Rectangle, Tensor]]:
    for rectangle in parameter.filled_from():
        yield rectangle, sums.of_expert(rectangle.row // (parameter.parts * max(parameter.n, 1)))


def _gathered(group: Group, parts: Iterable[tuple[Rectangle, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield names with whole vectors. parts: rectangles of projections with the values of this rank's columns.

    Ranks have different columns, or the same values, so that the largest of all is the one of a rank that has it.
    """
    for rectangle, values in parts:
        columns = rectangle.index[1]
        whole = torch.zeros(rectangle.shape[1])
        whole[columns] = values[: columns.stop - columns.start].float()
        yield rectangle.name.removesuffix(".weight"), group.all_gather(whole).amax(0)
