"""Percentiles of the latest measurements, for the status page. Histograms of all are in the metrics."""

from collections import deque

KEPT = 2000


class LatencyWindow:
    """The last KEPT values, in seconds."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=KEPT)

    def add(self, value: float) -> None:
        self._values.append(value)

    def percentiles(self) -> dict[str, float] | None:
        """Return the 50th, 95th and 99th percentile, the nearest value each; None without values."""
        ordered = sorted(self._values)
        if not ordered:
            return None
        return {f"p{p}": ordered[round(p / 100 * (len(ordered) - 1))] for p in (50, 95, 99)}
