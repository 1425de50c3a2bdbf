"""A server on two hosts: prefill ranks and the HTTP process on the first, decode ranks on the second. No torch.

The HTTP process listens at --master-addr and --master-port. Rank 0 of the decode ranks connects to it twice: for its
requests, as an engine on the host of the HTTP process does, and to read the memory of the prefill ranks. The HTTP
process serves that as well, because it outlives them. Both ends prove that they have TILERANK_SECRET.
"""

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tilerank.parallel.credentials import authenticate
from tilerank.parallel.errors import GroupError
from tilerank.parallel.handshakes import AuthenticatedPeer, PendingHandshakes, refuse
from tilerank.runtime.protocol.page_requests import SlotReader, serve_slots

from ..errors import LaunchError
from ..logs import say
from ..ranks.rendezvous import given_secret

log = logging.getLogger(__name__)

DECODE_ENGINE = 1
"""The number of the engine of the decode ranks, after that of the prefill ranks."""
REQUESTS, SLOTS = range(16, 18)
"""What a connection is for. Those between ranks have other numbers (parallel/rendezvous.py)."""
FRONT_FDS = "TILERANK_FRONT_FDS"
"""In the environment of the HTTP process: the socket at which it listens for the second host, and the memory files."""
WAIT_S = 3600.0
ATTEMPT_S = 5.0
RETRY_S = 0.2
LOST_S = 25
"""After which a host that does not answer counts as lost."""


@dataclass(frozen=True)
class Front:
    """The end of the first host. files: of the memory of the prefill ranks."""

    listener: socket.socket
    files: Sequence[int]
    secret: str

    @classmethod
    def inherited(cls, env: Mapping[str, str]) -> "Front | None":
        """Return what this process has inherited; None on a server of one host. Raises LaunchError without a secret."""
        if FRONT_FDS not in env:
            return None
        listener, *files = map(int, env[FRONT_FDS].split(","))
        return cls(socket.socket(fileno=listener), files, given_secret(env))

    def open(self, on_engine: Callable[[socket.socket], object]) -> None:
        """Accept connections in a thread. on_engine: is called there with each connection over which the decode ranks
        take requests."""
        threading.Thread(target=self._accept, args=[on_engine], name="tilerank-front", daemon=True).start()

    def _accept(self, on_engine: Callable[[socket.socket], object]) -> None:
        with PendingHandshakes(self.listener, self.secret.encode()) as handshakes:
            while True:
                try:
                    peers = handshakes.completed(WAIT_S)
                except OSError as e:  # such as too many open files: the server goes on, and the second host tries again
                    log.warning("the second host cannot be connected: %s", e.strerror)
                    time.sleep(RETRY_S)
                    continue
                for peer in peers:
                    self._take(peer, on_engine)

    def _take(self, peer: AuthenticatedPeer, on_engine: Callable[[socket.socket], object]) -> None:
        connection = peer.connection
        if peer.kind not in (REQUESTS, SLOTS):
            refuse(connection, f"rank {peer.rank} looks for a rank, found a server with --prefill-nodes")
        elif peer.admit():
            connection.setblocking(True)
            _notice_loss(connection)
            if peer.kind == SLOTS:
                threading.Thread(target=serve_slots, args=[connection, self.files], daemon=True).start()
            else:
                with contextlib.suppress(RuntimeError):  # the event loop has ended
                    on_engine(connection)


class FirstHost:
    """The first host, for rank 0 of the decode ranks on the second one. within_s: longest wait for its answer."""

    def __init__(self, host: str, port: int, secret: str, within_s: float) -> None:
        self._host, self._port, self._secret = host, port, secret
        self._within_s = within_s
        self._ending = False

    @property
    def where(self) -> str:
        return f"{self._host}:{self._port}"

    def end(self) -> None:
        """End `connections` when the current one has ended."""
        self._ending = True

    def reader(self) -> SlotReader:
        """Return the reader of the memory of the prefill ranks."""
        return SlotReader(lambda: self._connect(SLOTS, ATTEMPT_S), self._within_s)

    def connections(self) -> Iterator[socket.socket]:
        """Yield a connection over which requests come, and another whenever that ends. Raises LaunchError if the first
        host does not answer or refuses this one, or if its server has ended."""
        was_there = False
        while not self._ending and (connection := self._await(was_there=was_there)) is not None:
            if not was_there:
                say(f"tilerank: these ranks answer the requests of the server at {self.where}")
            was_there = True
            yield connection

    def _await(self, *, was_there: bool) -> socket.socket | None:
        """Return a connection; None if this process is to end meanwhile."""
        deadline, why = time.monotonic() + self._within_s, ""
        while not self._ending and (left := deadline - time.monotonic()) > 0:
            try:
                return self._connect(REQUESTS, min(left, ATTEMPT_S))
            except ConnectionRefusedError as e:
                if was_there:  # the command of the first host holds the socket while the HTTP process starts again
                    raise LaunchError(f"the server at {self.where} has ended") from None
                why = str(e.strerror)
            except OSError as e:
                why = str(e.strerror or e)
            except GroupError:
                needed = "expected one with --prefill-nodes and the same TILERANK_SECRET"
                raise LaunchError(f"the server at {self.where} has refused this host: {needed}") from None
            time.sleep(RETRY_S)
        if self._ending:
            return None
        raise LaunchError(f"the server at {self.where} (--master-addr, --master-port) has not answered: {why}")

    def _connect(self, kind: int, timeout_s: float) -> socket.socket:
        connection = socket.create_connection((self._host, self._port), timeout_s)
        try:
            authenticate(connection, 0, kind, self._secret.encode(), 0)
        except BaseException:
            connection.close()
            raise
        connection.settimeout(None)
        _notice_loss(connection)
        return connection


def front_fds(listener: socket.socket, files: Sequence[int]) -> tuple[int, ...]:
    """Return descriptors for the HTTP process, which FRONT_FDS names."""
    return tuple(map(os.dup, (listener.fileno(), *files)))


def _notice_loss(connection: socket.socket) -> None:
    """End a connection whose other host has lost power, whether data are under way or not."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_S * 1000)
