"""A progress bar of requests and of the tokens that they generate."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from tqdm.auto import tqdm

LOG_INTERVAL_S = 10.0
"""Between two updates of the bar in a log, which gets a line for each."""


def command_interval_s() -> float:
    """Return the shortest time between two updates of a bar of a command."""
    return 0.5 if sys.stderr is not None and sys.stderr.isatty() else LOG_INTERVAL_S


class Progress:
    """A bar on stderr. total: requests. unit: what one is called. done: those of an earlier run. shown: False for no
    bar. interval_s: shortest time between two updates.

    Requests are added in any thread. `show` is called in that of the bar, as notebooks need it.
    """

    def __init__(self, total: int, unit: str, *, done: int = 0, shown: bool = True, interval_s: float = 0.5) -> None:
        self._bar = tqdm(total=total, initial=done, unit=f" {unit}", disable=not shown, mininterval=interval_s)
        self._done = done
        self._tokens = 0
        self._began = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.show()
        self._bar.close()

    def add(self, tokens: int, requests: int = 1) -> None:
        """Count requests that are done, with the tokens that were generated for them, or read if they generate none."""
        self._done += requests
        self._tokens += tokens

    def show(self) -> None:
        """Update the bar."""
        speed = self._tokens / max(time.monotonic() - self._began, 1e-6)
        self._bar.set_postfix_str(f"{speed:.1f} tokens/s", refresh=False)
        self._bar.update(self._done - self._bar.n)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Enter a time in which other lines are written to stderr, with the bar below them."""
        with self._bar.external_write_mode(sys.stderr):
            yield
