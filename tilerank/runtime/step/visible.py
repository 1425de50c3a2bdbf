"""Up to which token the rows of a batch attend, where that is not the row itself."""

from array import array
from dataclasses import dataclass

import torch
from torch import Tensor

from ..protocol.rank_messages import Step


@dataclass(frozen=True)
class VisibleEnds:
    """The end of the tokens of its sequence that each row attends to, [t] int32.

    full: in layers that attend to all tokens. windowed: in layers with a window.
    """

    full: Tensor
    windowed: Tensor

    def of(self, window: int) -> Tensor:
        """Return those of layers with this window, 0 for those without."""
        return self.windowed if window else self.full

    def take(self, rows: Tensor) -> "VisibleEnds":
        """Return those of some rows [m] int64."""
        return VisibleEnds(self.full[rows], self.windowed[rows])


def ends_with_media(step: Step, starts: list[int]) -> VisibleEnds | None:
    """Return the ends where the tokens of a picture attend to all of it, in layers of both kinds. None if no chunk has
    any. starts: the first row of each chunk."""
    if not any(chunk.placeholder_ranges for chunk in step.chunks):
        return None
    ends = array("i")
    for first, chunk in zip(starts, step.chunks, strict=False):
        ends.extend(range(chunk.start + 1, chunk.start + 1 + len(chunk.token_ids)))
        for run in chunk.placeholder_ranges:
            # A chunk that holds some tokens of a medium holds all that follow them.
            begin, end = first + run.start, first + run.start + run.count
            ends[begin:end] = array("i", [chunk.start + run.start + run.count] * run.count)
    both = torch.frombuffer(ends, dtype=torch.int32)
    return VisibleEnds(both, both)


def ends_on_both_sides(step: Step, reach: int) -> VisibleEnds:
    """Return the ends where all tokens of a text attend to each other, those of layers with a window to `reach` tokens
    after them. A chunk is a whole text."""
    full, windowed = array("i"), array("i")
    for chunk in step.chunks:
        length = chunk.start + len(chunk.token_ids)
        full.extend([length] * len(chunk.token_ids))
        windowed.extend(min(index + 1 + reach, length) for index in range(chunk.start, length))
    return VisibleEnds(*(torch.frombuffer(ends, dtype=torch.int32) for ends in (full, windowed)))
