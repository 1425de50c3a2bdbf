"""The way from a checked request to its answer, which all endpoints that generate text share."""

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, NamedTuple

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from ...errors import RequestError
from ...prompt import Prompt
from ..answers.completions import ActiveRequest, Delta
from ..answers.reasoning import Thinking
from ..answers.responses import Formatter, Json
from ..answers.tools import ToolParser
from ..api import Sampling
from ..errors import ApiError
from ..grammars import request_grammar
from .service import Service, until_disconnect


class Begun(NamedTuple):
    """A request whose first delta has arrived. envelope: what its answer begins with."""

    active: ActiveRequest
    first: Delta
    rest: AsyncGenerator[Delta]
    envelope: Json


async def checked_grammar(
    service: Service, body: Sampling, parser: type[ToolParser] | None, thinking: Thinking = Thinking.NEVER
) -> str | None:
    """Return the grammar of the answer; None if any text is allowed. Raises ApiError if it cannot be followed."""
    grammar = request_grammar(body, service.tokenizer, parser, thinking)
    if grammar is not None:
        try:
            await service.settings.check_grammar(grammar)
        except RequestError as e:
            raise ApiError(400, str(e), code="invalid_grammar") from e
    return grammar


async def begin(
    service: Service,
    request: Request,
    body: Sampling,
    prompts: list[Prompt],
    top: int | None,
    grammar: str | None,
    formatter: Formatter,
    thinking: Thinking = Thinking.NEVER,
) -> Begun:
    """Run a request up to its first delta. Empties `prompts`."""
    logprobs = 0 if top is None else max(top, 1)
    defaults = service.settings.sampling
    active = ActiveRequest(service.client, service.tokenizer, defaults, prompts, body, logprobs, grammar, thinking)
    prompts.clear()
    envelope: Json = {
        "id": f"{formatter.prefix}-{active.id}",
        "created": active.created,
        "model": service.settings.model,
    }
    deltas = service.recent.track(envelope["id"], active, service.metrics.measure(active.deltas()))
    try:
        # The status line is sent after the first delta, so that a failed request gets an error status.
        first = await until_disconnect(request, anext(deltas))
    except (ApiError, ClientDisconnect):
        await deltas.aclose()
        raise
    return Begun(active, first, deltas, envelope)


async def answer(request: Request, body: Sampling, begun: Begun, formatter: Formatter) -> Response:
    """Return the answer, or the beginning of a streamed one."""
    active, first, deltas, envelope = begun
    if body.stream:
        usage = body.stream_options is not None and body.stream_options.include_usage
        events = _events(first, deltas, active, envelope, formatter, usage)
        return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
    choices = await until_disconnect(request, _choices(first, deltas, formatter))
    return JSONResponse(envelope | {"object": formatter.objects[1], "choices": choices, "usage": active.usage})


async def _choices(first: Delta, rest: AsyncGenerator[Delta], formatter: Formatter) -> list[Json]:
    """Build the choices of a non-streamed answer."""
    chunks: dict[int, list[Json]] = {}
    async with aclosing(rest):
        async for delta in _chain(first, rest):
            chunk = formatter.chunk(delta)
            if chunk is not None:
                chunks.setdefault(delta.index, []).append(chunk)
    return [formatter.choice(chunks[index]) for index in sorted(chunks)]


async def _chain(first: Delta, rest: AsyncIterator[Delta]) -> AsyncIterator[Delta]:
    yield first
    async for delta in rest:
        yield delta


async def _events(
    first: Delta, rest: AsyncIterator[Delta], active: ActiveRequest, envelope: Json, formatter: Formatter, usage: bool
) -> AsyncIterator[bytes]:
    """Yield the server-sent events of a streamed answer."""
    envelope = envelope | {"object": formatter.objects[0]}
    extra: Json = {"usage": None} if usage else {}
    try:
        async for delta in _chain(first, rest):
            chunk = formatter.chunk(delta)
            if chunk is not None:
                yield _event(envelope | {"choices": [chunk]} | extra)
        if usage:
            yield _event(envelope | {"choices": [], "usage": active.usage})
        yield b"data: [DONE]\n\n"
    except ApiError as e:
        yield _event(e.body())


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
