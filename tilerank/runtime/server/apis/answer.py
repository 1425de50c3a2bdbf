"""Answers in the form of an API, streamed or whole. Both are written from the same deltas."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing
from typing import Any, ClassVar, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ..chat.deltas import Delta
from ..chat.generation import Generation
from ..http.errors import ApiError
from ..http.memory import RequestMemory

SILENCE_S = 15.0
"""Proxies cut connections that are silent for 60 seconds, some for 30."""
LONG_DELTA = 256
"""Log-probabilities that are formatted at once in the event loop, those of 12 tokens with 20 alternatives; more take a
thread."""
LONG_ANSWER = 1 << 20
"""Bytes. Longer answers are put together and written in a thread."""
_FORMATTING = ThreadPoolExecutor(1)  # several would take turns with the event loop
_ENTRY = 96
"""Bytes of the log-probability of a token or of an alternative, as JSON."""
Json = dict[str, Any]


class ServerSentEvent(NamedTuple):
    """An event of a stream. data: JSON, or text as it is. name: of the event's type, None for an event without."""

    data: Json | str
    name: str | None = None

    def encode(self) -> bytes:
        """Return the bytes of the event."""
        data = self.data.encode() if isinstance(self.data, str) else msgspec.json.encode(self.data)
        name = b"" if self.name is None else f"event: {self.name}\n".encode()
        return b"%bdata: %b\n\n" % (name, data)


class Answer(ABC):
    """Writes the answer to one request, from its deltas. id: of the answer in the API. costly: whether `whole` takes
    long.

    The methods are called in this order: add for each delta, then end; fail instead, at any time, if the request fails.
    They return the events of a streamed answer, which those of `begin` precede. `whole` is called after `end`, for an
    answer in one piece.

    KEEP_ALIVE: what is sent when there has been nothing to send for a while; by default a comment, which clients skip.
    """

    KEEP_ALIVE: ClassVar[bytes] = b": keep-alive\n\n"

    def __init__(self, generation: Generation, prefix: str) -> None:
        self.id = f"{prefix}{generation.id}"
        self.costly = False
        self._generation = generation

    def begin(self) -> list[ServerSentEvent]:
        """Return the events before all others, once the first delta is there."""
        return []

    def entries(self, delta: Delta) -> int:
        """Return how many log-probabilities `add` lists for a delta."""
        body, scores = self._generation.body, delta.opening and delta.opening.prompt_logprobs
        listed = 0 if body.alternatives is None else len(delta.tokens) * (1 + body.alternatives)
        return listed + (len(scores) * (1 + (body.scores or 0)) if scores else 0)

    @abstractmethod
    def add(self, delta: Delta) -> list[ServerSentEvent]:
        """Append new text and return its events."""

    @abstractmethod
    def end(self) -> list[ServerSentEvent]:
        """Return the last events."""

    def fail(self, error: ApiError) -> list[ServerSentEvent]:
        """Return the last events of a request that failed."""
        return [ServerSentEvent(error.body())]

    @abstractmethod
    def whole(self) -> Json | str:
        """Return the whole answer: JSON, or plain text."""


def json_response(value: Json) -> Response:
    """Return the response with a JSON object, parts of which may be JSON already (msgspec.Raw)."""
    return Response(msgspec.json.encode(value), media_type="application/json")


async def json_answer(value: Json, nbytes: int) -> Response:
    """Return the response with a JSON object of about so many bytes; a long one is written in a thread."""
    if nbytes > LONG_ANSWER:
        return await asyncio.get_running_loop().run_in_executor(_FORMATTING, json_response, value)
    return json_response(value)


def as_json(values: Sequence[Any]) -> list[Any]:
    """Return the values with objects as JSON, which takes a fifth of their memory until an answer is complete."""
    return [msgspec.Raw(msgspec.json.encode(one)) if isinstance(one, dict) else one for one in values]


async def respond(answer: Answer, deltas: AsyncGenerator[Delta], memory: RequestMemory) -> Response:
    """Return the response with a whole answer, which counts as the request's memory."""
    nbytes = 0
    async with aclosing(deltas):
        async for delta in deltas:
            added = len(delta.text) + len(delta.reasoning) + _ENTRY * answer.entries(delta)
            memory.add_answer(added)
            nbytes += added
            await _added(answer, delta)
    answer.end()
    if answer.costly or nbytes > LONG_ANSWER:
        return await asyncio.get_running_loop().run_in_executor(_FORMATTING, _response, answer)
    return _response(answer)


def _response(answer: Answer) -> Response:
    """Return the response with a whole answer."""
    whole = answer.whole()
    return PlainTextResponse(whole) if isinstance(whole, str) else json_response(whole)


async def _added(answer: Answer, delta: Delta) -> list[ServerSentEvent]:
    """Return the events of a delta. Many log-probabilities, those of a prompt, are formatted in a thread."""
    if answer.entries(delta) > LONG_DELTA:
        return await asyncio.get_running_loop().run_in_executor(_FORMATTING, answer.add, delta)
    return answer.add(delta)


class AnswerStream(StreamingResponse):
    """A streamed answer.

    The status line is sent before the first delta, and something at least every SILENCE_S seconds, because proxies and
    clients give up on silent connections. held: is closed when the response ends, if the deltas have not closed it.
    """

    def __init__(self, request: Request, answer: Answer, deltas: AsyncGenerator[Delta], held: ExitStack) -> None:
        headers = {"Cache-Control": "no-cache"}
        super().__init__(_events(request, answer, deltas), media_type="text/event-stream", headers=headers)
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held:
            await super().__call__(scope, receive, send)


async def _events(request: Request, answer: Answer, deltas: AsyncGenerator[Delta]) -> AsyncIterator[bytes]:
    """Yield the server-sent events of a streamed answer."""
    has_begun = False

    def begun() -> list[ServerSentEvent]:
        nonlocal has_begun
        events = [] if has_begun else answer.begin()
        has_begun = True
        return events

    try:
        async with aclosing(_with_silences(deltas, SILENCE_S)) as timed:
            async for delta in timed:
                if delta is None:
                    yield answer.KEEP_ALIVE
                    continue
                for event in begun():
                    yield event.encode()
                for event in await _added(answer, delta):
                    yield event.encode()
        for event in (*begun(), *answer.end()):
            yield event.encode()
    except ApiError as e:
        request.app.state.metrics.count_error(e.status)
        for event in (*begun(), *answer.fail(e)):
            yield event.encode()


async def _with_silences(deltas: AsyncGenerator[Delta], seconds: float) -> AsyncGenerator[Delta | None]:
    """Yield the same deltas, and None whenever none has come for `seconds`. Closes `deltas`."""
    following: asyncio.Task[Delta | None] | None = None
    try:
        while True:
            following = asyncio.create_task(_next(deltas))
            while not following.done():
                await asyncio.wait((following,), timeout=seconds)
                if not following.done():
                    yield None
            if (delta := following.result()) is None:
                return
            yield delta
    finally:
        if following is not None and not following.done():
            following.cancel()  # which ends `deltas` as well
        else:
            await deltas.aclose()


async def _next(deltas: AsyncGenerator[Delta]) -> Delta | None:
    return await anext(deltas, None)
