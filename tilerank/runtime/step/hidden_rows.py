"""The hidden states of a step that requests ask for."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tilerank.kernels import ops

from .media_rows import int64


@dataclass
class HiddenRows:
    """The hidden states of the m rows of a batch with logits, after some layers.

    layers: their numbers, from 1; 0 stands for the embeddings, and that of the last layer for the states after the last
    norm. rows: [m] int64, those with logits. own: [m] int64, their numbers from 0, for streams that have no others.
    states: [m, hidden] by the number of the layer; the model sets them.
    """

    layers: list[int]
    rows: Tensor
    own: Tensor
    states: dict[int, Tensor] = field(default_factory=dict)

    def among(self, numbers: range) -> list[int]:
        """Return the layers of these numbers."""
        return [layer for layer in self.layers if layer in numbers]

    def set(self, layers: list[int], x: Tensor, *, is_cut: bool) -> None:
        """Set the states after `layers`, which are rows of x[t, hidden], or all rows of x[m, hidden] if it is cut."""
        for layer in layers:
            self.states[layer] = ops.take_rows(x, self.own if is_cut else self.rows)


def hidden_rows(layers: list[int], logit_rows: list[int]) -> HiddenRows | None:
    """Return the rows whose hidden states are asked for; None without layers."""
    return HiddenRows(layers, int64(logit_rows), torch.arange(len(logit_rows))) if layers else None
