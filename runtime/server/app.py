"""The OpenAI API over HTTP: routes, what guards them, and how answers are worded. Knows the engine as a client only."""

import asyncio
import hmac
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

import prometheus_client
import pydantic
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from tilerank.loader.config import SamplingDefaults
from tilerank.loader.errors import TokenizerError
from tilerank.loader.tokenizer import Tokenizer

from ..errors import RequestError
from ..params import SamplingParams
from . import status
from .api import ChatCompletion, Completion, Detokenize, Message, Sampling, Tokenize
from .bodies import Bodies, fault
from .client import EngineClient, EngineGoneError, RefusedError
from .completions import Answering, Delta
from .errors import ApiError, refusal
from .grammars import grammar_of
from .latest import Latest
from .metrics import Metrics
from .tools import ToolParser
from .wording import ChatWording, TextWording, Wording, Words

log = logging.getLogger(__name__)

LONG_TEXT = 4096
"""Characters: from here on a text is tokenised in a thread, while others are served."""

Body = TypeVar("Body", bound=pydantic.BaseModel)
T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class About:
    """What the server is: the name that clients call the model by, the project's version, the key they must show,
    how tokens are chosen where they do not say, and how the model's family writes tool calls, if that is known.
    `check_grammar` raises RequestError for what the engine should not see."""

    model: str
    version: str
    api_key: str | None
    sampling: SamplingDefaults
    tools: type[ToolParser] | None
    check_grammar: Callable[[str], Awaitable[None]]


def make_app(client: EngineClient, tokenizer: Tokenizer, about: About) -> Starlette:
    server = _Server(client, tokenizer, about)
    guarded: dict[str, tuple[str, Handler]] = {
        "/v1/chat/completions": ("POST", server.chat),
        "/v1/completions": ("POST", server.complete),
        "/v1/models": ("GET", server.models),
        "/tokenize": ("POST", server.tokenize),
        "/detokenize": ("POST", server.detokenize),
        "/metrics": ("GET", server.metrics),
        "/status": ("GET", server.status),
    }
    free: dict[str, tuple[str, Handler]] = {
        "/": ("GET", server.page),
        "/health": ("GET", server.health),
        "/health_generate": ("GET", server.health_generate),
        "/version": ("GET", server.version),
    }
    routes = [Route(path, server.guarded(handler), methods=[method]) for path, (method, handler) in guarded.items()]
    routes += [Route(path, handler, methods=[method]) for path, (method, handler) in free.items()]
    return Starlette(
        routes=routes,
        exception_handlers={
            ApiError: _refuse,
            HTTPException: _refuse_http,
            ClientDisconnect: _give_up,
            Exception: _refuse_unexpected,
        },
    )


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return refusal(error)


