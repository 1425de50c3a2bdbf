"""How the HTTP process and an engine get to talk: whoever started them sends each one end of a new pair of sockets.

Either of them can therefore be started again, and the other goes on with the next connection.
"""

import contextlib
import socket
from collections.abc import Iterator


def connect(*controls: socket.socket) -> None:
    """Makes a connection for the two processes at the other ends of `controls`."""
    for control, connection in zip(controls, socket.socketpair(), strict=True):
        # One that is gone needs none; when it is started again, both get another.
        with connection, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(control, [b"c"], [connection.fileno()])


def take(control: socket.socket) -> socket.socket | None:
    """The next connection; None once the other end of `control` is closed."""
    data, fds, _, _ = socket.recv_fds(control, 1, 1)
    return socket.socket(fileno=fds[0]) if data else None


def connections(control: socket.socket) -> Iterator[socket.socket]:
    """All that come, one after the other."""
    while (connection := take(control)) is not None:
        yield connection
