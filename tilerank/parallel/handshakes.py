"""Accepts the connections of other ranks and refuses those of any other process."""

import contextlib
import logging
import math
import secrets
import select
import socket
import time
from dataclasses import dataclass

from .credentials import HELLO, NONCE, OTHER_SECRET, accepts, check_user, refusal

logger = logging.getLogger(__name__)

HELLO_S = 5.0
"""How long a connection may take to send its hello."""
MAX_PENDING = 64
"""Connections without a whole hello. The oldest gives way to a new one: ranks send theirs at once."""


@dataclass(frozen=True)
class AuthenticatedPeer:
    """A connection whose other end has proven that it has the secret, and that waits for `reply`."""

    connection: socket.socket
    rank: int
    kind: int
    reply: bytes

    def admit(self) -> bool:
        """Prove that this rank has the secret, too. Return False if the peer has left."""
        with contextlib.suppress(OSError):
            self.connection.sendall(self.reply)
            return True
        self.connection.close()
        return False


class PendingHandshakes:
    """The connections to a listener that have sent no whole hello yet, at most MAX_PENDING of them.

    A connection that has not sent its hello (see credentials.py) within HELLO_S is refused; it delays no other.
    `refused_secret`: a peer was refused because it has another secret.
    """

    def __init__(self, listener: socket.socket, secret: bytes) -> None:
        self._listener = listener
        self._secret = secret
        listener.setblocking(False)
        self._nonces: dict[socket.socket, bytes] = {}
        self._received: dict[socket.socket, bytes] = {}  # in order of arrival
        self._deadlines: dict[socket.socket, float] = {}
        self.refused_secret = False

    def __enter__(self) -> "PendingHandshakes":
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._received:
            connection.close()

    def completed(self, timeout_s: float) -> list[AuthenticatedPeer]:
        """Wait at most `timeout_s` and return the peers that have proven to have the secret, possibly none."""
        first = min(self._deadlines.values(), default=math.inf)
        timeout_s = max(min(timeout_s, first - time.monotonic()), 0)
        poll = select.poll()  # a server has more open files than select takes
        open_ones = {connection.fileno(): connection for connection in (self._listener, *self._received)}
        for number in open_ones:
            poll.register(number, select.POLLIN)
        ready = [open_ones[number] for number, _ in poll.poll(math.ceil(1e3 * timeout_s))]
        if self._listener in ready:
            ready += self._accept()
        found = []
        for connection in ready:
            if connection is not self._listener and self._receive(connection):
                found += self._check(connection)
        for connection in [one for one, deadline in self._deadlines.items() if deadline <= time.monotonic()]:
            self._drop(connection, f"no hello within {HELLO_S:g} s")
        return found

    def _accept(self) -> list[socket.socket]:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:  # it has left again
            return []
        nonce = secrets.token_bytes(NONCE)
        connection.setblocking(False)
        try:
            check_user(connection)
            connection.sendall(nonce)  # fits into the buffer of a new connection
        except OSError as error:  # PermissionError for another user
            refuse(connection, str(error))
            return []
        if len(self._received) == MAX_PENDING:
            self._drop(next(iter(self._received)), f"more than {MAX_PENDING} without a hello")
        self._nonces[connection] = nonce
        self._received[connection] = b""
        self._deadlines[connection] = time.monotonic() + HELLO_S
        return [connection]

    def _receive(self, connection: socket.socket) -> bool:
        """Return whether the hello is whole."""
        if connection not in self._received:  # dropped a moment ago
            return False
        try:
            data = connection.recv(HELLO.size - len(self._received[connection]))
        except BlockingIOError:
            return False
        except OSError as error:
            self._drop(connection, str(error))
            return False
        if not data:
            self._drop(connection, "it was closed before its hello")
            return False
        self._received[connection] += data
        return len(self._received[connection]) == HELLO.size

    def _check(self, connection: socket.socket) -> list[AuthenticatedPeer]:
        nonce, hello = self._nonces[connection], self._received[connection]
        self._forget(connection)
        if (accepted := accepts(hello, nonce, self._secret)) is not None:
            return [AuthenticatedPeer(connection, *accepted)]
        rank = HELLO.unpack(hello)[0]
        self.refused_secret = True
        refuse(connection, f"it says that it is rank {rank}, but has another TILERANK_SECRET", OTHER_SECRET)
        return []

    def _forget(self, connection: socket.socket) -> None:
        del self._deadlines[connection], self._received[connection], self._nonces[connection]

    def _drop(self, connection: socket.socket, why: str) -> None:
        self._forget(connection)
        refuse(connection, why)


def refuse(connection: socket.socket, why: str, code: int | None = None) -> None:
    """Close the connection, and log why. `code`: the reply that a rank at the other end gets first; None: none."""
    logger.warning("refused a connection to this rank: %s", why)
    if code is not None:
        with contextlib.suppress(OSError):
            connection.sendall(refusal(code))
    connection.close()
