"""Failure detection: every rank notices that another rank has died or is stuck, whatever it is blocked in itself.

Every link of the channel has a second socket, which carries heartbeats and failure reports. One thread per rank polls
these sockets. End of file on one means that the process at the other end has ended: the kernel closes the socket,
whatever killed the process. A neighbour without a heartbeat for `timeout_s` is stuck: stopped by SIGSTOP or a debugger,
or starved. Heartbeats come from a separate thread, so the main thread may be idle or busy for any time. A rank reports
a failure over its other links, so that all ranks blame the same one, and `on_failure` callbacks wake the main thread.
"""

import contextlib
import logging
import math
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from enum import IntEnum

from .credentials import peer_credentials
from .errors import GroupError

logger = logging.getLogger(__name__)

REPORT = struct.Struct("<IIQ")  # Reason or HEARTBEAT, rank, number of the collective during which it failed
HEARTBEAT = 0

HEARTBEATS = 8  # per timeout
MAX_INTERVAL_S = 10.0  # between heartbeats, if the timeout is long

# When a rank stops, the deadlines of the others pass one after the other, and a rank that waits for a waiting rank
# blames the wrong one. All ranks number their collectives alike, so the report with the lowest number is right.
SETTLE_S = 0.3

# At the end of a job ranks leave one after the other, while others may still be in the last collective or have messages
# to read. A rank that still needs the one that left fails after this time.
LEAVE_S = 1.0


class Reason(IntEnum):
    """Why a rank is lost."""

    GONE = 1
    LEFT = 2
    STUCK = 3


_REASONS = frozenset(Reason)


