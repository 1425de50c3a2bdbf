"""The engine as the HTTP process sees it: behind a socket that comes with each group of ranks, and goes with it."""

import asyncio
import itertools
import logging
import socket
from collections.abc import AsyncGenerator, Sequence

from ..params import SamplingParams
from .messages import Cancel, FromEngine, Refused, State, Submit, ToEngine, Token, Tokens, client_inbox, encode

log = logging.getLogger(__name__)


class EngineGoneError(Exception):
    """There is no engine, or it went before the request was complete."""


class RefusedError(Exception):
    """The engine cannot run the request, and says why."""


_Item = Token | EngineGoneError | RefusedError


class EngineClient:
    """`state` is None while there is no engine that could take a request."""

    def __init__(self) -> None:
        self.state: State | None = None
        self.restarts = -1  # engines that came after the first
        self._writer: asyncio.StreamWriter | None = None
        self._streams: dict[int, asyncio.Queue[_Item]] = {}
        self._numbers = itertools.count()

    @property
    def unfinished(self) -> int:
        """Requests that wait for tokens."""
        return len(self._streams)

    async def attach(self, connection: socket.socket) -> None:
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
            self._writer = None
            for queue in self._streams.values():
                queue.put_nowait(EngineGoneError("the engine stopped before the answer was complete"))

    async def generate(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> AsyncGenerator[Token]:
        """The tokens of one request as they come. Whoever stops listening cancels it.

        Raises EngineGoneError or RefusedError.
        """
        if self.state is None:
            raise EngineGoneError("there is no engine to answer now")
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
            case State():
                if self.state is None:
                    self.restarts += 1
                self.state = message

    def _put(self, number: int, item: _Item) -> None:
        if number in self._streams:  # else cancelled, and the engine has not heard of it yet
            self._streams[number].put_nowait(item)

    def _send(self, message: ToEngine) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(encode(message))
