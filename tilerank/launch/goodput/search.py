"""The search for the highest rate of requests at which limits of latency hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .limits import Latency, Limits, percentiles

PRECISION = 0.05
"""The search ends when the lowest rate that fails is at most this share above the highest one that holds."""
_LOWEST = 1 / 64
"""The search gives up below this share of the rate at which it starts."""


@dataclass(frozen=True)
class Trial:
    """Requests that arrived at `rate` a second.

    waits: the percentiles of their waits; lower bounds if the trial was given up because more were late than may be.
    tokens_per_s: new tokens of all requests, from the first arrival to the last token.
    """

    rate: float
    requests: int
    waits: Latency
    holds: bool
    tokens_per_s: float
    given_up: bool = False


def trial_of(rate: float, latencies: Sequence[Latency], limits: Limits, new_tokens: int, seconds: float) -> Trial:
    """Return the trial of requests that were all answered, with so many new tokens in so many seconds."""
    waits = percentiles(latencies)
    return Trial(rate, len(latencies), waits, limits.hold(waits), new_tokens / seconds)


def search(run: Callable[[float], Trial], start: float) -> list[Trial]:
    """Return the trials of a search that doubles or halves the rate, from `start` on, until it is between one that
    holds and one that does not, and then bisects on a logarithmic scale."""
    trials: list[Trial] = []
    holds = fails = None
    rate = start
    while holds is None or fails is None or fails > holds * (1 + PRECISION):
        trials.append(run(rate))
        if trials[-1].holds:
            holds = rate
        else:
            fails = rate
        if holds is None:
            if rate <= start * _LOWEST:
                break
            rate /= 2
        elif fails is None:
            rate *= 2
        else:
            rate = (holds * fails) ** 0.5
    return trials


def best(trials: Sequence[Trial]) -> Trial | None:
    """Return the trial with the highest rate that holds, if there is one."""
    return max((trial for trial in trials if trial.holds), key=lambda trial: trial.rate, default=None)
