"""The service behind all APIs: the state of a server, the reading of bodies, and the path from a chat to its answer."""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    ExitStack,
    aclosing,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import pydantic
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from tilerank.loader.chat.template import ReasoningStart
from tilerank.loader.generation_config import SamplingDefaults
from tilerank.loader.pooling import Pooling
from tilerank.loader.tokenizer import Tokenizer

from ...media.decoder import DecodedMedium
from ...media.family import PairTemplate
from ...media.messages import MediaSource
from ...protocol.errors import MediaError, RequestError
from ...protocol.prompt import Prompt
from ..chat.answer_format import AnswerFormat, AnswerReader, schemas_of
from ..chat.deltas import Delta
from ..chat.generation import Generation
from ..chat.grammars import request_grammar
from ..chat.ignored_fields import IgnoredFields, IgnoredNames
from ..chat.marked import PLAIN_TEXT, MarkedReader
from ..chat.media import MediaReader
from ..chat.messages import Message
from ..chat.prompts import ChatPrompt, PromptBuilder
from ..chat.request import ChatCompletion, Sampling, TemplateRequest
from ..chat.text_encoder import DirectTextEncoder, TextEncoder, TextError
from ..http.body import MAX_BODY, MAX_MEDIA_BODY, parse_object, read_json, validation_error
from ..http.errors import ApiError
from ..http.json_values import MAX_NUMBERS, MAX_TOKEN_IDS
from ..http.media_budget import MediaBudget, Share
from ..http.memory import ServerMemory, parsed_bytes, request_memory
from ..link.client import EngineClient
from ..monitoring.metrics import Metrics
from ..monitoring.recent_requests import RecentRequests
from .answer import Answer, AnswerStream, respond

Body = TypeVar("Body", bound=pydantic.BaseModel)


@dataclass(frozen=True)
class ServerSettings:
    """The settings of a server that follow from its model and its operator."""

    models: tuple[str, ...]  # its names in the API, of which answers have the first
    version: str  # of tilerank
    api_keys: tuple[str, ...]  # of which requests must have one; empty if none is needed
    sampling: SamplingDefaults  # the values of fields that a request leaves out
    answer_format: AnswerFormat  # of the model's reasoning and tool calls
    check_grammar: Callable[[str], Awaitable[None]]  # raises RequestError for one that must not reach the engine
    media: MediaReader | None = None  # reads pictures, videos and sound; None if the model takes none
    encoder: TextEncoder | None = None  # renders and tokenises; None to do that in the event loop
    weights: str = "unknown"  # the format in which ranks hold them, such as bfloat16 or int4
    voices: tuple[str, ...] = ()  # with which the model speaks; none if it does not
    template_variables: Mapping[str, Any] = field(default_factory=dict)  # those that a request leaves out
    pooling: Pooling | None = None  # how the model embeds texts or scores pairs; None if it generates text
    pairs: PairTemplate | None = None  # what it reads of a pair; None unless it scores pairs
    strict_fields: bool = False  # refuse fields, tools and efforts that other servers have, which are else ignored
    seed: int | None = None  # draws the seeds of requests without one; None for a random one
    open_metrics: bool = False  # whether /metrics needs no key

    @property
    def model(self) -> str:
        return self.models[0]

    @property
    def task(self) -> str:
        return "generate" if self.pooling is None else self.pooling.task


