"""Connects the HTTP process with an engine: the launcher sends each of them one end of a new pair of sockets.

Either process can therefore be restarted, and the other one continues with the next connection.
"""

import contextlib
import socket
from collections.abc import Iterator


def connect(http: socket.socket, engine: socket.socket, replica: int) -> None:
    """Send a new connection to the HTTP process and to the engine of `replica`, over their control sockets."""
    for control, connection in zip((http, engine), socket.socketpair(), strict=True):
        # A process that has ended gets no connection. When it is restarted, both get a new one.
        with connection, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(control, [bytes([replica])], [connection.fileno()])


def receive_connection(control: socket.socket) -> tuple[int, socket.socket] | None:
    """Receive the next connection and the number of its replica; None once the launcher has closed `control`."""
    data, fds, _, _ = socket.recv_fds(control, 1, 1)
    return (data[0], socket.socket(fileno=fds[0])) if data else None


def connections(control: socket.socket) -> Iterator[socket.socket]:
    """Yield the connections that arrive over `control`, until the launcher closes it."""
    while (received := receive_connection(control)) is not None:
        yield received[1]
