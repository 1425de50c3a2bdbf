"""The OpenAI API over HTTP: routes, authentication, and the handlers. Uses the engine through EngineClient only."""

import asyncio
import hmac
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import prometheus_client
import pydantic
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from tilerank.loader.generation_config import SamplingDefaults
from tilerank.loader.tokenizer import Tokenizer

from ..errors import RequestError
from ..params import SamplingParams
from ..prompt import Prompt
from .answers.completions import ActiveRequest, Delta
from .answers.reasoning import Thinking
from .answers.responses import ChatFormatter, Formatter, Json, TextFormatter
from .answers.tools import ToolParser
from .api import ChatCompletion, Completion, Detokenize, Sampling, Tokenize
from .client import EngineClient, EngineGoneError, RefusedError
from .errors import ApiError, error_response
from .grammars import request_grammar
from .media.loader import MediaReader
from .media.media_budget import MediaBudget
from .monitoring import status
from .monitoring.metrics import Metrics
from .monitoring.recent_requests import RecentRequests
from .prompts import PromptBuilder
from .request_body import MAX_BODIES, MAX_BODY, MAX_MEDIA_BODIES, MAX_MEDIA_BODY, BodyReader, validation_error

log = logging.getLogger(__name__)


Body = TypeVar("Body", bound=pydantic.BaseModel)
T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class ServerSettings:
    """What the server needs to know of its model and operator.

    model: name of the model in the API. version: of tilerank. api_key: the key that requests must have, None for none.
    sampling: values of sampling fields that a request leaves out. tool_parser: for the model's tool calls, None if
    their format is unknown. check_grammar: raises RequestError for a grammar that must not reach the engine. media:
    reads pictures and videos, None if the model does not take any.
    """

    model: str
    version: str
    api_key: str | None
    sampling: SamplingDefaults
    tool_parser: type[ToolParser] | None
    check_grammar: Callable[[str], Awaitable[None]]
    media: MediaReader | None = None


class _Begun(NamedTuple):
    """A request whose first delta has arrived. envelope: what its answer begins with."""

    active: ActiveRequest
    first: Delta
    rest: AsyncGenerator[Delta]
    envelope: Json


def make_app(client: EngineClient, tokenizer: Tokenizer, settings: ServerSettings) -> Starlette:
    """Return the ASGI application."""
    server = _Server(client, tokenizer, settings)
    guarded: dict[str, tuple[str, Handler]] = {
        "/v1/chat/completions": ("POST", server.chat),
        "/v1/completions": ("POST", server.complete),
        "/v1/models": ("GET", server.models),
        "/tokenize": ("POST", server.tokenize),
        "/detokenize": ("POST", server.detokenize),
        "/metrics": ("GET", server.metrics),
        "/status": ("GET", server.status),
    }
    public: dict[str, tuple[str, Handler]] = {
        "/": ("GET", server.page),
        "/health": ("GET", server.health),
        "/health_generate": ("GET", server.health_generate),
        "/version": ("GET", server.version),
    }
    routes = [Route(path, server.guarded(handler), methods=[method]) for path, (method, handler) in guarded.items()]
    routes += [Route(path, handler, methods=[method]) for path, (method, handler) in public.items()]
    return Starlette(
        routes=routes,
        exception_handlers={
            ApiError: _handle_api_error,
            HTTPException: _handle_http_exception,
            ClientDisconnect: _handle_disconnect,
            Exception: _handle_unexpected,
        },
    )


async def _handle_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _handle_http_exception(request: Request, error: Exception) -> Response:
    """Starlette raises these for unknown paths and methods."""
    assert isinstance(error, HTTPException)
    what = error.detail.capitalize()
    return error_response(ApiError(error.status_code, f"{what}: {request.method} {request.url.path}."))


async def _handle_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=400)  # never sent, for the connection is closed


async def _handle_unexpected(request: Request, error: Exception) -> Response:
    return error_response(ApiError(500, "Internal error. See the server's log."))


