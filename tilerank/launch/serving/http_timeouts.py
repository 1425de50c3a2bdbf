"""HTTP connections: strict lines, and deadlines for slow clients, for sending a request and for reading an answer.

Every open connection holds one of a bounded number (slow loris), and an answer that is not read stays in memory.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from .strict_lines import StrictLines

REQUEST_S = 60.0
"""From the start of a connection, or the end of an answer, to the end of the next request."""
TAKE_S = 60.0
"""For reading as much of an answer as fills the buffers in between."""


class DeadlineProtocol(H11Protocol):
    """uvicorn's HTTP protocol with deadlines, and with strict lines.

    on_waiting: called when it begins to wait for a request.
    on_request: called when one has arrived.
    on_lost: called at the end of the connection.
    """

    on_waiting: Callable[[], object] = staticmethod(lambda: None)
    on_request: Callable[[], object] = staticmethod(lambda: None)
    on_lost: Callable[[], None] = staticmethod(lambda: None)
    _sending: asyncio.TimerHandle | None = None  # runs while the client still has to send a request
    _taking: asyncio.TimerHandle | None = None

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.conn._receive_buffer = StrictLines()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_request()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._sending is not None and self._has_request():
            self._sending.cancel()
            self._sending = None
            self.on_request()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._sending is None and not self._has_request():
            self._await_request()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._taking = self.loop.call_later(TAKE_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._taking is not None:
            self._taking.cancel()
            self._taking = None

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._sending, self._taking):
            if timer is not None:
                timer.cancel()
        self.on_lost()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP. If the body of a request is not, its answer is given up, without a traceback."""
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
            if cycle.response_started:
                self.transport.close()
                return
        super().send_400_response(msg)

    def _should_upgrade(self) -> bool:
        """Ignore the header Upgrade, as a server may (RFC 9110, 7.8). uvicorn would log two lines for each request."""
        return False

    def _await_request(self) -> None:
        self.on_waiting()
        self._sending = self.loop.call_later(REQUEST_S, self.transport.abort)

    def _has_request(self) -> bool:
        """Return whether a whole request has arrived that is not answered yet."""
        return self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body