class Watch:
    """Watches the neighbours of `rank` over `links`, which are keyed by the neighbour's rank.

    `failed` is the first rank known to be lost, with the reason, or None.
    """

    def __init__(self, rank: int, links: Mapping[int, socket.socket], timeout_s: float) -> None:
        self.rank = rank
        self.timeout_s = timeout_s
        self.failed: tuple[int, Reason] | None = None
        self._failed_step = 0
        self._settled_at = 0.0
        self._links = dict(links)
        self._callbacks: list[Callable[[int, Reason], None]] = []
        self._unparsed = dict.fromkeys(links, b"")
        self._leaving: dict[int, float] = {}  # rank -> when it counts as lost
        self._interval_s = min(timeout_s / HEARTBEATS, MAX_INTERVAL_S)
        # Heartbeats due since the last one, by neighbour. Intervals are counted, not seconds: if this process itself is
        # stopped, by Ctrl-Z or a debugger, one interval passes. A neighbour is absent before its first heartbeat,
        # because it may still be joining, which has deadlines of its own.
        self._missed: dict[int, int] = {}
        self._lock = threading.Lock()
        self._failure_known = threading.Event()
        self._alarm = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        for link in self._links.values():
            link.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="tilerank-watch", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """A descriptor for poll: readable once a failure is known."""
        return self._alarm

    def on_failure(self, callback: Callable[[int, Reason], None]) -> None:
        """Call `callback(rank, reason)` once, from the watch's thread, or from here if the failure is known already."""
        with self._lock:
            if self.failed is None:
                self._callbacks.append(callback)
                return
            failed = self.failed
        callback(*failed)

    def check(self, operation: str = "") -> None:
        """Raise GroupError if a rank is lost. `operation`: what this rank was doing, for the sentence."""
        if self.failed is not None:
            raise self.error(operation)

    def error(self, operation: str = "") -> GroupError:
        """The error for the known failure."""
        during = f" during {operation}" if operation else ""
        if self.failed is None:
            return GroupError(f"a rank of another host is lost{during}")
        if self.failed[1] is Reason.STUCK:
            time.sleep(max(self._settled_at - time.monotonic(), 0))
        rank, reason = self.failed
        if reason is Reason.STUCK:
            text = f"rank {rank} did not answer within {self.timeout_s:g} s{during}: stopped, stuck or far too slow"
        elif reason is Reason.LEFT:
            text = f"rank {rank} has left the group{during}"
        else:
            text = f"rank {rank} is gone{during}: its process has ended or its host cannot be reached"
        return GroupError(text)

    def await_failure(self) -> bool:
        """Wait for a report, a little longer than a rank takes to leave. Return whether a failure is known."""
        return self._failure_known.wait(LEAVE_S + 0.5)

    def fail(self, rank: int, reason: Reason, step: int = 0, source: int | None = None) -> None:
        """Record that `rank` is lost, unless another rank was lost before, and report it to all ranks but `source`.

        `step`: the number of the collective that waited for a stuck rank, or 0 if its heartbeats ended.
        """
        with self._lock:
            if self.failed is None:
                self._settled_at = time.monotonic() + SETTLE_S
            elif not self._corrects(reason, step):
                return
            self.failed, self._failed_step = (rank, reason), step
            callbacks, self._callbacks = self._callbacks, []
            for peer, link in self._links.items():
                if peer not in (rank, source):
                    with contextlib.suppress(OSError):  # that rank is ending as well
                        link.send(REPORT.pack(reason, rank, step))
        if reason is not Reason.LEFT:
            logger.debug("rank %d: lost rank %d (%s)", self.rank, rank, reason.name)
        for callback in callbacks:
            callback(rank, reason)
        os.eventfd_write(self._alarm, 1)
        self._failure_known.set()

    def stuck_process(self) -> int | None:
        """Return the process id of the stuck rank, if it is a neighbour on this host that sends no heartbeats.

        It cannot end by itself, and launchers such as mpirun wait for their ranks without limit.
        """
        if self.failed is None or self.failed[1] is not Reason.STUCK:
            return None
        rank = self.failed[0]
        if self._missed.get(rank, 0) <= 2 or self._links[rank].family != socket.AF_UNIX:
            return None
        pid, _ = peer_credentials(self._links[rank])
        return pid or None

    def close(self) -> None:
        """Report that this rank leaves, and close the links."""
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        with self._lock:
            self._callbacks = []  # they refer to groups, which refer to this watch and to shared memory
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.send(REPORT.pack(Reason.LEFT, self.rank, 0))
            link.close()
        os.close(self._stop)
        os.close(self._alarm)

    def _corrects(self, reason: Reason, step: int) -> bool:
        if self.failed is None or reason is not Reason.STUCK or self.failed[1] is not Reason.STUCK:
            return False
        return step < self._failed_step and time.monotonic() < self._settled_at

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._stop, select.POLLIN)
        peers = {link.fileno(): peer for peer, link in self._links.items()}
        for number in peers:
            poll.register(number, select.POLLIN)
        heartbeat_at = time.monotonic() if peers else math.inf
        while True:
            wake_at = min(heartbeat_at, *self._leaving.values(), math.inf)
            wait_ms = None if wake_at == math.inf else max((wake_at - time.monotonic()) * 1000, 0) + 1
            for number, _ in poll.poll(wait_ms):
                if number == self._stop:
                    return
                if not self._receive(peers[number]):
                    poll.unregister(number)
            now = time.monotonic()
            if now >= heartbeat_at:
                heartbeat_at = now + self._interval_s
                self._exchange_heartbeats()
            for rank in [rank for rank, at in self._leaving.items() if at <= now]:
                del self._leaving[rank]
                self.fail(rank, Reason.LEFT)

    def _exchange_heartbeats(self) -> None:
        """Send a heartbeat over every link, and fail the neighbours that have sent none for `timeout_s`."""
        for link in self._links.values():
            with contextlib.suppress(OSError):  # closed, or stopped for so long that its buffer is full
                link.send(REPORT.pack(HEARTBEAT, self.rank, 0))
        # The last heartbeat is up to one interval older than the stop, and its interval counts as a whole one.
        allowed = math.ceil(self.timeout_s / self._interval_s) + 1
        for peer in self._missed:
            self._missed[peer] += 1
            if self._missed[peer] > allowed:
                self.fail(peer, Reason.STUCK)

    def _receive(self, peer: int) -> bool:
        """Process what a neighbour has sent. Return False at the end of its stream."""
        try:
            data = self._links[peer].recv(1024)
        except BlockingIOError:
            return True
        except OSError:  # connection reset, or keep-alive found the host unreachable
            data = b""
        if not data:
            self._missed.pop(peer, None)
            if peer not in self._leaving:
                self.fail(peer, Reason.GONE)
            return False
        self._missed[peer] = 0
        data = self._unparsed[peer] + data
        whole = len(data) // REPORT.size * REPORT.size
        self._unparsed[peer] = data[whole:]
        for reason, rank, step in REPORT.iter_unpack(data[:whole]):
            if reason == Reason.LEFT:
                self._leaving.setdefault(rank, time.monotonic() + LEAVE_S)
            elif reason in _REASONS:
                self.fail(rank, Reason(reason), step, source=peer)
            elif reason != HEARTBEAT:
                logger.warning("rank %d sent a report of the unknown kind %d and counts as lost", peer, reason)
                self.fail(peer, Reason.GONE)
        return True
