"""Limits of latency, and the percentiles that are held against them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

PERCENTILE = 0.99
"""The share of the requests that have to be within a limit."""
_UNITS = {"ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Latency:
    """The waits of one request, in seconds. ttft_s: from its arrival to its first token. tpot_s: mean time of each of
    the tokens after it."""

    ttft_s: float
    tpot_s: float


@dataclass(frozen=True)
class Limits:
    """The longest waits, in seconds, of `PERCENTILE` of the requests."""

    ttft_s: float
    tpot_s: float

    @property
    def trial_s(self) -> float:
        """Seconds in which a queue that grows by 3 % of the time becomes longer than the first token may take."""
        return 30 * self.ttft_s

    def hold(self, latency: Latency) -> bool:
        return latency.ttft_s <= self.ttft_s and latency.tpot_s <= self.tpot_s

    def text(self) -> str:
        return f"first token within {1e3 * self.ttft_s:g} ms, each token after it within {1e3 * self.tpot_s:g} ms"


def limits_of(text: str) -> Limits:
    """An argparse type: "ttft=2s,tpot=100ms"."""
    found: dict[str, float] = {}
    for part in text.split(","):
        match = re.fullmatch(r"(ttft|tpot)=(\d+(?:\.\d+)?)(ms|s)", part)
        if match is None or match[1] in found or not float(match[2]):
            raise argparse.ArgumentTypeError(f"expected two limits above 0, like ttft=2s,tpot=100ms, found {text!r}")
        found[match[1]] = float(match[2]) * _UNITS[match[3]]
    if len(found) < 2:
        raise argparse.ArgumentTypeError(f"expected a limit of ttft and one of tpot, found {text!r}")
    return Limits(found["ttft"], found["tpot"])


def allowed_late(requests: int) -> int:
    """Return how many of so many requests may be late while the percentile holds."""
    return requests - ceil(PERCENTILE * requests)


def percentiles(latencies: Sequence[Latency]) -> Latency:
    """Return the `PERCENTILE` of each wait, by nearest rank: so many of the waits are at most this long."""
    rank = len(latencies) - allowed_late(len(latencies)) - 1
    return Latency(
        sorted(latency.ttft_s for latency in latencies)[rank], sorted(latency.tpot_s for latency in latencies)[rank]
    )
