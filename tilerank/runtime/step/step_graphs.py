"""Steps without Python between their kernels, recorded as graphs (kernels/graph.py).

A decode step of a batch size has the same launches every time: it is recorded when first needed and then replayed on
the current values of its input tensors. Any other step, such as one with prompts, is recorded to run once: Python
between launches would find the CPU's caches full of what the last kernel left there, which takes it twice as long, and
the other ranks would wait for the slowest.
"""

import logging
import time
from collections.abc import Callable

from torch import Tensor

from tilerank.kernels import core, ops
from tilerank.kernels.graph import Graph, Profile
from tilerank.parallel.group import Group, RecordableGroup

log = logging.getLogger(__name__)

Forward = Callable[[], Tensor]
"""A forward pass over inputs that are bound already; returns fp32 logits [rows, vocab]."""


class StepGraphs:
    """The recorded steps of a model. One runs at a time, so all of them share one memory for activations."""

    def __init__(self, group: RecordableGroup) -> None:
        self._group = group
        self._graphs: dict[int, Graph] = {}  # by batch size
        self._newest: Graph | None = None
        # By rows: the logits that a step of so many rows returns, and the recorded choice of their likeliest tokens.
        self._logits: dict[int, Tensor] = {}
        self._argmax: dict[int, Graph] = {}
        self._rows = 0  # of the last step, 0 if it was not replayed
        self._is_profiling = False
        self._profile: Callable[[], Profile] | None = None  # of the last step, if it was measured

    def replay(self, forward: Forward, size: int, rows: int) -> Tensor:
        """Run the step recorded for batch size `size`, recording `forward` at its first use.

        Returns the logits of the first `rows` rows, valid until the next call. Raises what `forward` would raise.
        """
        if size not in self._graphs:
            self._graphs[size] = self._record(forward)
        graph = self._graphs[size]
        if rows not in self._logits:
            self._logits[rows] = graph.output[:rows]
        self._rows, self._profile = rows, None

        def measured() -> None:
            self._profile = graph.run_timed()

        self._group.replay(measured if self._is_profiling else graph.run)
        return self._logits[rows]

    def run_once(self, forward: Forward) -> Tensor:
        """Record `forward`, run it and return its logits, valid until the next call. Raises what it would raise."""
        self._rows, self._profile = 0, None
        graph = self._record(forward)
        self._group.replay(graph.run)
        return graph.output

    def argmax(self, logits: Tensor) -> Tensor:
        """ops.argmax, replayed for the logits of a replayed step; valid until the next call.

        With the CPU's caches full of weights, checks and new tensors take several times as long as the choice itself.
        """
        if logits is self._logits.get(self._rows):
            return self._recorded_argmax(self._rows).run()
        return ops.argmax(logits)

    def start_profiling(self) -> None:
        """Measure the kernels of every replayed step from now on, for `profile`."""
        self._is_profiling = True

    def profile(self) -> Profile | None:
        """Return where the time of the last step went, and that of choosing its likeliest tokens, which runs once more
        to be measured. None if the step was not measured."""
        if self._profile is None:
            return None
        step, chosen = self._profile(), self._recorded_argmax(self._rows).profile()
        return Profile(step.entries + chosen.entries, step.seconds + chosen.seconds)

    def _recorded_argmax(self, rows: int) -> Graph:
        if rows not in self._argmax:
            # These share one memory as well, but not with the steps: the logits are there.
            logits, other = self._logits[rows], next(iter(self._argmax.values()), None)
            self._argmax[rows] = Graph(lambda: ops.argmax(logits), share=other)
        return self._argmax[rows]

    def _record(self, forward: Forward) -> Graph:
        began = time.perf_counter()
        graph = Graph(forward, share=self._newest)
        self._newest = graph
        log.debug(
            "recorded a step: %d launches in %.1f ms, %.1f MB of memory for all steps",
            len(graph),
            (time.perf_counter() - began) * 1e3,
            graph.nbytes() / 1e6,
        )
        return graph


def recorded_steps(group: Group) -> StepGraphs | None:
    """Return None where steps cannot be recorded. All ranks agree on that, and rank 0 logs the reason."""
    if core.isa() == "reference":
        reason = "kernels run in plain torch"
    elif not isinstance(group, RecordableGroup):
        reason = f"collectives of {type(group).__name__} cannot be recorded"
    else:
        return StepGraphs(group)
    if group.rank == 0:
        log.info("steps run eagerly: %s", reason)
    return None
