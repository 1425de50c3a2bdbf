"""Engines as the HTTP process sees them: behind sockets that come with each group of ranks, and go with it."""

import asyncio
import itertools
import logging
import socket
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import reduce

from ..params import SamplingParams
from .figures import Figures, joined
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
    together,
)
from .routing import Seen, choose, hashes

log = logging.getLogger(__name__)


class EngineGoneError(Exception):
    """There is no engine, or it went before the request was complete."""


class RefusedError(Exception):
    """The engine cannot run the request, and says why."""


_Item = Token | EngineGoneError | RefusedError


class Totals:
    """What engines have done while this process listened, those that are gone as well. The sum over those that are left
    would go down by what one that is gone had done, which whoever charts it takes for a start from 0."""

    def __init__(self) -> None:
        self.preemptions = self.prompt_tokens = self.generated_tokens = 0

    def take(self, before: State, now: State) -> None:
        """Two states of one engine, one after the other."""
        self.preemptions += now.preemptions - before.preemptions
        self.prompt_tokens += now.prompt_tokens - before.prompt_tokens
        self.generated_tokens += now.generated_tokens - before.generated_tokens


class Engine:
    """One engine, from its start to its end. `state` is None until it is ready, which `on_ready` hears; what it does
    goes into `totals`."""

    def __init__(self, totals: Totals, on_ready: Callable[[], None]) -> None:
        self.state: State | None = None
        self.figures = Figures()
        self.prompts = Seen()
        self._totals = totals
        self._on_ready = on_ready
        self._writer: asyncio.StreamWriter | None = None
        self._streams: dict[int, asyncio.Queue[_Item]] = {}
        self._numbers = itertools.count()

    @property
    def load(self) -> int:
        """Requests that wait for tokens."""
        return len(self._streams)

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
                self._totals.take(self.state or message, message)
                self.state = message
                self._on_ready()

    def _put(self, number: int, item: _Item) -> None:
        if number in self._streams:  # else cancelled, and the engine has not heard of it yet
            self._streams[number].put_nowait(item)

    def _send(self, message: ToEngine) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(encode(message))


class EngineClient:
    """Hands each request to one of the engines that are ready: see `choose`."""

    def __init__(self) -> None:
        self.restarts = 0  # engines that came after the first of their replica
        self.totals = Totals()
        self.ready = asyncio.Event()  # set once a first engine can take requests
        self._engines: dict[int, Engine] = {}

    @property
    def state(self) -> State | None:
        """Of all engines together; None while there is none that could take a request."""
        states = [engine.state for engine in self._engines.values() if engine.state is not None]
        return reduce(together, states) if states else None

    @property
    def figures(self) -> Figures:
        """Of the engines that are ready."""
        return joined({i: engine.figures for i, engine in self._engines.items() if engine.state is not None})

    async def attach(self, replica: int, connection: socket.socket) -> None:
        """Talks to the engine behind `connection`, the newest of its replica, until it goes."""
        self.restarts += replica in self._engines
        self._engines[replica] = engine = Engine(self.totals, self.ready.set)
        await engine.talk(connection)

    def abandon(self, why: str) -> None:
        """Fails all requests that wait for tokens."""
        for engine in self._engines.values():
            engine.abandon(why)

    async def generate(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> AsyncGenerator[Token]:
        """The tokens of one request as they come. Whoever stops listening cancels it.

        Raises EngineGoneError or RefusedError.
        """
        ready = [engine for engine in self._engines.values() if engine.state is not None]
        if not ready:
            raise EngineGoneError("there is no engine to answer now")
        beginnings = hashes(prompt_token_ids)
        known = [engine.prompts.known(beginnings) for engine in ready]
        engine = ready[choose([engine.load for engine in ready], known, len(beginnings))]
        engine.prompts.add(beginnings)
        async with aclosing(engine.generate(prompt_token_ids, params)) as tokens:
            async for token in tokens:
                yield token
