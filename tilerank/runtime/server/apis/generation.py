"""The way from a checked request to its answer, which all endpoints that generate text share.

An API translates its body into a chat (chat/request.py), and its Answer (answer.py) writes the generated text.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from ...protocol.errors import RequestError
from ...protocol.prompt import Prompt
from ..chat.deltas import ActiveRequest, Delta
from ..chat.grammars import request_grammar
from ..chat.prompts import ChatPrompt
from ..chat.reasoning import Thinking
from ..chat.request import ChatCompletion, Sampling
from ..chat.tools import ToolParser
from ..http.body import release_body
from ..http.errors import ApiError
from ..http.media_budget import Share
from .answer import Answer, Json
from .service import Service, while_connected

NewParser = Callable[[], ToolParser]


class Begun(NamedTuple):
    """A request whose first delta has arrived."""

    answer: Answer
    first: Delta
    rest: AsyncGenerator[Delta]


async def converse(
    service: Service,
    request: Request,
    body: ChatCompletion,
    new_answer: Callable[[ActiveRequest, NewParser | None], Answer],
) -> Response:
    """Answer a conversation. new_answer: gets what makes the parser of tool calls, None if there are no tools to call.

    Empties `body.messages`.
    """
    tools = body.template_tools()
    parser = tool_parser(service, tools)
    schemas = {tool.function.name: tool.function.parameters or {} for tool in body.callable_tools}
    new_parser = partial(parser, schemas) if parser else None
    with while_connected(request):
        with service.budget.share() as share:
            prompt, thinking = await conversation_prompt(service, body, share)
            prompts = [prompt]
            del prompt  # pictures take much memory, and the client frees them once they are sent
            grammar = await checked_grammar(service, body, parser, thinking)
            active = activate(service, body, prompts, body.alternatives, grammar, thinking)
            begun = await begin(service, request, active, new_answer(active, new_parser))
        return await finish(request, begun, body.stream)


async def conversation_prompt(service: Service, body: ChatCompletion, share: Share) -> ChatPrompt:
    """Return the prompt of a conversation. Empties `body.messages`."""
    variables, effort, tools = body.chat_template_kwargs, body.reasoning_effort, body.template_tools()
    return await service.prompts.from_messages(body.messages, variables, effort, tools, share, body.template_options)


def tool_parser(service: Service, tools: list[Json] | None) -> type[ToolParser] | None:
    """Return the parser of tool calls; None if there are no tools. Raises ApiError if the model's format is unknown."""
    parser = service.settings.tool_parser
    if tools and parser is None:
        model = service.settings.model
        raise ApiError(400, f"tools: the format of tool calls of {model} is unknown", param="tools")
    return parser if tools else None


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


def activate(
    service: Service,
    body: Sampling,
    prompts: list[Prompt],
    top: int | None,
    grammar: str | None,
    thinking: Thinking = Thinking.NEVER,
) -> ActiveRequest:
    """Return the request, ready to run. top: alternatives to list for each token, None for no log-probabilities.

    Empties `prompts`.
    """
    logprobs = 0 if top is None else max(top, 1)
    defaults = service.settings.sampling
    active = ActiveRequest(service.client, service.tokenizer, defaults, prompts, body, logprobs, grammar, thinking)
    prompts.clear()
    return active


async def begin(service: Service, request: Request, active: ActiveRequest, answer: Answer) -> Begun:
    """Run a request up to its first delta."""
    return Begun(answer, *await first_delta(service, request, active, answer.id))


async def first_delta(
    service: Service, request: Request, active: ActiveRequest, id: str
) -> tuple[Delta, AsyncGenerator[Delta]]:
    """Run a request up to its first delta. Returns it, and the others. id: of the request in the API."""
    deltas = service.recent.track(id, active, service.metrics.measure(active))
    # The status line is sent after the first delta, so that a failed request gets an error status.
    first = await anext(deltas)
    release_body(request)
    return first, deltas


async def finish(request: Request, begun: Begun, stream: bool) -> Response:
    """Return the answer, or the beginning of a streamed one."""
    if stream:
        headers = {"Cache-Control": "no-cache"}
        return StreamingResponse(_events(request, begun), media_type="text/event-stream", headers=headers)
    whole = await _whole(begun)
    return PlainTextResponse(whole) if isinstance(whole, str) else JSONResponse(whole)


async def _whole(begun: Begun) -> Json | str:
    answer = begun.answer
    answer.begin()
    async with aclosing(_deltas(begun)) as deltas:
        async for delta in deltas:
            answer.add(delta)
    answer.end()
    return await asyncio.to_thread(answer.whole) if answer.costly else answer.whole()


async def _events(request: Request, begun: Begun) -> AsyncIterator[bytes]:
    """Yield the server-sent events of a streamed answer."""
    answer = begun.answer
    try:
        for event in answer.begin():
            yield event.encode()
        async with aclosing(_deltas(begun)) as deltas:
            async for delta in deltas:
                for event in answer.add(delta):
                    yield event.encode()
        for event in answer.end():
            yield event.encode()
    except ApiError as e:
        request.app.state.metrics.count_error(e.status)
        for event in answer.fail(e):
            yield event.encode()


async def _deltas(begun: Begun) -> AsyncGenerator[Delta]:
    """Yield the deltas until the answer is complete or needs no more."""
    async with aclosing(begun.rest):
        yield begun.first
        async for delta in begun.rest:
            if begun.answer.stopped:
                return
            yield delta
