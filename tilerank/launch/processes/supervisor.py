"""Runs processes that depend on each other: ends all when one fails, and reports why in one sentence. No torch."""

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ..logs import say
from .event_loop import Loop, Timer
from .process import Process, ProcessSpec
from .status import Phase

SETTLE_S = 0.3  # after a first failure: other processes may report the same error
SUSPECT_S = 1.5  # after "another rank is gone": the exit of that rank shows the cause
TERMINATE_S = 2.0  # from SIGTERM to SIGKILL once a process failed; with the above, everything ends within 5 s
END_S = 10.0  # from SIGTERM to SIGKILL after success, or when the user requested the end


@dataclass(frozen=True)
class Failure:
    """Why process `name` ended. `consequence`: it only noticed that another process was gone."""

    name: str
    sentence: str
    status: int
    consequence: bool = False
    own_words: bool = False
    leads: bool = False


@dataclass(frozen=True)
class Outcome:
    """Exit status of a whole group, and the sentence about its first failure."""

    status: int
    sentence: str | None = None


@dataclass(frozen=True)
class WatchedConditions:
    """Conditions that are watched in addition to the ends of the processes.

    `oom_kills` returns how many processes of our cgroup the kernel has killed so far for lack of memory. A process may
    be busy for any time, but one that is stopped (SIGSTOP) for `longest_stop_s` counts as failed.
    """

    oom_kills: Callable[[], int] = lambda: 0
    longest_stop_s: float = float("inf")


def supervise(specs: Sequence[ProcessSpec], watch: WatchedConditions, *, end_s: float = END_S) -> int:
    """Run one group to its end, as `run_group` does, and return the exit status for the command.

    The sentence about the first failure goes to stderr.
    """
    outcome = run_group(specs, watch, end_s=end_s)
    if outcome.sentence is not None:
        say(f"tilerank: error: {outcome.sentence}")
    return outcome.status


def run_group(specs: Sequence[ProcessSpec], watch: WatchedConditions, *, end_s: float = END_S) -> Outcome:
    """Run one group to its end and return how it ended.

    `end_s`: seconds that the processes get to exit in when the user requests the end. Raises LaunchError if a process
    cannot be started.
    """
    signals = 0

    def on_signal(number: signal.Signals) -> None:
        nonlocal signals
        signals += 1
        group.end(number, end_s if signals == 1 else 0)

    loop = Loop(on_signal)
    group = ProcessGroup(loop, watch)
    try:
        group.start(specs)
        loop.run(lambda: group.running)
    finally:
        group.kill()
        loop.close()
    assert group.outcome is not None
    return group.outcome


def cause(failures: Sequence[Failure]) -> Outcome:
    """Return the original failure: the end of a process itself takes precedence over what its peers saw of it."""
    roots = [failure for failure in failures if not failure.consequence] or list(failures)
    first = roots[0]
    if not first.own_words:
        return Outcome(first.status, first.sentence)
    # A sentence that the leader or several processes report is about the input, so it names no process.
    shared = any(other.leads or other.name != first.name for other in roots if other.sentence == first.sentence)
    return Outcome(first.status, first.sentence if shared else f"{first.name}: {first.sentence}")


class ProcessGroup:
    """Processes that are started together and end together.

    `on_phase` is called when the leader enters a phase, `on_end` when all processes are gone. `outcome` is then the
    result, and `unclean` the first process that exited with another status than 0 after the group had been asked to
    end.
    """

    def __init__(
        self,
        loop: Loop,
        watch: WatchedConditions,
        *,
        on_phase: Callable[[Phase], None] = lambda _: None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.outcome: Outcome | None = None
        self.unclean: Failure | None = None
        self._loop = loop
        self._watch = watch
        self._on_phase = on_phase
        self._on_end = on_end
        self._oom_before = watch.oom_kills()
        self._processes: list[Process] = []
        self._failures: list[Failure] = []
        self._decision: Timer | None = None
        self._killing: Timer | None = None

    @property
    def running(self) -> bool:
        return any(process.running for process in self._processes)

    def start(self, specs: Sequence[ProcessSpec]) -> None:
        """Start the processes. LaunchError if one cannot be started; `kill` ends those that were started."""
        for spec in specs:
            self._processes.append(Process(self._loop, spec, self, self._watch.longest_stop_s))

    def end(self, number: signal.Signals, within_s: float) -> None:
        """Pass on the signal with which the user requested the end. Kill what still runs after `within_s` seconds."""
        self._loop.cancel(self._decision)
        self.outcome = self.outcome or Outcome(128 + number)
        self._stop(number, within_s)
        self._signal_all(signal.SIGCONT)  # a stopped process handles the signal only once it continues

    def kill(self) -> None:
        """Kill all processes, without a call of `on_end`."""
        for timer in (self._decision, self._killing):
            self._loop.cancel(timer)
        for process in self._processes:
            if process.running:
                process.kill()

    def reached(self, process: Process) -> None:
        if process.spec.leads:
            self._on_phase(process.phase)

    def stuck(self, process: Process) -> None:
        if self.outcome is None and all(failure.consequence for failure in self._failures):
            stopped = f"{process} was stopped for {self._watch.longest_stop_s:g} s while {process.phase}"
            self._fail(Failure(process.spec.name, stopped, 1))

    def ended(self, process: Process, code: int) -> None:
        if self.outcome is None:
            if code != 0:
                self._fail(self._describe(process, code))
            elif process.spec.leads and not self._failures:
                self.outcome = Outcome(0)
                self._killing = self._loop.after(END_S, partial(self._signal_all, signal.SIGKILL))
        elif code != 0 and self.unclean is None:
            self.unclean = self._describe(process, code)
        if not self.running:
            if self.outcome is None:
                self._decide()
            self._loop.cancel(self._killing)
            self._on_end()

    def _describe(self, process: Process, code: int) -> Failure:
        status, name, leads = 128 - code if code < 0 else code, process.spec.name, process.spec.leads
        if process.failed is not None:
            return Failure(name, process.failed.sentence, status, process.failed.consequence, True, leads)
        if code >= 0:
            return Failure(name, f"{process} exited with status {code} while {process.phase}", status)
        killed = f"{process} was killed by {signal.Signals(-code).name} while {process.phase}"
        if -code == signal.SIGKILL and self._watch.oom_kills() > self._oom_before:
            killed = f"{process} was killed while {process.phase}, probably out of memory"
        return Failure(name, killed, status)

    def _fail(self, failure: Failure) -> None:
        self._failures.append(failure)
        wait_s = SUSPECT_S if failure.consequence else SETTLE_S
        if self._decision is None:
            self._decision = self._loop.after(wait_s, self._decide)
        else:
            self._loop.hasten(self._decision, wait_s)

    def _decide(self) -> None:
        # Processes that have reported an error but have not exited yet count as well.
        going = [
            Failure(process.spec.name, process.failed.sentence, 1, process.failed.consequence, True, process.spec.leads)
            for process in self._processes
            if process.running and process.failed is not None
        ]
        failures = [*self._failures, *going]
        self.outcome = cause(failures) if failures else Outcome(0)
        self._loop.cancel(self._decision)
        self._stop(signal.SIGTERM, TERMINATE_S)

    def _stop(self, number: signal.Signals, within_s: float) -> None:
        self._loop.cancel(self._killing)
        self._killing = self._loop.after(within_s, partial(self._signal_all, signal.SIGKILL))
        self._signal_all(number)

    def _signal_all(self, number: signal.Signals) -> None:
        for process in self._processes:
            process.signal(number)
