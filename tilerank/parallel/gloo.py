"""Collectives over TCP, through gloo."""

import contextlib
import datetime
import logging
import time
import weakref
from collections.abc import Sequence
from typing import Any

from torch._C._distributed_c10d import ProcessGroupGloo, Store

from .errors import GroupError
from .group import PairwiseGroup, Step
from .watch import Reason, Watch

logger = logging.getLogger(__name__)


class GlooGroup(PairwiseGroup):
    """A group over TCP, through gloo. `address`: the local address to bind, at which the other ranks reach this one."""

    def __init__(
        self,
        store: Store,
        rank: int,
        address: str,
        timeout_s: float,
        watch: Watch,
        names: Sequence[int],
    ) -> None:
        super().__init__(rank, len(names), timeout_s, watch, names)
        gloo: Any = ProcessGroupGloo  # its type stubs lack the members used here
        options = gloo._Options()
        options._timeout = datetime.timedelta(seconds=timeout_s)
        options._threads = 1
        # The address is explicit: by default gloo resolves the host's name, which is often a loopback address.
        options._devices = [gloo.create_device(hostname=address)]
        try:
            backends = [gloo(store, rank, self.size, options)]
        except RuntimeError as error:
            watch.check("connecting gloo")
            raise GroupError(f"rank {names[rank]}: gloo could not connect the ranks: {_first_line(error)}") from error
        self._backends: list[Any] = backends
        # An interpreter that exits while gloo's threads run is aborted.
        self._release = weakref.finalize(self, _release, backends)

    def close(self) -> None:
        self._release()

    def _transfer(self, steps: Sequence[Step], doing: str) -> None:
        if not self._backends:
            raise GroupError(f"{doing} in a group that was closed")
        backend, deadline = self._backends[0], time.monotonic() + self._timeout_s
        current = self.rank
        try:
            works = []
            for kind, current, buffer in steps:
                start = backend.send if kind == "send" else backend.recv
                works.append((current, start([buffer], current, 0)))
            for current, work in works:  # noqa: B007
                work.wait(datetime.timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        except RuntimeError as error:
            raise self._lost(current, doing, error) from error

    def _lost(self, peer: int, doing: str, error: RuntimeError) -> GroupError:
        """Return the error. gloo distinguishes a timeout only by its text; the watch has the first lost rank."""
        if "Timed out" in str(error):
            self._stuck(peer)
        elif not self._watch.await_failure():
            logger.debug("gloo: %s", _first_line(error))
            self._watch.fail(self._names[peer], Reason.GONE)
        return self._watch.error(doing)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _release(backends: list[Any]) -> None:
    """Dropping the last reference joins gloo's threads."""
    for backend in backends:
        with contextlib.suppress(RuntimeError):  # the group is already broken
            backend.shutdown()
    backends.clear()
