"""The loop of rank 0 in a server: takes requests from the HTTP process between steps and sends tokens back."""

import select
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

import msgspec

from ...lead.engine import Engine, Request
from ...protocol.errors import RequestError
from ...protocol.events import EndedEvent, Event, FailedEvent, is_last
from ...protocol.framing import encode
from .messages import Cancel, Counters, Events, FromEngine, RankInfo, Ranks, Submit, ToEngine, engine_inbox

STATE_INTERVAL_S = 0.25
"""Shortest time between two messages of the state while requests run."""
COUNTERS_INTERVAL_S = 2.0
"""Shortest time between two Counters messages. Each takes a small collective of all ranks between two steps."""
RECEIVE_S = 0.02
"""Longest time that a step waits for messages that are being received."""
PART_MS = 2
"""Longest wait for the next part of a message. Those with pictures do not fit in the buffer of the socket."""


def serve_connections(engine: Engine, connections: Iterable[socket.socket], ranks: Sequence[RankInfo]) -> None:
    """Serve each connection until its other end closes, one after the other. Then cancel its requests.

    ranks: the descriptions of all ranks, which are sent first on every connection. Errors of the engine pass through.
    """
    for connection in connections:
        with connection:
            connection.setblocking(False)
            session = _Session(engine, connection, ranks)
            while session.exchange():
                session.step()
            session.cancel_requests()


class _Session:
    """One connection to an HTTP process, which numbers its requests; the engine numbers them differently."""

    def __init__(self, engine: Engine, connection: socket.socket, ranks: Sequence[RankInfo]) -> None:
        self._engine = engine
        self._connection = connection
        self._inbox = engine_inbox()
        self._outbox = bytearray()
        self._client_numbers: dict[int, int] = {}  # the engine's number of a request -> the HTTP process's
        self._engine_numbers: dict[int, int] = {}  # the inverse
        self._speaking: set[int] = set()  # the HTTP process's numbers of requests that end with sound
        self._state_sent_at = 0.0
        self._counters_sent_at = time.monotonic()
        self._counters_changed = False
        self._send(Ranks(list(ranks)))
        self._send_state()

    def exchange(self) -> bool:
        """Send and receive what is possible. Blocks only while there is nothing to compute.

        Returns False if the other end has closed the connection.
        """
        poll = select.poll()
        poll.register(self._connection, select.POLLIN | (select.POLLOUT if self._outbox else 0))
        for _, event in poll.poll(self._poll_timeout_ms()):
            try:
                if event & select.POLLOUT:
                    del self._outbox[: self._connection.send(self._outbox)]
                if event & (select.POLLIN | select.POLLHUP) and not self._receive():
                    return False
            except (BrokenPipeError, ConnectionResetError):
                return False
        return True

    def step(self) -> None:
        if self._engine.busy:
            self._compute()
        if self._counters_changed and time.monotonic() - self._counters_sent_at >= COUNTERS_INTERVAL_S:
            self._send(Counters(self._engine.counters()))
            self._counters_sent_at, self._counters_changed = time.monotonic(), False

    def cancel_requests(self) -> None:
        for number in self._client_numbers:
            self._engine.cancel(number)

    def _receive(self) -> bool:
        """Receive messages and handle them. Returns False if the other end has closed the connection.

        All that have arrived are received first: a request that is already cancelled is not submitted.
        """
        end = time.monotonic() + RECEIVE_S
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        messages: list[ToEngine] = []
        while poll.poll(PART_MS if self._inbox.partial else 0):
            data = self._connection.recv(1 << 20)
            if not data:
                return False
            messages += self._inbox.feed(data)
            if time.monotonic() > end:
                break
        cancelled = {message.number for message in messages if isinstance(message, Cancel)}
        for message in messages:
            match message:
                case Submit():
                    self._submit(message, cancelled)
                case Cancel(number):
                    self._cancel(number)
        return True

    def _poll_timeout_ms(self) -> float | None:
        """0 while requests run, otherwise until counters are due; None (no limit) if none are."""
        if self._engine.busy:
            return 0
        if not self._counters_changed:
            return None
        return max(self._counters_sent_at + COUNTERS_INTERVAL_S - time.monotonic(), 0) * 1000

    def _compute(self) -> None:
        self._counters_changed = True
        events: list[Event] = []
        for event in self._engine.step():
            number = self._client_numbers[event.request]
            events.append(msgspec.structs.replace(event, request=number))
            if is_last(event, number in self._speaking):
                self._forget(number)
        if events:
            self._send(Events(events))
        if not self._engine.busy or time.monotonic() - self._state_sent_at > STATE_INTERVAL_S:
            self._send_state()

    def _submit(self, message: Submit, cancelled: set[int]) -> None:
        prompt = message.prompt
        if message.digests:
            prompt.digests = message.digests
        rules = refusal = None
        try:
            rules = self._engine.rules(message.params)  # all choices share them
        except RequestError as e:
            refusal = str(e)
        for number, seed in enumerate(message.seeds, message.number):
            if number in cancelled:
                self._send(Events([EndedEvent(number)]))
                continue
            params = message.params if seed == message.params.seed else replace(message.params, seed=seed)
            try:
                if refusal is not None:
                    raise RequestError(refusal)
                request = self._engine.submit(Request(prompt, params, rules, message.slots))
            except RequestError as e:
                self._send(Events([FailedEvent(number, str(e))]))
                continue
            self._client_numbers[request], self._engine_numbers[number] = number, request
            if message.params.speech is not None:
                self._speaking.add(number)

    def _cancel(self, number: int) -> None:
        if number not in self._engine_numbers:  # it has ended in the meantime
            return
        self._engine.cancel(self._engine_numbers[number])
        self._forget(number)
        self._send(Events([EndedEvent(number)]))
        if not self._engine.busy:
            self._send_state()

    def _forget(self, number: int) -> None:
        del self._client_numbers[self._engine_numbers.pop(number)]
        self._speaking.discard(number)

    def _send(self, message: FromEngine) -> None:
        self._outbox += encode(message)

    def _send_state(self) -> None:
        self._state_sent_at = time.monotonic()
        self._send(self._engine.state())
