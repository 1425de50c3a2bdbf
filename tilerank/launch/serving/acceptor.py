"""Accepts HTTP connections, at most as many at a time as there may be."""

import asyncio
import errno
import logging
import socket
import ssl
import time
from collections.abc import Callable
from functools import partial

from .http_timeouts import DeadlineProtocol

log = logging.getLogger(__name__)

BATCH = 100
"""Connections that are accepted before other work has its turn."""
GRACE_S = 1.0
"""A connection may wait so long for its request before a new one takes its place."""
RETRY_S = 0.2
"""Between attempts while there is no place."""
HANDSHAKE_S = 10.0
"""Within which a client agrees on the keys of TLS."""
_NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Acceptor:
    """Serves the connections of a listening socket, at most `limit` at a time.

    When there are as many, the connection that has waited longest for a request gives its place to the next one. If all
    have requests, new connections stay in the listening socket until one ends. make: returns the protocol of a new one.
    tls: settings of HTTPS; None for HTTP.
    """

    def __init__(
        self,
        listener: socket.socket,
        make: Callable[[], DeadlineProtocol],
        limit: int,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._listener = listener
        self._make = make
        self._limit = limit
        self._tls = tls
        self._open: set[DeadlineProtocol] = set()
        self._waiting: dict[DeadlineProtocol, float] = {}  # for a request, since when; in that order
        self._starting: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._retry: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """Accept no more. Open connections stay open."""
        self._loop.remove_reader(self._listener)
        if self._retry is not None:
            self._retry.cancel()

    async def wait_closed(self) -> None:
        """Return when the connections that were being accepted are."""
        await asyncio.gather(*self._starting, return_exceptions=True)

    def _accept(self) -> None:
        for _ in range(BATCH):
            if len(self._open) >= self._limit and not self._make_room():
                return
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as failure:
                if failure.errno not in _NO_FILES:
                    raise
                self._pause(f"no connection can be accepted: {failure.strerror}")
                return
            connection.setblocking(False)
            protocol = self._make()
            protocol.on_waiting = partial(self._wait, protocol)
            protocol.on_request = partial(self._waiting.pop, protocol, None)
            protocol.on_lost = partial(self._leave, protocol)
            self._open.add(protocol)
            task = self._loop.create_task(self._start(protocol, connection))
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    async def _start(self, protocol: DeadlineProtocol, connection: socket.socket) -> None:
        try:
            shaking_s = None if self._tls is None else HANDSHAKE_S
            await self._loop.connect_accepted_socket(
                lambda: protocol, connection, ssl=self._tls, ssl_handshake_timeout=shaking_s
            )
        except OSError:
            if self._tls is None:
                raise
            self._leave(protocol)  # the client does not speak TLS, or refuses the certificate
        except BaseException:
            self._leave(protocol)
            raise

    def _wait(self, protocol: DeadlineProtocol) -> None:
        self._waiting[protocol] = time.monotonic()

    def _leave(self, protocol: DeadlineProtocol) -> None:
        self._open.discard(protocol)
        self._waiting.pop(protocol, None)

    def _make_room(self) -> bool:
        """Return whether there is room now, because a connection ends for it: its file is closed before the next batch
        is accepted."""
        longest, since = next(iter(self._waiting.items()), (None, 0.0))
        if longest is None or time.monotonic() - since < GRACE_S:
            self._pause(f"all {self._limit} connections are in use; new ones wait")
            return False
        log.warning("all %d connections are in use; those without a request are closed", self._limit)
        longest.transport.abort()
        self._leave(longest)
        return True

    def _pause(self, why: str) -> None:
        log.warning(why)
        self._loop.remove_reader(self._listener)
        self._retry = self._loop.call_later(RETRY_S, self._loop.add_reader, self._listener, self._accept)
