"""Supervises a server: the HTTP process and its ranks, which are started again when they end by themselves. No torch.

Each of them survives the end of the other. Without ranks, the HTTP process answers its clients with an error. Without
an HTTP process, the ranks keep their weights, and this process holds the listening socket, where connections wait.
"""

import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from tilerank.runtime.server.link.handover import connect

from ..errors import LaunchError
from ..logs import say
from ..processes.event_loop import Loop, Timer
from ..processes.process import ProcessSpec
from ..processes.status import Phase
from ..processes.supervisor import END_S, TERMINATE_S, ProcessGroup, WatchedConditions
from .restarts import RestartWaits

Specs = Callable[[int], Sequence[ProcessSpec]]
"""Returns the processes of a part of the server. Its leader receives connections over the descriptor given."""


class _Part:
    """The HTTP process or the ranks: a group of processes, and the next one when that has ended."""

    def __init__(self, name: str, specs: Specs) -> None:
        self.name = name
        self.specs = specs
        self.group: ProcessGroup | None = None
        self.control: socket.socket | None = None
        self.up_since: float | None = None  # since when it has been able to work; None while it starts
        self.ready = False  # it can work, and so can the part that it needs
        self.was_up = self.was_ready = False  # once
        self.failed_starts = 0  # since it was up
        self.waits = RestartWaits()
        self.restart: Timer | None = None

    @property
    def running(self) -> bool:
        return self.group is not None and self.group.running

    def close_control(self) -> None:
        """Close the control socket: the processes of this part get no further connection."""
        if self.control is not None:
            self.control.close()
        self.control = None

    def end(self, number: signal.Signals, within_s: float) -> None:
        if self.group is not None:
            self.group.end(number, within_s)


class ServerSupervisor:
    """Runs a server until the user ends it.

    A part that ends is started again, after a wait if it has ended a short time ago, too: what a client can cause must
    not end the server. One that never was up is not.

    `replicas`: groups of ranks, by their names. `max_restarts`: how often in a row a part may fail to start again; with
    0 no part is started again. `drain_s`: what the HTTP process takes at most to end in. `on_ready` is called once,
    when all are ready.
    """

    def __init__(
        self,
        http: Specs,
        replicas: Mapping[str, Specs],
        watch: WatchedConditions,
        *,
        max_restarts: int,
        drain_s: float,
        on_ready: Callable[[], None],
    ) -> None:
        self._watch = watch
        self._max_restarts = max_restarts
        self._drain_s = drain_s
        self._on_ready = on_ready
        self._announced = False
        self._ending = False
        self._status = 0
        self._http = _Part("the HTTP process", http)
        self._replicas = [_Part(name, specs) for name, specs in replicas.items()]
        self._parts = (self._http, *self._replicas)
        self._loop = Loop(self._on_signal)

    def run(self) -> int:
        """Return the exit status for the command: 0 if all was answered. Raises LaunchError if a process cannot be
        started."""
        try:
            for part in self._parts:
                self._start(part)
            self._loop.run(lambda: any(part.running or part.restart is not None for part in self._parts))
            return self._status
        finally:
            for part in self._parts:
                if part.group is not None:
                    part.group.kill()
                part.close_control()
            self._loop.close()

    def _start(self, part: _Part) -> None:
        part.ready, part.up_since = False, None
        part.control, theirs = socket.socketpair()
        part.group = ProcessGroup(
            self._loop, self._watch, on_phase=partial(self._on_phase, part), on_end=partial(self._on_end, part)
        )
        part.group.start(part.specs(theirs.detach()))
        for number, replica in enumerate(self._replicas):
            if part in (self._http, replica) and self._http.control is not None and replica.control is not None:
                connect(self._http.control, replica.control, number)

    def _on_phase(self, part: _Part, phase: Phase) -> None:
        if phase in ("listening", "generating"):
            part.up_since, part.was_up, part.failed_starts = time.monotonic(), True, 0
        if phase not in ("generating", "serving"):
            return
        part.ready = True
        if part.was_ready:
            say(f"tilerank: {part.name} is ready again")
        part.was_ready = True
        if not self._announced and all(part.ready for part in self._parts):
            self._announced = True
            self._on_ready()

    def _on_signal(self, number: signal.Signals) -> None:
        if self._ending:
            self._status = self._status or 128 + number
            for part in self._parts:
                part.end(number, 0)
            return
        self._stop_restarts()
        self._http.end(signal.SIGTERM, self._drain_s + END_S)
        for replica in self._replicas:
            if not replica.ready:
                replica.end(signal.SIGTERM, TERMINATE_S)
        if not self._http.running:
            self._end_ranks()

    def _on_end(self, part: _Part) -> None:
        part.close_control()
        assert part.group is not None and part.group.outcome is not None
        outcome = part.group.outcome
        if self._ending:
            sentence, status = outcome.sentence, outcome.status
            unclean = part.group.unclean
            if part is self._http and part.ready and unclean is not None and not self._status:
                sentence, status = unclean.sentence, unclean.status  # answers were under way, and are broken off
            if sentence is not None:
                say(f"tilerank: error: {sentence}")
                self._status = self._status or status
            if part is self._http:
                self._end_ranks()
            return
        self._start_again_or_end(part, outcome.sentence or f"{part.name} ended unexpectedly", outcome.status or 1)

    def _start_again_or_end(self, part: _Part, sentence: str, status: int) -> None:
        """Start a part again whose processes have ended, or could not be started, for the reason in `sentence`."""
        if part.up_since is None:
            part.failed_starts += 1
        if not part.was_up or not self._max_restarts:
            self._end_after_failure(sentence, status)
            return
        if part.failed_starts > self._max_restarts:
            more = f"; {part.name} failed to start {part.failed_starts} times in a row, more than --max-restarts allows"
            self._end_after_failure(sentence + more, status)
            return
        wait_s = part.waits.after(None if part.up_since is None else time.monotonic() - part.up_since)
        when = f" in {wait_s:g} s" if wait_s else ""
        count = f" (failed to start {part.failed_starts} of {self._max_restarts} times)" if part.failed_starts else ""
        say(f"tilerank: warning: {sentence}; {part.name} is started again{when}{count}")
        part.restart = self._loop.after(wait_s, partial(self._start_again, part))

    def _start_again(self, part: _Part) -> None:
        part.restart = None
        try:
            self._start(part)
        except LaunchError as e:
            assert part.group is not None
            part.group.kill()
            part.close_control()
            self._start_again_or_end(part, str(e), 1)

    def _end_after_failure(self, sentence: str, status: int) -> None:
        say(f"tilerank: error: {sentence}")
        self._status = status
        self._stop_restarts()
        for part in self._parts:
            part.end(signal.SIGTERM, TERMINATE_S)

    def _stop_restarts(self) -> None:
        """From now on, no part is started again."""
        self._ending = True
        for part in self._parts:
            self._loop.cancel(part.restart)
            part.restart = None

    def _end_ranks(self) -> None:
        """End the ranks by closing their connections: they ignore SIGTERM, which may have reached the whole control
        group while requests were still running."""
        for replica in self._replicas:
            replica.close_control()
            self._loop.after(END_S, partial(replica.end, signal.SIGKILL, 0))
