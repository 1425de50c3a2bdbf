"""The connections at which a rank expects other ranks, and at which strangers may arrive as well."""

import logging
import math
import select
import socket
import time

from .credentials import check_user

logger = logging.getLogger(__name__)

HELLO_S = 5.0
"""How long a connection may take to send its hello."""
MAX_CALLERS = 64
"""Connections without a hello. The oldest gives way to a new one: ranks send theirs at once."""


class Callers:
    """The connections to a listener that have sent no whole hello yet, at most MAX_CALLERS of them.

    hello_size: bytes of a hello. A connection that has not sent as many within HELLO_S is refused; it delays no other.
    """

    def __init__(self, listener: socket.socket, hello_size: int) -> None:
        self._listener = listener
        self._hello_size = hello_size
        listener.setblocking(False)
        self._said: dict[socket.socket, bytes] = {}  # in order of arrival
        self._until: dict[socket.socket, float] = {}

    def __enter__(self) -> "Callers":
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._said:
            connection.close()

    def hellos(self, timeout_s: float) -> list[tuple[socket.socket, bytes]]:
        """Return the connections that have sent their hello. Waits at most so long, and may return none."""
        first = min(self._until.values(), default=math.inf)
        timeout_s = max(min(timeout_s, first - time.monotonic()), 0)
        ready, _, _ = select.select([self._listener, *self._said], [], [], timeout_s)
        if self._listener in ready:
            ready += self._accept()
        found = []
        for connection in ready:
            if connection is not self._listener and self._receive(connection):
                found.append((connection, self._forget(connection)))
        for connection in [one for one, until in self._until.items() if until <= time.monotonic()]:
            self._drop(connection, f"no hello within {HELLO_S:g} s")
        return found

    def _accept(self) -> list[socket.socket]:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:  # it has left again
            return []
        try:
            check_user(connection)
        except PermissionError as error:
            refuse(connection, str(error))
            return []
        if len(self._said) == MAX_CALLERS:
            self._drop(next(iter(self._said)), f"more than {MAX_CALLERS} without a hello")
        connection.setblocking(False)
        self._said[connection] = b""
        self._until[connection] = time.monotonic() + HELLO_S
        return [connection]

    def _receive(self, connection: socket.socket) -> bool:
        """Return whether the hello is whole."""
        if connection not in self._said:  # dropped a moment ago
            return False
        try:
            data = connection.recv(self._hello_size - len(self._said[connection]))
        except BlockingIOError:
            return False
        except OSError as error:
            self._drop(connection, str(error))
            return False
        if not data:
            self._drop(connection, "it was closed before its hello")
            return False
        self._said[connection] += data
        return len(self._said[connection]) == self._hello_size

    def _forget(self, connection: socket.socket) -> bytes:
        del self._until[connection]
        return self._said.pop(connection)

    def _drop(self, connection: socket.socket, why: str) -> None:
        self._forget(connection)
        refuse(connection, why)


def refuse(connection: socket.socket, why: str) -> None:
    logger.warning("refused a connection to this rank's channel: %s", why)
    connection.close()
