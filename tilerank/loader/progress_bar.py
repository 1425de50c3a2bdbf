"""Shows how far loading is."""

import logging
import sys
import time

log = logging.getLogger(__name__)


class ProgressBar:
    """Shows how much of `total` bytes is loaded: a bar if stderr is a terminal, else a log line every ten seconds.

    shown: False on all ranks but one.
    """

    WIDTH = 30
    SECONDS_BETWEEN_FRAMES = 0.1
    SECONDS_BETWEEN_LINES = 10.0

    def __init__(self, total: int, shown: bool) -> None:
        self._total = max(total, 1)
        self._done = 0
        self._started = time.monotonic()
        self._frame = self._started
        self._bar = shown and sys.stderr.isatty()
        self._lines = shown and not self._bar

    def advance(self, nbytes: int) -> None:
        self._done += nbytes
        now = time.monotonic()
        if self._bar and (self._done == self._total or now - self._frame > self.SECONDS_BETWEEN_FRAMES):
            self._frame = now
            sys.stderr.write(f"\r{self._text(now)}\033[K")
            sys.stderr.flush()
        elif self._lines and now - self._frame > self.SECONDS_BETWEEN_LINES:
            self._frame = now
            log.info("%s", self._text(now))

    def close(self) -> None:
        if self._bar:
            sys.stderr.write("\n")
            sys.stderr.flush()

    def _text(self, now: float) -> str:
        share = self._done / self._total
        filled = int(share * self.WIDTH)
        rate = self._done / max(now - self._started, 1e-9)
        bar = "#" * filled + "." * (self.WIDTH - filled)
        amount = f"{self._done / 1e9:.2f}/{self._total / 1e9:.2f} GB {rate / 1e9:.2f} GB/s"
        left = "" if self._done >= self._total else f", {_duration((self._total - self._done) / max(rate, 1.0))} left"
        return f"loading [{bar}] {share:4.0%} {amount}{left}"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