class Service:
    """The state of one server. started: Unix time in seconds."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer, settings: ServerSettings) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.settings = settings
        self.started = int(time.time())
        self.metrics = Metrics(client, settings.model, bool(settings.voices))
        self.recent = RecentRequests()
        self._ignored = IgnoredNames()
        self.budget = MediaBudget()
        self.memory = ServerMemory(settings.media is not None)
        processor = None if settings.media is None else settings.media.processor
        self._encoder = settings.encoder or DirectTextEncoder(tokenizer)
        self._end_token_ids: tuple[int, ...] | None = None  # known once a request needs them
        self._seeds = random.SystemRandom() if settings.seed is None else random.Random(settings.seed)
        self.prompts = PromptBuilder(
            tokenizer,
            settings.model,
            settings.answer_format.tool_format,
            processor,
            self._encoder,
            lambda: self.context_length,
            settings.template_variables,
            strict=settings.strict_fields,
        )

    @property
    def context_length(self) -> int | None:
        """The context length in tokens; None if no engine is ready."""
        state = self.client.state
        return state.context_length if state else None

    async def body(
        self, request: Request, kind: type[Body], *, media: bool = False, max_numbers: int = MAX_NUMBERS
    ) -> Body:
        """Read and check the body of a request. Raises ApiError. media: may it hold pictures and videos? max_numbers:
        more if it may hold token ids."""
        takes_media = media and self.settings.media is not None
        memory = request_memory(request)
        data, values = await read_json(request, MAX_MEDIA_BODY if takes_media else MAX_BODY, max_numbers)
        await memory.hold(parsed_bytes(data, values))
        async with self.turn(request):
            parsed = parse_object(data)
            del data
            memory.drop_read()
        async with self.turn(request):
            return self.checked(request, kind, parsed)

    def checked(self, request: Request, kind: type[Body], parsed: dict[str, Any]) -> Body:
        """Return the body of a request, of its parsed fields. What is ignored is logged, and named in the answer's
        header (app.py). Raises ApiError."""
        ignored = IgnoredFields(self.settings.strict_fields)
        try:
            body = kind.model_validate(parsed, context=ignored)
        except pydantic.ValidationError as e:
            raise validation_error(parsed, e) from e
        self.check_model(getattr(body, "model", None))
        request.state.ignored = ignored.names
        self._ignored.log(ignored.names, request.url.path)
        return body

    def most_numbers(self, prompts: int) -> int:
        """Return how many numbers a body may have that holds the token ids of so many prompts."""
        context = self.context_length
        return MAX_NUMBERS + (MAX_TOKEN_IDS if context is None else min(MAX_TOKEN_IDS, prompts * context))

    @asynccontextmanager
    async def turn(self, request: Request) -> AsyncIterator[None]:
        """Enter the turn of large requests for one phase of reading one. Other requests run before the next phase."""
        if not request_memory(request).is_large:
            yield
            return
        async with self.memory.turn:
            yield
            await asyncio.sleep(0)

    def prompting(self, request: Request) -> AbstractAsyncContextManager[None]:
        """Enter the few large requests that become prompts. Media have bounds of their own (chat/media.py)."""
        is_large = request_memory(request).is_large and self.settings.media is None
        return self.memory.prompting if is_large else nullcontext()

    def check_model(self, requested: str | None) -> None:
        """Raise ApiError if a request names another model than the one that is served."""
        models = self.settings.models
        if requested is not None and requested not in models:
            message = f"There is no model {requested!r}; this server serves {' and '.join(map(repr, models))}."
            raise ApiError(404, message, param="model", code="model_not_found")

    async def prompt(self, messages: list[Message], template: TemplateRequest, share: Share) -> ChatPrompt:
        """Return the prompt of a conversation, which is emptied. share: for its media. Raises ApiError."""

        async def read(sources: Sequence[MediaSource]) -> list[DecodedMedium]:
            assert self.settings.media is not None
            return await self.settings.media.read(sources, share)

        try:
            return await self.prompts.from_messages(messages, template, read)
        except MediaError as e:
            raise ApiError(400, f"messages: {e}", param="messages") from e

    async def generation(
        self, chat: ChatCompletion, share: Share, *, begun: Sequence[int] = (), runs: bool = True
    ) -> Generation:
        """Return the generation of a chat, whose messages are emptied. share: for its media.

        begun: tokens of the answer that are a part of the prompt. runs: False if only the prompt is needed.
        """
        format, tools = self.settings.answer_format, chat.callable_tools
        if tools and not format.takes_tools:
            message = f"tools: the format of tool calls of {self.settings.model} is unknown"
            raise ApiError(400, message, param="tools")
        prompt, thinking = await self.prompt(chat.messages, chat.template, share)
        prompts = [Prompt(prompt.token_ids + list(begun)) if begun else prompt]
        del prompt  # pictures take much memory, and the client frees them once they are sent
        grammar = await self.grammar(chat, format, thinking) if runs else None
        new_reader = partial(format.new_reader, chat, self.tokenizer, thinking, schemas_of(tools))
        return await self.generation_of(chat, prompts, grammar, new_reader)

    async def generation_of(
        self,
        body: Sampling,
        prompts: list[Prompt],
        grammar: str | None,
        new_reader: Callable[[], AnswerReader] | None = None,
    ) -> Generation:
        """Return a Generation, for whose parameters see there. new_reader: None for answers that are all text."""
        defaults, ends = self.settings.sampling, await self._ends()
        bad_words = await self.prompts.bad_words(body.bad_words)
        generation = Generation(
            self.client,
            self.tokenizer,
            defaults,
            ends,
            body,
            prompts,
            grammar,
            bad_words,
            partial(self._seeds.getrandbits, 63),
            new_reader or partial(MarkedReader, body, self.tokenizer),
        )
        body.drop_large_fields()
        return generation

    async def _ends(self) -> tuple[int, ...]:
        """Return the tokens that end an answer according to the tokenizer and the chat template."""
        if self._end_token_ids is None:
            try:
                after_answer = (await self._encoder.facts()).after_answer
            except TextError:  # the template cannot be used; requests that need it say so
                after_answer = ""
            self._end_token_ids = self.tokenizer.end_token_ids(after_answer)
        return self._end_token_ids

    async def grammar(
        self, body: Sampling, format: AnswerFormat = PLAIN_TEXT, thinking: ReasoningStart = ReasoningStart.NEVER
    ) -> str | None:
        """Return the grammar of the answer; None if any text is allowed. Raises ApiError if it cannot be followed."""
        new_grammar = partial(request_grammar, body, self.tokenizer, format, thinking)
        takes_long = body.constraint is not None or body.must_call  # a large schema takes up to a second
        grammar = await asyncio.to_thread(new_grammar) if takes_long else new_grammar()
        if grammar is not None:
            try:
                await self.settings.check_grammar(grammar)
            except RequestError as e:
                raise ApiError(400, str(e), code="invalid_grammar") from e
        return grammar

    async def answer(
        self,
        request: Request,
        new_generation: Callable[[Share], Awaitable[Generation]],
        new_answer: Callable[[Generation], Answer],
        kept: int = 0,
    ) -> Response:
        """Answer a request. new_generation: gets the share of its media. new_answer: makes the answer of its API. kept:
        bytes of the body that the answer repeats.

        A streamed answer begins before the request is queued, so that later errors are events.
        """
        with ExitStack() as held, while_connected(request):
            async with self.prompting(request):
                generation = await new_generation(held.enter_context(self.budget.share()))
            answer = new_answer(generation)
            request_memory(request).release(kept)
            if not generation.body.stream:
                return await respond(answer, self._deltas(generation, answer.id, held), request_memory(request))
            generation.check_room()
            left = held.pop_all()
            return AnswerStream(request, answer, self._deltas(generation, answer.id, left), left)

    async def begin(self, request: Request, generation: Generation, id: str) -> AsyncGenerator[Delta]:
        """Run a request up to its first delta. Returns all of its deltas. id: of the request in the API.

        For an answer that is no stream of events: its status line is sent after the first delta, so that a failed
        request gets an error status.
        """
        request_memory(request).release()
        deltas = self._deltas(generation, id, ExitStack())
        return _chained(await anext(deltas), deltas)

    async def _deltas(self, generation: Generation, id: str, held: ExitStack) -> AsyncGenerator[Delta]:
        """Run a request and yield its deltas. held: is closed with the first one, when the engine has the prompt."""
        measured = self.metrics.measure(generation)
        async with aclosing(generation.shown(self.recent.track(id, generation.usage, measured))) as deltas:
            async for delta in deltas:
                held.close()
                yield delta


async def _chained(first: Delta, rest: AsyncGenerator[Delta]) -> AsyncGenerator[Delta]:
    async with aclosing(rest):
        yield first
        async for delta in rest:
            yield delta


@contextmanager
def while_connected(request: Request) -> Iterator[None]:
    """Cancel what the context awaits, and raise ClientDisconnect, as soon as the client disconnects.

    The request's body must have been read. Without this, a disconnect is noticed only when the answer is sent.
    """
    task = asyncio.current_task()
    assert task is not None
    is_gone = False

    async def watch() -> None:
        nonlocal is_gone
        while (await request.receive())["type"] != "http.disconnect":
            pass
        is_gone = True
        task.cancel()

    watching = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if not is_gone or task.uncancel():  # the server cancels the request as well
            raise
        raise ClientDisconnect from None
    finally:
        watching.cancel()
