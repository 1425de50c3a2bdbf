"""Connects the HTTP process with an engine: the launcher sends each of them one end of a new pair of sockets.

Either process can therefore be restarted, and the other one continues with the next connection.
"""

import contextlib
import socket
from collections.abc import Iterator

_NUMBER_BYTES = 2
"""Of the number of an engine: a host may have more than 256, because a replica may have two."""


def connect(http: socket.socket, engine: socket.socket, number: int) -> None:
    """Send a new connection to the HTTP process and to the engine of this number, over their control sockets."""
    for control, connection in zip((http, engine), socket.socketpair(), strict=True):
        # A process that has ended gets no connection. When it is restarted, both get a new one.
        with connection, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            send_connection(control, connection, number)


def send_connection(control: socket.socket, connection: socket.socket, number: int) -> None:
    """Send a connection to the engine of this number, or from it, over a control socket."""
    socket.send_fds(control, [number.to_bytes(_NUMBER_BYTES)], [connection.fileno()])


def receive_connection(control: socket.socket) -> tuple[int, socket.socket] | None:
    """Receive the number of the next engine and its connection; None once the launcher has closed `control`."""
    data, fds, _, _ = socket.recv_fds(control, _NUMBER_BYTES, 1)
    return (int.from_bytes(data), socket.socket(fileno=fds[0])) if data else None


def connections(control: socket.socket) -> Iterator[socket.socket]:
    """Yield the connections that arrive over `control`, until the launcher closes it."""
    while (received := receive_connection(control)) is not None:
        yield received[1]
