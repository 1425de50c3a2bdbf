"""Answers in the form of an API, streamed or whole. Both are written from the same deltas."""

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from ..chat.deltas import Delta
from ..chat.generation import Generation
from ..http.errors import ApiError

Json = dict[str, Any]
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


class ServerSentEvent(NamedTuple):
    """An event of a stream. data: JSON, or text as it is. name: of the event's type, None for an event without."""

    data: Json | str
    name: str | None = None

    def encode(self) -> bytes:
        """Return the bytes of the event."""
        data = self.data
        text = data if isinstance(data, str) else _JSON.encode(data)
        name = "" if self.name is None else f"event: {self.name}\n"
        return f"{name}data: {text}\n\n".encode()


class Answer(ABC):
    """Writes the answer to one request, from its deltas. id: of the answer in the API. costly: whether `whole` takes
    long.

    The methods are called in this order: begin, add for each delta, then end; fail instead, at any time, if the request
    fails. They return the events of a streamed answer. `whole` is called after `end`, for an answer in one piece.
    """

    def __init__(self, generation: Generation, prefix: str) -> None:
        self.id = f"{prefix}{generation.id}"
        self.costly = False
        self._generation = generation

    def begin(self) -> list[ServerSentEvent]:
        """Return the events before the first text."""
        return []

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


async def respond(request: Request, answer: Answer, deltas: AsyncGenerator[Delta], stream: bool) -> Response:
    """Return the response with an answer, or with the beginning of a streamed one."""
    if stream:
        headers = {"Cache-Control": "no-cache"}
        return StreamingResponse(_events(request, answer, deltas), media_type="text/event-stream", headers=headers)
    answer.begin()
    async with aclosing(deltas):
        async for delta in deltas:
            answer.add(delta)
    answer.end()
    whole = await asyncio.to_thread(answer.whole) if answer.costly else answer.whole()
    return PlainTextResponse(whole) if isinstance(whole, str) else JSONResponse(whole)


async def _events(request: Request, answer: Answer, deltas: AsyncGenerator[Delta]) -> AsyncIterator[bytes]:
    """Yield the server-sent events of a streamed answer."""
    try:
        for event in answer.begin():
            yield event.encode()
        async with aclosing(deltas):
            async for delta in deltas:
                for event in answer.add(delta):
                    yield event.encode()
        for event in answer.end():
            yield event.encode()
    except ApiError as e:
        request.app.state.metrics.count_error(e.status)
        for event in answer.fail(e):
            yield event.encode()
