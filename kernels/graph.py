"""A decode step without Python: kernel launches recorded once, replayed by one compiled call.

The rules are those of CUDA graphs. A step is recorded for fixed shapes; what changes from run to run is *values* in
tensors that exist outside it, which are copied in before a run. Whatever runs between its launches is not part of it,
so a recorded step may consist of kernels and views alone: a torch operation that computes or copies is an error while
recording, and Python may not look at values, which do not exist yet. What has to be Python in every run (a message to
another host) cuts the graph: see `between_launches`.
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
    """One run: `entries` are (kernel, seconds) in order, of the thread that was inside longest; `seconds` is the whole
    run, so what the entries do not add up to went into getting from one kernel to the next.
    """

    entries: list[tuple[str, float]]
    seconds: float

    @property
    def overhead_s(self) -> float:
        return self.seconds - sum(seconds for _, seconds in self.entries)

    def by_kernel(self) -> dict[str, tuple[int, float]]:
        """Runs and seconds of each kernel, the longest first."""
        sums: dict[str, tuple[int, float]] = {}
        for kernel, seconds in self.entries:
            runs, total = sums.get(kernel, (0, 0.0))
            sums[kernel] = runs + 1, total + seconds
        return dict(sorted(sums.items(), key=lambda item: -item[1][1]))


class Graph:
    """The launches of `step`, which is called once, here, and computes nothing: a launch only writes itself down.

    `run()` then does what `step()` would, bit for bit, on the values that its tensors have by then, and writes to
    `output`, the tensor that `step` returned. On the rung "reference" there is nothing to record: KernelError.

    What `step` allocates with `core.empty` lives in memory of the graph. `share`: a graph whose memory this one uses
    too, because only one of them runs at a time and its output is read before the other runs. Tensors from outside
    stay alive with the graph.
    """

    def __init__(self, step: Callable[[], Tensor], *, share: Graph | None = None) -> None:
        if core.isa() == "reference":
            raise KernelError("Graph: expected compiled kernels to record, found the rung reference")
        from . import _C

        self._recorded: _C.Graph = _C.Graph(share._recorded if share else None)
        self._cuts: list[tuple[int, Callable[[], object]]] = []  # what runs before the launch of that number
        self._recorded.begin()
        _recording.graph = self
        try:
            with _KernelsOnly():  # type: ignore[no-untyped-call]
                self.output: Tensor = self._recorded.alias(step())
        finally:
            _recording.graph = None
            self._recorded.end()

    def run(self) -> Tensor:
        """One call into the compiled core, without the interpreter's lock: the pool's threads walk the launches with a
        barrier after each. Returns `output`. What a kernel raises ends the run and comes out as if launched alone.
        """
        begin = 0
        for end, act in self._cuts:
            self._recorded.run(begin, end)
            act()
            begin = end
        self._recorded.run(begin, len(self))
        return self.output

    def profile(self) -> Profile:
        """Runs once and measures."""
        return self.watch()()

    def watch(self) -> Callable[[], Profile]:
        """The same for who measures the time that this takes, too: what was seen is told when the result is called."""
        seen: list[_C.Profile | tuple[str, float]] = []
        began, begin = time.perf_counter(), 0
        for end, act in self._cuts:
            seen.append(self._recorded.profile(begin, end))
            cut = time.perf_counter()
            act()
            seen.append(("python", time.perf_counter() - cut))
            begin = end
        last = self._recorded.profile(begin, len(self))
        seconds = time.perf_counter() - began if self._cuts else last.seconds

        def told() -> Profile:
            entries = [part.entries if not isinstance(part, tuple) else [part] for part in (*seen, last)]
            return Profile(list(chain.from_iterable(entries)), seconds)

        return told

    def nbytes(self) -> int:
        """Memory mapped for what is allocated inside, with that of the graphs that share it."""
        return self._recorded.memory()

    def __len__(self) -> int:
        """Launches."""
        return len(self._recorded)


class _Recording(threading.local):
    graph: Graph | None = None  # that this thread records


_recording = _Recording()


def between_launches(act: Callable[..., object], *tensors: Tensor) -> None:
    """Calls `act(*tensors)`: now, or, while a step is recorded, in every run of it at this place.

    `act` computes with torch as it likes and writes its results to some of the tensors. In a recording it gets views of
    them that keep no memory from being used again further on, so it must not hold on to them.
    """
    graph = _recording.graph
    if graph is None:
        act(*tensors)
        return
    views = [graph._recorded.alias(tensor) for tensor in tensors]
    graph._cuts.append((len(graph), lambda: act(*views)))


class _KernelsOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets views pass and refuses every other torch operation."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler for that, which takes more than a second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_view(func):
            raise KernelError(
                f"Graph: expected kernels and views alone while a step is recorded, found torch's {func}, "
                "which no run would repeat"
            )
        return func(*args, **(kwargs or {}))


@cache
def _is_view(func: torch._ops.OpOverload) -> bool:
    """Does all that it returns alias what it got, unwritten?"""
    returned = [value.alias_info for value in func._schema.returns]
    return bool(returned) and all(alias is not None and not alias.is_write for alias in returned)
