"""Runs one API request as one or more engine requests, and turns their tokens into deltas of choices."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import asdict, dataclass
from typing import Any

from tilerank.loader.generation_config import SamplingDefaults
from tilerank.loader.tokenizer import Tokenizer

from ...errors import RequestError
from ...params import SamplingParams
from ...prompt import Prompt
from ..api import ChatCompletion, Completion, Sampling
from ..client import EngineClient, EngineGoneError, Progress, RefusedError
from ..errors import ApiError
from ..messages import Token
from .reasoning import Text, Thinking
from .text import TextStream

MAX_CHOICES = 128


@dataclass(frozen=True)
class Delta:
    """New text of choice `index`, the tokens that make it up, and with the last delta of a choice the finish_reason.

    reasoning: new text of the reasoning, which comes before `text`, the answer.
    """

    index: int
    text: str
    tokens: tuple[Token, ...]
    finish_reason: str | None
    reasoning: str = ""


class ActiveRequest:
    """A running API request, with `body.n` choices for each of `prompts`.

    logprobs, grammar: as in SamplingParams. thinking: how the answers begin. Raises ApiError if the request cannot run.
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
        self.id = secrets.token_hex(12)
        self.created = int(time.time())
        self.prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self._client = client
        self._tokenizer = tokenizer
        self._defaults = asdict(defaults)
        self._stop = body.stop_strings
        self._thinking = thinking
        if len(prompts) * body.n > MAX_CHOICES:
            raise ApiError(400, f"n: expected at most {MAX_CHOICES} choices, found {len(prompts) * body.n}", param="n")
        self._submissions = [
            (prompt, self._params(body, prompt, logprobs, grammar), _seeds(body)) for prompt in prompts
        ]

    @property
    def usage(self) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }
        if self.reasoning_tokens:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return usage

    async def deltas(self) -> AsyncIterator[Delta]:
        """Yield the deltas of all choices as they are generated. Raises ApiError if a choice fails."""
        merged: asyncio.Queue[Delta | ApiError] = asyncio.Queue()
        with ExitStack() as stack:
            try:
                streams = [
                    stream
                    for submission in self._submissions
                    for stream in stack.enter_context(self._client.submit(*submission))
                ]
            except EngineGoneError as e:
                raise ApiError(503, str(e), code="engine_gone") from e
            self._submissions.clear()  # pictures take much memory, and the client frees them once they are sent
            tasks = [asyncio.create_task(self._run_choice(*choice, merged)) for choice in enumerate(streams)]
            open_choices = len(tasks)
            try:
                while open_choices:
                    item = await merged.get()
                    if isinstance(item, ApiError):
                        raise item
                    open_choices -= item.finish_reason is not None
                    yield item
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_choice(
        self, index: int, stream: AsyncGenerator[Progress], merged: "asyncio.Queue[Delta | ApiError]"
    ) -> None:
        try:
            async with aclosing(self._choice(index, stream)) as deltas:
                async for delta in deltas:
                    merged.put_nowait(delta)
        except RefusedError as e:
            merged.put_nowait(ApiError(400, str(e)))
        except EngineGoneError as e:
            merged.put_nowait(ApiError(503, str(e), code="engine_gone"))

    async def _choice(self, index: int, stream: AsyncGenerator[Progress]) -> AsyncGenerator[Delta]:
        text_stream = TextStream(self._tokenizer.stream(), self._stop, self._thinking)
        pending: list[Token] = []  # tokens whose text the stream still holds back
        async with aclosing(stream) as tokens:
            async for token in tokens:
                if not isinstance(token, Token):
                    continue
                self.completion_tokens += 1
                reason = token.finish_reason
                text = Text()
                if reason != "stop":
                    pending.append(token)
                    before = text_stream.reasoning_tokens
                    text = text_stream.push(token.token_id)
                    self.reasoning_tokens += text_stream.reasoning_tokens - before
                if reason is not None and not text_stream.stopped:
                    text += text_stream.flush()
                if text_stream.stopped:
                    reason = "stop"
                if text or reason is not None:
                    yield Delta(index, text.answer, tuple(pending), reason, text.reasoning)
                    pending = []
                if reason is not None:
                    return
            # Tokens end without a finish_reason if the grammar allows no further token.
            text = text_stream.flush()
            yield Delta(index, text.answer, tuple(pending), "stop", text.reasoning)

    def _params(self, body: Sampling, prompt: Prompt, logprobs: int, grammar: str | None) -> SamplingParams:
        state = self._client.state
        if state is None:
            raise ApiError(503, "The engine is not ready.", code="engine_gone")
        length = len(prompt.token_ids)
        room = state.context_length - length
        if room < 1:
            raise ApiError(
                400,
                f"The prompt has {length} tokens, but the context length is {state.context_length}, and the "
                "answer needs at least one token of it.",
                param="messages" if isinstance(body, ChatCompletion) else "prompt",
                code="context_length_exceeded",
            )
        requested = body.model_dump(include=set(self._defaults), exclude_none=True)
        try:
            return SamplingParams(
                max_new_tokens=min(_max_tokens(body) or room, room),
                presence_penalty=body.presence_penalty,
                frequency_penalty=body.frequency_penalty,
                logit_bias=body.logit_bias,
                ignore_eos=body.ignore_eos,
                stop_token_ids=tuple(body.stop_token_ids),
                logprobs=logprobs,
                grammar=grammar,
                **(self._defaults | requested),
            )
        except RequestError as e:
            raise ApiError(400, str(e)) from e


def _seeds(body: Sampling) -> list[int]:
    """Return the seed of each choice."""
    if body.seed is None:
        return [secrets.randbits(63) for _ in range(body.n)]
    return [(body.seed + choice) % (1 << 64) for choice in range(body.n)]


def _max_tokens(body: Sampling) -> int | None:
    if isinstance(body, ChatCompletion):
        return body.max_completion_tokens or body.max_tokens
    assert isinstance(body, Completion)
    return body.max_tokens
