"""Graphs: kernel launches recorded once and replayed by one compiled call, without Python in between.

The rules are those of CUDA graphs. A graph is recorded for fixed shapes. Between runs only the *values* of tensors
outside the graph change; they are copied in before a run. A recorded step consists of kernels and views only. While
recording, a torch operation that computes or copies raises an error, and Python must not read values, because nothing
has been computed yet. Python that must run in every replay (such as a message to another host) splits the graph, see
`between_launches`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from . import core
from .errors import KernelError

if TYPE_CHECKING:
    from . import _C


@dataclass(frozen=True)
class Profile:
    """The timing of one run.

    entries: (kernel, seconds) in order, the time of the slowest thread in each kernel; "python" for a call between
    launches. seconds: duration of the whole run.
    """

    entries: list[tuple[str, float]]
    seconds: float

    @property
    def overhead_s(self) -> float:
        """Seconds spent between kernels."""
        return self.seconds - sum(seconds for _, seconds in self.entries)

    def by_kernel(self) -> dict[str, tuple[int, float]]:
        """Return (runs, seconds) of each kernel, those with the most seconds first."""
        sums: dict[str, tuple[int, float]] = {}
        for kernel, seconds in self.entries:
            runs, total = sums.get(kernel, (0, 0.0))
            sums[kernel] = runs + 1, total + seconds
        return dict(sorted(sums.items(), key=lambda item: -item[1][1]))


class Graph:
    """The recorded launches of `step`, which the constructor calls once without computing anything.

    `run()` does what `step()` would do, bit for bit, with the current values of its tensors, and writes its result to
    `output`, the tensor that `step` returned. Raises KernelError on the rung "reference", which has no launches.

    Tensors that `step` allocates with `core.empty` live in memory of the graph. `share`: another graph whose memory
    this one reuses; only one of the two may run at a time, and its output must be read before the other runs. Tensors
    from outside are kept alive by the graph.
    """

    def __init__(self, step: Callable[[], Tensor], *, share: Graph | None = None) -> None:
        if core.isa() == "reference":
            raise KernelError("Graph: expected compiled kernels to record, found the rung reference")
        from . import _C

        self._recorded: _C.Graph = _C.Graph(share._recorded if share else None)
        self._cuts: list[tuple[int, Callable[[], object]]] = []  # (launch number, call to make before it)
        self._recorded.begin()
        _recording.graph = self
        try:
            with _KernelsOnly():  # type: ignore[no-untyped-call]
                self.output: Tensor = self._recorded.alias(step())
        finally:
            _recording.graph = None
            self._recorded.end()

    def run(self) -> Tensor:
        """Replay the launches and return `output`.

        The compiled core runs them without the interpreter's lock; the pool's threads pass a barrier after each launch.
        An error in a kernel ends the run and is raised as by a single launch.
        """
        begin = 0
        for end, act in self._cuts:
            self._recorded.run(begin, end)
            act()
            begin = end
        self._recorded.run(begin, len(self))
        return self.output

    def profile(self) -> Profile:
        """Run once with timing."""
        return self.run_timed()()

    def run_timed(self) -> Callable[[], Profile]:
        """Run once with timing. Returns a function that builds the profile, so that the caller can time the run."""
        parts: list[_C.Profile | tuple[str, float]] = []
        began, begin = time.perf_counter(), 0
        for end, act in self._cuts:
            parts.append(self._recorded.profile(begin, end))
            cut = time.perf_counter()
            act()
            parts.append(("python", time.perf_counter() - cut))
            begin = end
        last = self._recorded.profile(begin, len(self))
        seconds = time.perf_counter() - began if self._cuts else last.seconds

        def profile() -> Profile:
            entries = [part.entries if not isinstance(part, tuple) else [part] for part in (*parts, last)]
            return Profile(list(chain.from_iterable(entries)), seconds)

        return profile

    def nbytes(self) -> int:
        """Return the bytes mapped for tensors of this graph and of the graphs that share its memory."""
        return self._recorded.memory()

    def __len__(self) -> int:
        """Return the number of launches."""
        return len(self._recorded)


class _Recording(threading.local):
    graph: Graph | None = None  # the graph that this thread is recording


_recording = _Recording()


def between_launches(act: Callable[..., object], *tensors: Tensor) -> None:
    """Call `act(*tensors)` now or, while a graph is being recorded, at this place in every run of the graph.

    `act` may use any torch operation and writes its results to some of the tensors. While recording, the tensors are
    replaced by views that do not keep their memory from being reused later in the graph, so `act` must not keep them.
    """
    graph = _recording.graph
    if graph is None:
        act(*tensors)
        return
    views = [graph._recorded.alias(tensor) for tensor in tensors]
    graph._cuts.append((len(graph), lambda: act(*views)))


class _KernelsOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Allows views and raises KernelError for every other torch operation."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch imports its compiler, which takes more than a second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_view(func):
            raise KernelError(
                f"Graph: expected only kernels and views while recording, found the torch operation {func}, "
                "which a replay would not repeat"
            )
        return func(*args, **(kwargs or {}))


@cache
def _is_view(func: torch._ops.OpOverload) -> bool:
    """Return whether all results of an operation are unmodified aliases of its arguments."""
    returned = [value.alias_info for value in func._schema.returns]
    return bool(returned) and all(alias is not None and not alias.is_write for alias in returned)
