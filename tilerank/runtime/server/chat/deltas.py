"""Runs one API request as one or more engine requests, and turns their tokens into deltas of choices."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, replace
from typing import Any

from tilerank.loader.generation_config import SamplingDefaults
from tilerank.loader.tokenizer import Tokenizer

from ...protocol.events import ScoredEvent, SoundEvent, TokenEvent
from ...protocol.params import Logprobs, SamplingParams, Start
from ...protocol.prompt import Prompt
from ..http.errors import ApiError
from ..link.client import EngineClient, EngineGoneError, OverloadedError, Progress, RefusedError
from .params import final_prompt, sampling_params, seeds
from .reasoning import Text, Thinking
from .request import ChatCompletion, Completion, Sampling
from .text import TextStream

MAX_CHOICES = 128
BYTES_OF_FRAME = 1920 * 2
"""Of a frame of speech, 80 ms of samples of 16 bits, which usage counts as a token."""


@dataclass(frozen=True)
class Delta:
    """New text of choice `index`, the tokens that make it up, and with the last delta of a choice the finish_reason.

    reasoning: new text of the reasoning, which comes before `text`, the answer. ids: the ids of the new tokens, with
    one that ends the text and is not among `tokens`. opening: of the first delta of a choice. `text` and `tokens` begin
    with the prompt if the request wants its echo. sound: new samples of the speech, as in SoundEvent; the last
    delta of a choice that speaks comes with them.
    """

    index: int
    text: str
    tokens: tuple[TokenEvent, ...]
    finish_reason: str | None
    reasoning: str = ""
    ids: tuple[int, ...] = ()
    opening: "Opening | None" = None
    sound: bytes = b""


@dataclass(frozen=True)
class Opening:
    """What is known when a choice begins.

    start: None from an engine that does not report it. prompt_ids: empty unless the request needs them.
    prompt_logprobs: None unless the request wants them; the first token of a prompt has none.
    """

    start: Start | None
    prompt_ids: Sequence[int] = ()
    prompt_logprobs: Sequence[Logprobs | None] | None = None


class ActiveRequest:
    """A running API request, with `body.n` choices for each of `prompts`.

    body: without messages, once the request runs. logprobs, grammar: as in SamplingParams. thinking: how the answers
    begin. Raises ApiError if the request cannot run.
    """

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        defaults: SamplingDefaults,
        prompts: Sequence[Prompt],
        body: Sampling,
        logprobs: int,
        grammar: str | None,
        thinking: Thinking = Thinking.NEVER,
    ) -> None:
        if client.state is None:
            raise ApiError(503, "The engine is not ready.", code="engine_gone")
        context_length = client.state.context_length
        prompts = [final_prompt(prompt, body, context_length) for prompt in prompts]
        self.id = body.request_id or body.rid or secrets.token_hex(12)
        self.created = int(time.time())
        self.prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        self.cached_tokens: int | None = None
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self._sound_bytes: dict[int, int] = {}  # of the speech of each choice
        self.stop_string: str | None = None  # that ended a choice
        self._client = client
        self.tokenizer = tokenizer
        self.body = body
        self._thinking = thinking
        if len(prompts) * body.n > MAX_CHOICES:
            raise ApiError(400, f"n: expected at most {MAX_CHOICES} choices, found {len(prompts) * body.n}", param="n")
        wants_ids = body.return_token_ids or (isinstance(body, Completion) and (body.echo or body.scores is not None))
        self._prompt_ids = [list(prompt.token_ids) if wants_ids else [] for prompt in prompts]
        fields = (context_length, vars(defaults), tokenizer, logprobs, grammar)
        self._submissions: list[tuple[Prompt, SamplingParams, list[int]]] = []
        for prompt in prompts:
            of_choices = seeds(body)
            self._submissions.append((prompt, sampling_params(body, prompt, of_choices[0], *fields), of_choices))

    @property
    def prompts(self) -> list[Sequence[int]]:
        """The token ids of each prompt, as the engine gets them; empty once the request runs."""
        return [prompt.token_ids for prompt, _, _ in self._submissions]

    @property
    def usage(self) -> dict[str, Any]:
        audio_tokens = sum(-(-nbytes // BYTES_OF_FRAME) for nbytes in self._sound_bytes.values())
        completion_tokens = self.completion_tokens + audio_tokens
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self.prompt_tokens + completion_tokens,
        }
        if self.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        details = {"reasoning_tokens": self.reasoning_tokens, "audio_tokens": audio_tokens}
        if any(details.values()):
            usage["completion_tokens_details"] = {name: count for name, count in details.items() if count}
        return usage

    async def deltas(self) -> AsyncGenerator[Delta]:
        """Yield the deltas of all choices as they are generated. Raises ApiError if a choice fails."""
        with ExitStack() as stack:
            try:
                self._client.check_room()
                streams = [
                    stream
                    for submission in self._submissions
                    for stream in stack.enter_context(self._client.submit(*submission))
                ]
            except EngineGoneError as e:
                raise ApiError(503, str(e), code="engine_gone") from e
            except OverloadedError as e:
                raise ApiError(503, str(e), code="overloaded") from e
            self._submissions.clear()  # pictures take much memory, and the client frees them once they are sent
            choices = [self._choice(index, stream) for index, stream in enumerate(streams)]
            try:
                async with aclosing(choices[0] if len(choices) == 1 else _merge(choices)) as deltas:
                    async for delta in deltas:
                        yield delta
            except RefusedError as e:
                raise ApiError(400, str(e)) from e
            except EngineGoneError as e:
                raise ApiError(503, str(e), code="engine_gone") from e

    async def _choice(self, index: int, stream: AsyncGenerator[Progress]) -> AsyncGenerator[Delta]:
        """Yield the deltas of one choice. The first one has its opening, and the echo of the prompt."""
        opening = _OpeningBuilder()
        async with aclosing(self._generated(index, stream, opening)) as deltas:
            async for delta in deltas:
                first = opening.take()
                yield delta if first is None else self._opened(delta, *first)

    async def _generated(
        self, index: int, stream: AsyncGenerator[Progress], opening: "_OpeningBuilder"
    ) -> AsyncGenerator[Delta]:
        body = self.body
        tokens_of_text = self.tokenizer.stream(special=not body.skip_special_tokens)
        text_stream = TextStream(tokens_of_text, body.stop_strings, self._thinking, body.min_tokens, body.keeps_stop)
        speaks = isinstance(body, ChatCompletion) and body.audio is not None
        text_end: str | None = None  # the finish_reason of a text that is still being spoken
        shows_end = isinstance(body, Completion) and body.echo  # whose clients count the tokens
        pending: list[TokenEvent] = []  # tokens whose text the stream still holds back
        ids: list[int] = []
        async with aclosing(stream) as progress:
            async for item in progress:
                opening.add(item)
                if isinstance(item, ScoredEvent):
                    if item.finish_reason is not None:
                        yield Delta(index, "", (), item.finish_reason)
                        return
                    continue
                if isinstance(item, SoundEvent):
                    self._sound_bytes[index] = self._sound_bytes.get(index, 0) + len(item.samples)
                    yield Delta(index, "", (), text_end if item.last else None, sound=item.samples)
                    if item.last:
                        return
                    continue
                self.completion_tokens += 1
                ids.append(item.token_id)
                reason, text = item.finish_reason, Text()
                if reason != "stop" or shows_end:
                    pending.append(item)
                if reason != "stop" or body.keeps_stop:
                    before = text_stream.reasoning_tokens
                    text = text_stream.push(item.token_id)
                    self.reasoning_tokens += text_stream.reasoning_tokens - before
                if reason is not None and not text_stream.stopped:
                    text += text_stream.flush()
                if text_stream.stopped:
                    reason, self.stop_string = "stop", text_stream.stop_string
                if text or reason is not None:
                    yield self._delta(index, text, pending, None if speaks else reason, ids)
                    pending, ids = [], []
                if reason is not None and not speaks:
                    return
                text_end = reason
            # Tokens end without a finish_reason if the grammar allows no further token.
            yield self._delta(index, text_stream.flush(), pending, "stop", ids)

    def _delta(
        self, index: int, text: Text, tokens: Sequence[TokenEvent], reason: str | None, ids: Sequence[int]
    ) -> Delta:
        is_shown = not isinstance(self.body, ChatCompletion) or self.body.include_reasoning
        return Delta(index, text.answer, tuple(tokens), reason, text.reasoning if is_shown else "", tuple(ids))

    def _opened(self, delta: Delta, start: Start | None, scores: Sequence[Logprobs]) -> Delta:
        """Return the first delta of a choice with its opening, and with the echo of the prompt if it is wanted."""
        body, (number, choice) = self.body, divmod(delta.index, self.body.n)
        if start is not None and choice == 0:
            self.cached_tokens = (self.cached_tokens or 0) + start.cached_tokens
        prompt_ids = self._prompt_ids[number]
        logprobs = [None, *scores] if scores else [None] * len(prompt_ids)
        if isinstance(body, Completion) and body.echo:
            tokens = [TokenEvent(0, id, 0.0, logprobs=of_id) for id, of_id in zip(prompt_ids, logprobs, strict=True)]
            text = _prompt_text(body.prompt, number) or self.tokenizer.decode(prompt_ids)
            delta = replace(delta, text=text + delta.text, tokens=(*tokens, *delta.tokens))
        opening = Opening(
            start,
            prompt_ids,
            logprobs if isinstance(body, Completion) and body.prompt_logprobs is not None else None,
        )
        return replace(delta, opening=opening)


async def _merge(choices: Sequence[AsyncGenerator[Delta]]) -> AsyncGenerator[Delta]:
    """Yield the deltas of all choices as they come, up to the first error of one."""
    merged: asyncio.Queue[Delta | Exception | None] = asyncio.Queue()  # None at the end of each

    async def run(choice: AsyncGenerator[Delta]) -> None:
        try:
            async with aclosing(choice) as deltas:
                async for delta in deltas:
                    merged.put_nowait(delta)
            merged.put_nowait(None)
        except (RefusedError, EngineGoneError) as e:
            merged.put_nowait(e)

    tasks = [asyncio.create_task(run(choice)) for choice in choices]
    try:
        for _ in tasks:
            while (item := await merged.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _OpeningBuilder:
    """Collects what comes before the first delta of a choice: the scores of its prompt, and how it began."""

    def __init__(self) -> None:
        self._start: Start | None = None
        self._scores: list[Logprobs] = []
        self._is_open = True

    def add(self, item: Progress) -> None:
        if not self._is_open or isinstance(item, SoundEvent):
            return
        self._start = self._start or item.start
        if isinstance(item, ScoredEvent):
            self._scores += item.logprobs

    def take(self) -> tuple[Start | None, list[Logprobs]] | None:
        """Return both, once: for the first delta."""
        taken = (self._start, self._scores) if self._is_open else None
        self._is_open = False
        return taken


def _prompt_text(prompt: Any, number: int) -> str | None:
    """Return the text of a prompt as the client wrote it; None for token ids."""
    if isinstance(prompt, str):
        return prompt
    one = prompt[number]
    return one if isinstance(one, str) else None