class _Server:
    def __init__(self, client: EngineClient, tokenizer: Tokenizer, settings: ServerSettings) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._settings = settings
        self._started = int(time.time())
        self._metrics = Metrics(client)
        self._recent = RecentRequests()
        self._body_reader = BodyReader(MAX_BODIES if settings.media is None else MAX_MEDIA_BODIES)
        self._budget = MediaBudget()
        self._prompts = PromptBuilder(tokenizer, settings.model, settings.tool_parser, settings.media)

    def guarded(self, handler: Handler) -> Handler:
        """Return the handler behind a check of the API key."""

        async def checked(request: Request) -> Response:
            key = self._settings.api_key
            if key is not None:
                scheme, _, given = request.headers.get("authorization", "").partition(" ")
                if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), key.encode()):
                    raise ApiError(401, "Expected this server's API key as a bearer token.", code="invalid_api_key")
            return await handler(request)

        return checked

    async def models(self, request: Request) -> Response:
        state = self._client.state
        model = {"id": self._settings.model, "object": "model", "created": self._started, "owned_by": "tilerank"}
        return JSONResponse(
            {"object": "list", "data": [model | {"max_model_len": state.context_length if state else None}]}
        )

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": self._settings.version})

    async def metrics(self, request: Request) -> Response:
        return PlainTextResponse(self._metrics.text(), media_type=prometheus_client.CONTENT_TYPE_LATEST)

    async def page(self, request: Request) -> Response:
        return status.page()

    async def status(self, request: Request) -> Response:
        about = {
            "model": self._settings.model,
            "version": self._settings.version,
            "takes_media": self._settings.media is not None,
        }
        return JSONResponse(status.status_json(self._client, self._recent, about))

    async def health(self, request: Request) -> Response:
        if self._client.state is None:
            raise ApiError(503, "The engine is not ready.", code="engine_gone")
        return Response()

    async def health_generate(self, request: Request) -> Response:
        """Generate one token, which involves every rank."""
        try:
            await _until_disconnect(request, self._generate())
        except EngineGoneError as e:
            raise ApiError(503, str(e), code="engine_gone") from e
        except RefusedError as e:
            raise ApiError(500, str(e)) from e
        return Response()

    async def _generate(self) -> None:
        async with aclosing(self._client.generate(Prompt([0]), SamplingParams(max_new_tokens=1))) as tokens:
            async for _ in tokens:
                pass

    async def tokenize(self, request: Request) -> Response:
        body = await self._body(request, Tokenize)
        if body.messages is not None:
            with self._budget.share() as share:
                build = self._prompts.from_messages(body.messages, body.chat_template_kwargs, None, None, share)
                tokens = (await _until_disconnect(request, build)).prompt.token_ids
        else:
            assert body.prompt is not None
            tokens = await self._prompts.encode(body.prompt, body.add_special_tokens)
        state = self._client.state
        limit = state.context_length if state else None
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": limit})

    async def detokenize(self, request: Request) -> Response:
        body = await self._body(request, Detokenize)
        known = self._tokenizer.num_tokens
        if any(token >= known for token in body.tokens):
            raise ApiError(400, f"expected token ids below {known}, found {max(body.tokens)}", param="tokens")
        return JSONResponse({"prompt": self._tokenizer.decode(body.tokens)})

    async def complete(self, request: Request) -> Response:
        body = await self._body(request, Completion)
        formatter = TextFormatter(self._tokenizer, body.logprobs)
        grammar = await self._grammar(body, None)
        prompts = await self._prompts.from_texts(body.prompt)
        begun = await self._begin(request, body, prompts, body.logprobs, grammar, formatter)
        return await self._answer(request, body, begun, formatter)

    async def chat(self, request: Request) -> Response:
        body = await self._body(request, ChatCompletion)
        tools = body.template_tools()
        if tools and self._settings.tool_parser is None:
            raise ApiError(400, f"tools: the format of tool calls of {self._settings.model} is unknown", param="tools")
        top = body.top_logprobs or 0 if body.logprobs else None
        parser = self._settings.tool_parser if tools else None
        schemas = {tool.function.name: tool.function.parameters or {} for tool in body.callable_tools}
        formatter = ChatFormatter(self._tokenizer, top, partial(parser, schemas) if parser else None)
        variables, effort = body.chat_template_kwargs, body.reasoning_effort
        with self._budget.share() as share:
            build = self._prompts.from_messages(body.messages, variables, effort, tools, share)
            prompt, thinking = await _until_disconnect(request, build)
            prompts = [prompt]
            del prompt  # pictures take much memory, and the client frees them once they are sent
            grammar = await self._grammar(body, parser, thinking)
            begun = await self._begin(request, body, prompts, top, grammar, formatter, thinking)
        return await self._answer(request, body, begun, formatter)

    async def _grammar(
        self, body: Sampling, parser: type[ToolParser] | None, thinking: Thinking = Thinking.NEVER
    ) -> str | None:
        grammar = request_grammar(body, self._tokenizer, parser, thinking)
        if grammar is not None:
            try:
                await self._settings.check_grammar(grammar)
            except RequestError as e:
                raise ApiError(400, str(e), code="invalid_grammar") from e
        return grammar

    async def _begin(
        self,
        request: Request,
        body: Sampling,
        prompts: list[Prompt],
        top: int | None,
        grammar: str | None,
        formatter: Formatter,
        thinking: Thinking = Thinking.NEVER,
    ) -> _Begun:
        """Run a request up to its first delta. Empties `prompts`."""
        logprobs = 0 if top is None else max(top, 1)
        defaults = self._settings.sampling
        active = ActiveRequest(self._client, self._tokenizer, defaults, prompts, body, logprobs, grammar, thinking)
        prompts.clear()
        envelope: Json = {
            "id": f"{formatter.prefix}-{active.id}",
            "created": active.created,
            "model": self._settings.model,
        }
        deltas = self._recent.track(envelope["id"], active, self._metrics.measure(active.deltas()))
        try:
            # The status line is sent after the first delta, so that a failed request gets an error status.
            first = await _until_disconnect(request, anext(deltas))
        except (ApiError, ClientDisconnect):
            await deltas.aclose()
            raise
        return _Begun(active, first, deltas, envelope)

    async def _answer(self, request: Request, body: Sampling, begun: _Begun, formatter: Formatter) -> Response:
        active, first, deltas, envelope = begun
        if body.stream:
            usage = body.stream_options is not None and body.stream_options.include_usage
            events = _events(first, deltas, active, envelope, formatter, usage)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        choices = await _until_disconnect(request, _choices(first, deltas, formatter))
        return JSONResponse(envelope | {"object": formatter.objects[1], "choices": choices, "usage": active.usage})

    async def _body(self, request: Request, kind: type[Body]) -> Body:
        takes_media = self._settings.media is not None and kind in (ChatCompletion, Tokenize)
        data = await self._body_reader.read(request, MAX_MEDIA_BODY if takes_media else MAX_BODY)
        try:
            body = kind.model_validate_json(data)
        except pydantic.ValidationError as e:
            raise validation_error(data, e) from e
        requested = getattr(body, "model", None)
        if requested is not None and requested != self._settings.model:
            raise ApiError(
                404,
                f"There is no model {requested!r}; this server serves {self._settings.model!r}.",
                param="model",
                code="model_not_found",
            )
        return body


async def _until_disconnect(request: Request, work: Awaitable[T]) -> T:
    """Return the result of `work`. Cancels it and raises ClientDisconnect if the client disconnects first.

    The request's body must have been read. Without this, a disconnect is noticed only when the answer is sent.
    """

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, waiting = asyncio.ensure_future(work), asyncio.create_task(disconnected())
    try:
        await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        waiting.cancel()
        await asyncio.gather(working, waiting, return_exceptions=True)


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
