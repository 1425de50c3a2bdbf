"""An entry of `bench kernels`: one kernel on one shape, its minimal work, and a torch equivalent to compare with.

A group of kernels is a module with `entries(args) -> Iterator[Entry]`, listed in `kernels.GROUPS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from tilerank.parallel.cost import Work

if TYPE_CHECKING:
    from torch import Tensor

COLD_BYTES, MAX_COPIES = 1 << 30, 64
"""Calls cycle through copies of the weights or the cached tokens that exceed most last-level caches in total, so that
operands come from memory as they do in a model."""

Call = Callable[[int], object]
"""Takes the number of the call, which selects the copy of the operands."""


@dataclass(frozen=True)
class Entry:
    """One kernel on one shape.

    format: weight or cache format; for kernels without either, the dtype of the activations.
    run: calls the kernel. torch: calls the torch equivalent, if there is one.
    """

    kernel: str
    shape: str
    format: str
    work: Work
    run: Call
    torch: Call | None = None


def replayed(calls: Sequence[Callable[[], Tensor]]) -> Call:
    """Return a call that replays recordings of `calls` in turn.

    The runtime replays recorded steps, too: no Python runs between kernels, so none displaces their data from the
    caches. A result is valid until the next call. On the rung "reference", which cannot record, `calls` run directly.
    """
    from tilerank.kernels import core
    from tilerank.kernels.graph import Graph

    if core.isa() == "reference":
        return lambda number: calls[number % len(calls)]()
    graphs = [Graph(calls[0])]
    graphs += [Graph(call, share=graphs[0]) for call in calls[1:]]
    return lambda number: graphs[number % len(graphs)].run()


def cold_copies(nbytes: int) -> int:
    """Return how many copies of an operand of `nbytes` bytes to cycle through."""
    return min(ceil(COLD_BYTES / nbytes), MAX_COPIES)
