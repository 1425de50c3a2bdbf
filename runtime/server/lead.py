"""Rank 0 as a server's engine: takes requests from the HTTP process between steps, and sends the tokens back."""

import select
import socket
import time
from collections.abc import Iterable, Sequence

from ..engine import Engine, Failed, Request
from ..errors import RequestError
from .messages import (
    Cancel,
    Counted,
    FromEngine,
    RankInfo,
    Ranks,
    Refused,
    State,
    Submit,
    ToEngine,
    Token,
    Tokens,
    encode,
    engine_inbox,
)

STATE_S = 0.25
"""At most so often, while there is work."""
COUNT_S = 2.0
"""The same for what steps of all ranks have taken, for which these meet between two steps."""


def lead(engine: Engine, connections: Iterable[socket.socket], ranks: Sequence[RankInfo]) -> None:
    """Runs what comes over each of `connections` until its other end hangs up; then nothing is left running.

    `ranks`: what clients are told of them.
    """
    for connection in connections:
        with connection:
            connection.setblocking(False)
            session = _Session(engine, connection, ranks)
            # Errors end the engine: nothing is left to be taken back.
            while session.exchange():
                session.step()
            session.end()


class _Session:
    def __init__(self, engine: Engine, connection: socket.socket, ranks: Sequence[RankInfo]) -> None:
        self._engine = engine
        self._connection = connection
        self._inbox = engine_inbox()
        self._outbox = bytearray()
        self._theirs: dict[int, int] = {}  # the engine's number of a request -> the HTTP process's
        self._ours: dict[int, int] = {}
        self._told_at = 0.0
        self._counted_at = time.monotonic()
        self._uncounted = False  # there were steps since
        self._send(Ranks(list(ranks)))
        self._tell_state()

    def exchange(self) -> bool:
        """Sends and takes what can be; waits if there is nothing to compute. False: the other end is gone."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN | (select.POLLOUT if self._outbox else 0))
        for _, event in poll.poll(self._patience_ms()):
            try:
                if event & select.POLLOUT:
                    del self._outbox[: self._connection.send(self._outbox)]
                if event & (select.POLLIN | select.POLLHUP):
                    data = self._connection.recv(1 << 20)
                    if not data:
                        return False
                    for message in self._inbox.feed(data):
                        self._take(message)
            except (BrokenPipeError, ConnectionResetError):
                return False
        return True

    def step(self) -> None:
        if self._engine.busy:
            self._compute()
        if self._uncounted and time.monotonic() - self._counted_at >= COUNT_S:
            self._send(Counted(self._engine.counters()))
            self._counted_at, self._uncounted = time.monotonic(), False

    def end(self) -> None:
        for number in self._theirs:
            self._engine.cancel(number)

    def _patience_ms(self) -> float | None:
        """How long to wait for messages."""
        if self._engine.busy:
            return 0
        return max(self._counted_at + COUNT_S - time.monotonic(), 0) * 1000 if self._uncounted else None

    def _compute(self) -> None:
        self._uncounted = True
        tokens = []
        for event in self._engine.step():
            number = self._theirs[event.request]
            if isinstance(event, Failed):
                self._send(Refused(number, event.sentence))
                self._forget(number)
                continue
            tokens.append(Token(number, event.token_id, event.finish_reason, event.logprobs))
            if event.finish_reason is not None:
                self._forget(number)
        if tokens:
            self._send(Tokens(tokens))
        if not self._engine.busy or time.monotonic() - self._told_at > STATE_S:
            self._tell_state()

    def _take(self, message: ToEngine) -> None:
        match message:
            case Submit(number, prompt_token_ids, params):
                try:
                    ours = self._engine.submit(Request(prompt_token_ids, params))
                except RequestError as e:
                    self._send(Refused(number, str(e)))
                    return
                self._theirs[ours], self._ours[number] = number, ours
            case Cancel(number) if number in self._ours:  # else it came to its end meanwhile
                self._engine.cancel(self._ours[number])
                self._forget(number)
                if not self._engine.busy:
                    self._tell_state()

    def _forget(self, number: int) -> None:
        del self._theirs[self._ours.pop(number)]

    def _send(self, message: FromEngine) -> None:
        self._outbox += encode(message)

    def _tell_state(self) -> None:
        self._told_at = time.monotonic()
        self._send(State(**self._engine.state()))
