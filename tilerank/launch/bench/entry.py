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

Calls = Sequence[Callable[[], object]]


@dataclass(frozen=True)
class Entry:
    """One kernel on one shape.

    calls: of the kernel, each with its own copy of the operands that come from memory; measuring cycles through them.
    torch_calls: the same of the torch equivalent, if there is one. format: weight or cache format; for kernels without
    either, the dtype of the activations.
    """

    kernel: str
    shape: str
    work: Work
    calls: Calls
    torch_calls: Calls = ()
    format: str = "bfloat16"


def replayed(calls: Sequence[Callable[[], Tensor]]) -> Calls:
    """Return calls that replay recordings of `calls`.

    The runtime replays recorded steps, too: no Python runs between kernels, so none displaces their data from the
    caches. A result is valid until the next call. The rung "reference" cannot record; there, `calls` are returned.
    """
    from tilerank.kernels import core
    from tilerank.kernels.graph import Graph

    if core.isa() == "reference":
        return calls
    first = Graph(calls[0])
    return [first.run, *(Graph(call, share=first).run for call in calls[1:])]


def cold_copies(nbytes: int) -> int:
    """Return how many copies of an operand of `nbytes` bytes to cycle through."""
    return min(ceil(COLD_BYTES / nbytes), MAX_COPIES)
