"""The listening socket of the server: at an address of TCP, or at a path."""

import contextlib
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..errors import LaunchError

BACKLOG = 1024
"""Connections that wait to be accepted."""


@dataclass(frozen=True)
class TcpAddress:
    """Port 0 stands for any free one. scheme: of the server's address, http or https."""

    host: str
    port: int
    scheme: str = "http"

    def listen(self) -> socket.socket:
        """Return a listening socket. Raises LaunchError."""
        kind, flags = socket.SOCK_STREAM, socket.AI_PASSIVE
        try:
            family, _, _, _, address = socket.getaddrinfo(self.host, self.port, type=kind, flags=flags)[0]
            listener = socket.socket(family, kind)
        except OSError as e:
            raise LaunchError(f"--host {self.host}: {e.strerror}") from e
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError as e:
            listener.close()
            raise LaunchError(f"--host {self.host} --port {self.port} cannot be listened on: {e.strerror}") from e
        return listener

    def url(self, listener: socket.socket) -> str:
        """Return the address of a listening socket for people and clients."""
        host, port = listener.getsockname()[:2]
        return f"{self.scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Enter the time in which this process, or one that it starts, listens."""
        yield


@dataclass(frozen=True)
class UnixAddress:
    """A path at which a unix socket is made."""

    path: Path

    def listen(self) -> socket.socket:
        """Return a listening socket at the path, in place of one that a killed server has left. Raises LaunchError."""
        if self._is_left():
            self.path.unlink()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(self.path))
            listener.listen(BACKLOG)
        except OSError as e:
            listener.close()
            raise LaunchError(f"--uds {self.path} cannot be listened on: {e.strerror or e}") from e
        return listener

    def url(self, listener: socket.socket) -> str:
        """Return the address of a listening socket for people."""
        return f"unix:{listener.getsockname()}:"

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Enter the time in which this process, or one that it starts, listens. The path is free after it."""
        try:
            yield
        finally:
            self.path.unlink(missing_ok=True)

    def _is_left(self) -> bool:
        """Return whether the path is a socket at which nothing listens."""
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            if stat.S_ISSOCK(self.path.stat().st_mode):
                try:
                    client.connect(str(self.path))
                except ConnectionRefusedError:
                    return True
        return False


Address = TcpAddress | UnixAddress