async def _refuse_http(request: Request, error: Exception) -> Response:
    """Starlette's own: no such path, no such method."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path}"
    return await _refuse(request, ApiError(error.status_code, f"{what} is nothing that this server does"))


async def _give_up(request: Request, error: Exception) -> Response:
    """Nobody hears it."""
    return Response(status_code=400)


async def _refuse_unexpected(request: Request, error: Exception) -> Response:
    return await _refuse(request, ApiError(500, "the server failed; its log says why"))


class _Server:
    def __init__(self, client: EngineClient, tokenizer: Tokenizer, about: About) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._about = about
        self._started = int(time.time())
        self._metrics = Metrics(client)
        self._latest = Latest()
        self._bodies = Bodies()

    def guarded(self, handler: Handler) -> Handler:
        async def checked(request: Request) -> Response:
            key = self._about.api_key
            if key is not None:
                scheme, _, shown = request.headers.get("authorization", "").partition(" ")
                if scheme.lower() != "bearer" or not hmac.compare_digest(shown.strip().encode(), key.encode()):
                    raise ApiError(401, "expected this server's API key as a bearer token", code="invalid_api_key")
            return await handler(request)

        return checked

    async def models(self, request: Request) -> Response:
        state = self._client.state
        model = {"id": self._about.model, "object": "model", "created": self._started, "owned_by": "tilerank"}
        return JSONResponse(
            {"object": "list", "data": [model | {"max_model_len": state.context_length if state else None}]}
        )

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": self._about.version})

    async def metrics(self, request: Request) -> Response:
        return PlainTextResponse(self._metrics.text(), media_type=prometheus_client.CONTENT_TYPE_LATEST)

    async def page(self, request: Request) -> Response:
        return status.page()

    async def status(self, request: Request) -> Response:
        about = {"model": self._about.model, "version": self._about.version}
        return JSONResponse(status.told(self._client, self._latest, about))

    async def health(self, request: Request) -> Response:
        if self._client.state is None:
            raise ApiError(503, "the engine is not ready", code="engine_gone")
        return Response()

    async def health_generate(self, request: Request) -> Response:
        """A real token, through every rank."""
        try:
            await _unless_gone(request, self._generate())
        except EngineGoneError as e:
            raise ApiError(503, str(e), code="engine_gone") from e
        except RefusedError as e:
            raise ApiError(500, str(e)) from e
        return Response()

    async def _generate(self) -> None:
        async with aclosing(self._client.generate([0], SamplingParams(max_new_tokens=1))) as tokens:
            async for _ in tokens:
                pass

    async def tokenize(self, request: Request) -> Response:
        body = await self._body(request, Tokenize)
        if body.messages is not None:
            tokens = await self._chat_prompt(body.messages, {})
        else:
            assert body.prompt is not None
            tokens = await self._encode(body.prompt, body.add_special_tokens)
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
        wording = TextWording(self._tokenizer, body.logprobs)
        grammar = await self._grammar(body, None)
        return await self._answer(request, body, await self._prompts(body.prompt), body.logprobs, grammar, wording)

    async def chat(self, request: Request) -> Response:
        body = await self._body(request, ChatCompletion)
        tools = body.told_tools()
        if tools and self._about.tools is None:
            raise ApiError(400, f"how {self._about.model} calls tools is not known", param="tools")
        prompt = await self._chat_prompt(body.messages, body.chat_template_kwargs, tools)
        top = body.top_logprobs or 0 if body.logprobs else None
        family = self._about.tools if tools else None
        grammar = await self._grammar(body, family)
        wording = ChatWording(self._tokenizer, top, family)
        return await self._answer(request, body, [prompt], top, grammar, wording)

    async def _grammar(self, body: Sampling, family: type[ToolParser] | None) -> str | None:
        grammar = grammar_of(body, family)
        if grammar is not None:
            try:
                await self._about.check_grammar(grammar)
            except RequestError as e:
                raise ApiError(400, str(e), code="invalid_grammar") from e
        return grammar

    async def _answer(
        self,
        request: Request,
        body: Sampling,
        prompts: Sequence[Sequence[int]],
        top: int | None,
        grammar: str | None,
        wording: Wording,
    ) -> Response:
        logprobs = 0 if top is None else max(top, 1)
        answering = Answering(self._client, self._tokenizer, self._about.sampling, prompts, body, logprobs, grammar)
        about: Words = {
            "id": f"{wording.prefix}-{answering.id}",
            "created": answering.created,
            "model": self._about.model,
        }
        deltas = self._latest.watch(about["id"], answering, self._metrics.watch(answering.deltas()))
        try:
            # Before the status line goes out: a request that is refused gets a status that says so.
            first = await _unless_gone(request, anext(deltas))
        except (ApiError, ClientDisconnect):
            await deltas.aclose()
            raise
        if body.stream:
            usage = body.stream_options is not None and body.stream_options.include_usage
            events = _events(first, deltas, answering, about, wording, usage)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        choices = await _unless_gone(request, _choices(first, deltas, wording))
        return JSONResponse(about | {"object": wording.objects[1], "choices": choices, "usage": answering.usage})

    async def _body(self, request: Request, kind: type[Body]) -> Body:
        data = await self._bodies.read(request)
        try:
            body = kind.model_validate_json(data)
        except pydantic.ValidationError as e:
            raise fault(data, e) from e
        asked = getattr(body, "model", None)
        if asked is not None and asked != self._about.model:
            raise ApiError(
                404,
                f"there is no model {asked!r} here, but {self._about.model!r}",
                param="model",
                code="model_not_found",
            )
        return body

    async def _prompts(self, prompt: str | list[str] | list[int] | list[list[int]]) -> list[list[int]]:
        if isinstance(prompt, str):
            prompts = [await self._encode(prompt, True)]
        elif isinstance(prompt[0], int):
            prompts = [[token for token in prompt if isinstance(token, int)]]
        else:
            prompts = [await self._encode(one, True) if isinstance(one, str) else one for one in prompt]
        if not all(prompts):
            raise ApiError(400, "the prompt is empty; expected at least one token", param="prompt")
        return prompts

    async def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            if len(text) < LONG_TEXT:
                return self._tokenizer.encode(text, add_special_tokens)
            return await asyncio.to_thread(self._tokenizer.encode, text, add_special_tokens)
        except TokenizerError as e:
            raise ApiError(400, str(e)) from e

    async def _chat_prompt(
        self, messages: Sequence[Message], variables: dict[str, Any], tools: list[dict[str, Any]] | None = None
    ) -> list[int]:
        own = {"self", "messages", "tools", "add_generation_prompt"} & variables.keys()
        if own:
            raise ApiError(400, f"{min(own)} is not for chat_template_kwargs", param="chat_template_kwargs")
        told = [message.told() for message in messages]
        render = self._tokenizer.apply_chat_template  # a model's own, it may take as long as it likes
        try:
            text = await asyncio.to_thread(render, told, tools=tools, add_generation_prompt=True, **variables)
        except TokenizerError as e:
            # Not all of the sentence: it names the file.
            says = f"the chat template refused the messages: {e.__cause__}"
            if e.__cause__ is None:  # no template came so far as to refuse them
                says = f"{self._about.model} has no chat template that can be used; POST /v1/completions needs none"
            raise ApiError(400, says, param="messages") from e
        return await self._encode(text, False)


async def _unless_gone(request: Request, doing: Awaitable[T]) -> T:
    """What comes of `doing`, which ends, with ClientDisconnect, when the client hangs up: the server does not hear of
    that by itself before it answers. The body has been read."""

    async def hung_up() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, gone = asyncio.ensure_future(doing), asyncio.create_task(hung_up())
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _choices(first: Delta, rest: AsyncGenerator[Delta], wording: Wording) -> list[Words]:
    """Those of an answer that is told whole."""
    pieces: dict[int, list[Words]] = {}
    async with aclosing(rest):
        async for delta in _after(first, rest):
            piece = wording.piece(delta)
            if piece is not None:
                pieces.setdefault(delta.index, []).append(piece)
    return [wording.whole(pieces[index]) for index in sorted(pieces)]


async def _after(first: Delta, rest: AsyncIterator[Delta]) -> AsyncIterator[Delta]:
    yield first
    async for delta in rest:
        yield delta


async def _events(
    first: Delta, rest: AsyncIterator[Delta], answering: Answering, about: Words, wording: Wording, usage: bool
) -> AsyncIterator[bytes]:
    """The server-sent events of a streamed answer."""
    about = about | {"object": wording.objects[0]}
    extra: Words = {"usage": None} if usage else {}
    try:
        async for delta in _after(first, rest):
            piece = wording.piece(delta)
            if piece is not None:
                yield _event(about | {"choices": [piece]} | extra)
        if usage:
            yield _event(about | {"choices": [], "usage": answering.usage})
        yield b"data: [DONE]\n\n"
    except ApiError as e:
        yield _event(e.body())


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
