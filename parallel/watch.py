"""Noticing at once that a rank is gone, wherever the others happen to be.

Every link of the channel has a second socket on which nothing is said while all is well. One thread a rank sleeps on
these: the end of such a socket is the end of its process (the kernel closes it, whatever killed the process), and the
news is passed on over the other links, so that every rank blames the same one. What the main thread is blocked in is
woken through `on_failure`.
"""

import contextlib
import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from enum import IntEnum

from .errors import GroupError

logger = logging.getLogger(__name__)

NEWS = struct.Struct("<IIQ")  # what happened, to which rank, at which of its collectives

# When a rank stops, the others' deadlines pass one after the other, and one that waits for a rank that waits itself
# blames the wrong one. They count the same collectives, so the blame of the one furthest behind is the right one.
SETTLE_S = 0.3

# At the end of a job ranks leave one after the other, some while others are still in the last collective or have not
# read the last message. Only who misses a rank after this long misses it for good.
LEAVE_S = 1.0


class Reason(IntEnum):
    """Why a rank can no longer be counted on."""

    GONE = 1
    LEFT = 2
    STUCK = 3


class Watch:
    """The links of one rank to its neighbours, keyed by the neighbour's rank, and the first failure heard of."""

    def __init__(self, rank: int, links: Mapping[int, socket.socket], timeout_s: float) -> None:
        self.rank = rank
        self.timeout_s = timeout_s
        self.failed: tuple[int, Reason] | None = None
        self._failed_step = 0
        self._settled = 0.0
        self._links = dict(links)
        self._callbacks: list[Callable[[int, Reason], None]] = []
        self._heard = dict.fromkeys(links, b"")
        self._leaving: dict[int, float] = {}  # until when
        self._lock = threading.Lock()
        self._known = threading.Event()
        self._alarm = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        for link in self._links.values():
            link.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="tilerank-watch", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Readable from the moment that a failure is known: for the poll set of whoever waits for something else."""
        return self._alarm

    def on_failure(self, callback: Callable[[int, Reason], None]) -> None:
        """Call `callback(rank, reason)` once, from the watching thread (or from here, if it already happened)."""
        with self._lock:
            if self.failed is None:
                self._callbacks.append(callback)
                return
            failed = self.failed
        callback(*failed)

    def check(self, doing: str = "") -> None:
        """Raise GroupError if a rank is known to be lost."""
        if self.failed is not None:
            raise self.error(doing)

    def error(self, doing: str = "") -> GroupError:
        """The sentence about the failure that is known."""
        if self.failed is None:
            return GroupError(f"a rank of another host is lost{f' during {doing}' if doing else ''}")
        if self.failed[1] is Reason.STUCK:
            time.sleep(max(self._settled - time.monotonic(), 0))
        rank, reason = self.failed
        during = f" during {doing}" if doing else ""
        if reason is Reason.STUCK:
            text = f"rank {rank} did not answer within {self.timeout_s:g} s{during}: stopped, stuck or far too slow"
        elif reason is Reason.LEFT:
            text = f"rank {rank} has left the group{during}"
        else:
            text = f"rank {rank} is gone{during}: its process has ended or its host cannot be reached"
        return GroupError(text)

    def await_failure(self) -> bool:
        """Give the news a moment to arrive, more than a rank takes to leave; True once a failure is known."""
        return self._known.wait(LEAVE_S + 0.5)

    def fail(self, rank: int, reason: Reason, step: int = 0, source: int | None = None) -> None:
        """Record that `rank` is lost, unless another was lost before, and pass it on to all but `source`.

        `step`: which collective was waiting for a rank that is stuck.
        """
        with self._lock:
            if self.failed is None:
                self._settled = time.monotonic() + SETTLE_S
            elif not self._corrected(reason, step):
                return
            self.failed, self._failed_step = (rank, reason), step
            callbacks, self._callbacks = self._callbacks, []
            for peer, link in self._links.items():
                if peer not in (rank, source):
                    with contextlib.suppress(OSError):  # that one is going too; it needs no news
                        link.send(NEWS.pack(reason, rank, step))
        if reason is not Reason.LEFT:
            logger.debug("rank %d: lost rank %d (%s)", self.rank, rank, reason.name)
        for callback in callbacks:
            callback(rank, reason)
        os.eventfd_write(self._alarm, 1)
        self._known.set()

    def close(self) -> None:
        """Say goodbye and let go of the links."""
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        with self._lock:
            self._callbacks = []  # whose owners hold this watch in turn, and memory that they share
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.send(NEWS.pack(Reason.LEFT, self.rank, 0))
            link.close()
        os.close(self._stop)
        os.close(self._alarm)

    def _corrected(self, reason: Reason, step: int) -> bool:
        if self.failed is None or reason is not Reason.STUCK or self.failed[1] is not Reason.STUCK:
            return False
        return step < self._failed_step and time.monotonic() < self._settled

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._stop, select.POLLIN)
        peers = {link.fileno(): peer for peer, link in self._links.items()}
        for number in peers:
            poll.register(number, select.POLLIN)
        while True:
            patience = min(self._leaving.values(), default=None)
            wait_ms = None if patience is None else max((patience - time.monotonic()) * 1000, 0) + 1
            for number, _ in poll.poll(wait_ms):
                if number == self._stop:
                    return
                if not self._listen(peers[number]):
                    poll.unregister(number)
            for rank in [rank for rank, until in self._leaving.items() if until <= time.monotonic()]:
                del self._leaving[rank]
                self.fail(rank, Reason.LEFT)

    def _listen(self, peer: int) -> bool:
        """Take what a neighbour says; False once there is no more to come."""
        try:
            said = self._links[peer].recv(1024)
        except BlockingIOError:
            return True
        except OSError:  # keep-alive gave up, connection reset: as good as the end
            said = b""
        if not said:
            if peer not in self._leaving:
                self.fail(peer, Reason.GONE)
            return False
        heard = self._heard[peer] + said
        whole = len(heard) // NEWS.size * NEWS.size
        self._heard[peer] = heard[whole:]
        for reason, rank, step in NEWS.iter_unpack(heard[:whole]):
            if reason == Reason.LEFT:
                self._leaving.setdefault(rank, time.monotonic() + LEAVE_S)
            else:
                self.fail(rank, Reason(reason), step, source=peer)
        return True
