"""Engines as the HTTP process sees them: behind sockets that come with each group of ranks, and go with it."""

import asyncio
import itertools
import logging
import socket
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from ..params import SamplingParams
from .figures import Figures
from .messages import (
    Cancel,
    Counted,
    FromEngine,
    Ranks,
    Refused,
    State,
    Submit,
    ToEngine,
    Token,
    Tokens,
    client_inbox,
    encode,
)

log = logging.getLogger(__name__)


class EngineGoneError(Exception):
    """There is no engine, or it went before the request was complete."""


class RefusedError(Exception):
    """The engine cannot run the request, and says why."""


_Item = Token | EngineGoneError | RefusedError


class Engine:
    """One engine, from its start to its end. `state` is None until it is ready."""

    def __init__(self) -> None:
        self.state: State | None = None
        self.figures = Figures()
        self._writer: asyncio.StreamWriter | None = None
        self._streams: dict[int, asyncio.Queue[_Item]] = {}
        self._numbers = itertools.count()

    async def talk(self, connection: socket.socket) -> None:
        """Talks to the engine behind `connection` until it goes; fails what it leaves unfinished."""
        reader, self._writer = await asyncio.open_unix_connection(sock=connection)
        inbox = client_inbox()
        try:
            while data := await reader.read(1 << 20):
                for message in inbox.feed(data):
                    self._take(message)
        except ConnectionResetError:
            log.debug("the engine's end of the socket broke")
        finally:
            self.state = None
            self._writer.close()
            self.abandon("the engine stopped before the answer was complete")

    def abandon(self, why: str) -> None:
        """Fails all requests that wait for tokens."""
        for queue in self._streams.values():
            queue.put_nowait(EngineGoneError(why))

    async def generate(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> AsyncGenerator[Token]:
        """See EngineClient.generate."""
        number = next(self._numbers)
        queue = self._streams[number] = asyncio.Queue()
        running = True
        try:
            self._send(Submit(number, list(prompt_token_ids), params))
            while running:
                item = await queue.get()
                if not isinstance(item, Token):
                    running = False
                    raise item
                running = item.finish_reason is None
                yield item
        finally:
            del self._streams[number]
            if running:
                self._send(Cancel(number))

    def _take(self, message: FromEngine) -> None:
        match message:
            case Tokens(tokens):
                for token in tokens:
                    self._put(token.number, token)
            case Refused(number, sentence):
                self._put(number, RefusedError(sentence))
            case Ranks() | Counted():
                self.figures.take(message)
            case State():
                self.state = message

    def _put(self, number: int, item: _Item) -> None:
        if number in self._streams:  # else cancelled, and the engine has not heard of it yet
            self._streams[number].put_nowait(item)

    def _send(self, message: ToEngine) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(encode(message))


class EngineClient:
    """Hands requests to the engine that there is."""

    def __init__(self) -> None:
        self.restarts = -1  # engines that came after the first
        self._engine = Engine()

    @property
    def state(self) -> State | None:
        """None while there is no engine that could take a request."""
        return self._engine.state

    @property
    def figures(self) -> Figures:
        """Of the newest engine."""
        return self._engine.figures

    async def attach(self, connection: socket.socket) -> None:
        """Talks to the engine behind `connection`, the newest one, until it goes."""
        self.restarts += 1
        self._engine = engine = Engine()
        await engine.talk(connection)

    def abandon(self, why: str) -> None:
        """Fails all requests that wait for tokens."""
        self._engine.abandon(why)

    async def generate(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> AsyncGenerator[Token]:
        """The tokens of one request as they come. Whoever stops listening cancels it.

        Raises EngineGoneError or RefusedError.
        """
        if self.state is None:
            raise EngineGoneError("there is no engine to answer now")
        async with aclosing(self._engine.generate(prompt_token_ids, params)) as tokens:
            async for token in tokens:
                yield token
