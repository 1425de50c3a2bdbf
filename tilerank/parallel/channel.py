"""Control messages from rank 0 to all other ranks, over a tree of sockets.

Rank 0 sends to the ranks of its own host and to the first rank ("leader") of every other host; a leader forwards to the
ranks of its host. The sockets are unix sockets with abstract names inside a host, and TCP between hosts. Every link has
two sockets, one for messages and one for the watch (see `watch.py`).
"""

import contextlib
import select
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from .errors import GroupError
from .watch import Reason, Watch

LENGTH = struct.Struct("<I")
LONGEST = 256 << 20  # bytes of one message; a longer one is a bug, or does not come from a rank


@dataclass(frozen=True)
class Link:
    """Both sockets of a link to one neighbour."""

    rank: int
    data: socket.socket
    watch: socket.socket

    @property
    def local(self) -> bool:
        """Same host: a unix socket, which can carry descriptors."""
        return self.data.family == socket.AF_UNIX


class Channel:
    """One rank's end of the tree: the link towards rank 0 (None on rank 0) and the links away from it."""

    def __init__(self, rank: int, up: Link | None, down: Mapping[int, Link], timeout_s: float) -> None:
        self.rank = rank
        self._up = up
        self._down = dict(down)
        self._timeout_s = timeout_s
        links = list(self._down.values()) + ([up] if up else [])
        for link in links:
            link.data.settimeout(timeout_s)
        self.watch = Watch(rank, {link.rank: link.watch for link in links}, timeout_s)
        self._closed = False

    def fileno(self) -> int:
        """Return a descriptor for poll that is readable once a rank is lost; `check` then raises. For an idle rank
        0."""
        return self.watch.fileno()

    def check(self) -> None:
        """Raise GroupError if a rank is lost, or if this rank has left."""
        if self._closed:
            raise GroupError(f"rank {self.rank} itself has left the group")
        self.watch.check()

    def send(self, message: bytes) -> None:
        """Send `message` from rank 0 to all other ranks. GroupError if one is lost or does not read it in time."""
        if self.rank != 0:
            raise GroupError(f"rank {self.rank} tried to send a control message; only rank 0 does")
        self.check()
        self._hand_down(message)

    def receive(self) -> bytes:
        """Return the next message of rank 0. For all ranks but rank 0.

        Blocks without CPU time until rank 0 sends. GroupError once a rank is lost, or once rank 0 is stuck (see
        watch.py).
        """
        if self._up is None:
            raise GroupError("rank 0 has no rank to receive control messages from")
        if self._closed:
            self.check()
        poll = select.poll()
        poll.register(self._up.data, select.POLLIN)
        poll.register(self.watch, select.POLLIN)
        if self._up.data.fileno() not in (number for number, _ in poll.poll()):
            self.check()  # only once nothing is left to read: messages sent before the failure still count
        try:
            (length,) = LENGTH.unpack(self._read(self._up, LENGTH.size))
            if length > LONGEST:
                raise GroupError(f"a control message of {length} bytes was announced, {LONGEST} are allowed")
            message = self._read(self._up, length)
        except OSError as error:
            raise self._broken(self._up, error) from error
        self._hand_down(message)
        return message

    def share_fd(self, fd: int | None) -> int:
        """Pass the descriptor `fd` from the host's first rank to the other ranks of the host, which pass None."""
        if fd is None:
            if self._up is None or not self._up.local:
                raise GroupError(f"rank {self.rank} has no rank on its host to get a descriptor from")
            try:
                _, fds, _, _ = socket.recv_fds(self._up.data, 1, 1)
            except OSError as error:
                raise self._broken(self._up, error) from error
            if not fds:
                raise self._broken(self._up, EOFError())
            return fds[0]
        for link in self._down.values():
            if link.local:
                try:
                    socket.send_fds(link.data, [b"m"], [fd])
                except OSError as error:
                    raise self._broken(link, error) from error
        return fd

    def close(self) -> None:
        """Leave the group; the other ranks are notified."""
        if self._closed:
            return
        self._closed = True
        self.watch.close()
        for link in [*self._down.values(), *([self._up] if self._up else [])]:
            link.data.close()

    def _hand_down(self, message: bytes) -> None:
        if len(message) > LONGEST:
            raise GroupError(f"a control message has {len(message)} bytes, {LONGEST} are allowed")
        frame = LENGTH.pack(len(message)) + message
        for link in self._down.values():
            try:
                link.data.sendall(frame)
            except OSError as error:
                raise self._broken(link, error) from error

    def _read(self, link: Link, size: int) -> bytes:
        """Read exactly `size` bytes. Once the first byte has arrived, the rest must arrive before the deadline."""
        buffer = bytearray(size)
        view = memoryview(buffer)
        while view:
            count = link.data.recv_into(view)
            if count == 0:
                raise ConnectionResetError
            view = view[count:]
        return bytes(buffer)

    def _broken(self, link: Link, error: Exception) -> GroupError:
        """Return the error to raise. The watch names the right rank, but may notice a moment after the data socket."""
        if isinstance(error, TimeoutError):
            self.watch.fail(link.rank, Reason.STUCK)
        elif not self.watch.await_failure():
            self.watch.fail(link.rank, Reason.GONE)
        return self.watch.error("a control message")


def open_link(rank: int, data: socket.socket, watch: socket.socket) -> Link:
    """Return a link that detects even that the other host lost power: probes start after 10 s and give up 15 s
    later."""
    for end in (data, watch):
        if end.family == socket.AF_UNIX:
            continue
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
            with contextlib.suppress(OSError):  # the slower defaults of the system then apply
                end.setsockopt(socket.IPPROTO_TCP, option, value)
    return Link(rank, data, watch)
