"""The rows of media in a batch: what they take in, and which of them are kept for speech."""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..protocol.rank_messages import Step


@dataclass(frozen=True)
class Inserts:
    """The m rows of a batch that take encoded media in place of embedded tokens.

    rows: [m] int64, ascending. values: [m, hidden], which replace the embedded tokens. deep: for each further level of
    the encodings, the rows whose medium has this level, and their values, in the same form. Those at index j are added
    to the residual stream after layer j (DeepStack).
    """

    rows: Tensor
    values: Tensor
    deep: list[tuple[Tensor, Tensor]]


@dataclass
class Kept:
    """The m rows of a batch whose hidden states are kept for the talker.

    layer: the number of the layer, from 1, whose output is kept. rows: [m] int64. hidden: [m, hidden], the output; the
    model sets it.
    """

    layer: int
    rows: Tensor
    hidden: Tensor | None = None


def inserts(step: Step, starts: list[int], encodings: Mapping[int, Tensor]) -> Inserts | None:
    """Return the encodings that a step takes in. starts: the first row of each chunk. encodings: as in
    BatchFiller.fresh."""
    parts = [(start, i) for start, chunk in zip(starts, step.chunks, strict=False) for i in chunk.placeholder_ranges]
    if not parts:
        return None
    runs = [
        (range(start + i.start, start + i.start + i.count), encodings[i.medium][:, i.first : i.first + i.count])
        for start, i in parts
    ]
    first, *deep = (
        _joined([(rows, values[level]) for rows, values in runs if level < len(values)])
        for level in range(max(len(values) for _, values in runs))
    )
    return Inserts(*first, deep)


def _joined(runs: list[tuple[range, Tensor]]) -> tuple[Tensor, Tensor]:
    return int64([row for rows, _ in runs for row in rows]), torch.cat([values for _, values in runs])


def kept(step: Step, starts: list[int], layer: int) -> Kept | None:
    """Return the rows of media of the sequences that the step names. starts: as in `inserts`."""
    rows = [
        row
        for start, chunk in zip(starts, step.chunks, strict=False)
        if chunk.sequence in step.kept
        for i in chunk.placeholder_ranges
        for row in range(start + i.start, start + i.start + i.count)
    ]
    return Kept(layer, int64(rows)) if rows else None


def int64(values: list[int]) -> Tensor:
    """Return a tensor of one or more numbers, in a seventh of the time that torch.tensor takes for a prompt's."""
    return torch.frombuffer(array("q", values), dtype=torch.int64)
