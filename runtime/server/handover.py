"""How the HTTP process and an engine get to talk: whoever started them sends each one end of a new pair of sockets.

Either of them can therefore be started again, and the other goes on with the next connection.
"""

import contextlib
import socket
from collections.abc import Iterator


def connect(http: socket.socket, engine: socket.socket, replica: int) -> None:
    """Makes a connection for the processes at the other ends of `http` and `engine`, which is that of `replica`."""
    for control, connection in zip((http, engine), socket.socketpair(), strict=True):
        # One that is gone needs none; when it is started again, both get another.
        with connection, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(control, [bytes([replica])], [connection.fileno()])


def take(control: socket.socket) -> tuple[int, socket.socket] | None:
    """The next connection and its replica; None once the other end of `control` is closed."""
    data, fds, _, _ = socket.recv_fds(control, 1, 1)
    return (data[0], socket.socket(fileno=fds[0])) if data else None


def connections(control: socket.socket) -> Iterator[socket.socket]:
    """All that come, one after the other."""
    while (taken := take(control)) is not None:
        yield taken[1]
