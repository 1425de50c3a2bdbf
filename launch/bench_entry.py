"""What `bench kernels` measures of a kernel: one call, the work that it cannot do without, and torch for comparison.

A group of kernels is a module with `entries(args) -> Iterator[Entry]`, named in `bench_kernels.GROUPS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from .bench_work import Work

if TYPE_CHECKING:
    from torch import Tensor

COLD_BYTES, MOST_COPIES = 1 << 30, 64
"""Weights and cached tokens take turns in copies that are this large together, which few last-level caches hold: in a
model, too, they come from memory."""

Call = Callable[[int], object]


@dataclass(frozen=True)
class Entry:
    """One kernel on one shape. `run` and `torch`, which does the same if it can, get the number of the call.

    format: of the weights or the cache, else the dtype of the activations.
    """

    kernel: str
    shape: str
    format: str
    work: Work
    run: Call
    torch: Call | None = None


def replayed(calls: Sequence[Callable[[], Tensor]]) -> Call:
    """`calls` in turns, recorded, as the runtime has them: without Python between a kernel and the data that it left in
    the caches. A result stands until the next one. The rung "reference" records nothing and calls."""
    from tilerank.kernels import core
    from tilerank.kernels.graph import Graph

    if core.isa() == "reference":
        return lambda number: calls[number % len(calls)]()
    graphs = [Graph(calls[0])]
    graphs += [Graph(call, share=graphs[0]) for call in calls[1:]]
    return lambda number: graphs[number % len(graphs)].run()


def copies(nbytes: int) -> int:
    """How many of something that large take turns."""
    return min(ceil(COLD_BYTES / nbytes), MOST_COPIES)
