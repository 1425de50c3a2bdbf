"""A request from its prompts and its grammar to the deltas of its choices."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import replace

from tilerank.loader.generation_config import SamplingDefaults
from tilerank.loader.tokenizer import Tokenizer

from ...protocol.prompt import Prompt
from ..http.errors import ApiError
from ..link.client import EngineClient, OverloadedError
from ..link.connection import EngineGoneError, RefusedError
from .answer_format import AnswerReader
from .deltas import ChoiceDeltas, Delta, Usage
from .params import final_prompt, sampling_params, seeds
from .request import Sampling

MAX_CHOICES = 128


class Generation:
    """A request of an API, with `body.n` choices for each of `prompts`.

    ends: tokens that end an answer, beside those that the engine has of the model's configuration.

    prompts: is emptied, because pictures take much memory. grammar, bad_words: as in SamplingParams. draw_seed: returns
    the seed of a choice, if the request has none. new_reader: makes the reader of a choice. Raises ApiError if the
    request cannot run.

    body: without messages, once the request runs. is_stopped: set if no further delta is needed.
    """

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        defaults: SamplingDefaults,
        ends: tuple[int, ...],
        body: Sampling,
        prompts: list[Prompt],
        grammar: str | None,
        bad_words: tuple[tuple[int, ...], ...],
        draw_seed: Callable[[], int],
        new_reader: Callable[[], AnswerReader],
    ) -> None:
        if client.state is None:
            raise ApiError(503, "The engine is not ready.", code="engine_gone")
        context_length = client.state.context_length
        final = [final_prompt(prompt, body, context_length) for prompt in prompts]
        prompts.clear()
        if len(final) * body.n > MAX_CHOICES:
            raise ApiError(400, f"n: expected at most {MAX_CHOICES} choices, found {len(final) * body.n}", param="n")
        self.id = body.request_id or body.rid or secrets.token_hex(12)
        self.created = int(time.time())
        self.body = body
        self.tokenizer = tokenizer
        self.usage = Usage(sum(len(prompt.token_ids) for prompt in final))
        self.is_stopped = False
        self._client = client
        self._new_reader = new_reader
        needs_ids = body.return_token_ids or body.echoes or body.scores is not None
        self._prompt_ids = [list(prompt.token_ids) if needs_ids else [] for prompt in final]
        self._submissions = []
        for prompt in final:
            of_choices = seeds(body, draw_seed)
            values = vars(defaults)
            params = sampling_params(body, prompt, of_choices[0], context_length, values, ends, bad_words, grammar)
            self._submissions.append((prompt, params, of_choices))

    @property
    def prompts(self) -> list[Sequence[int]]:
        """The token ids of each prompt, as the engine gets them; empty once the request runs."""
        return [prompt.token_ids for prompt, _, _ in self._submissions]

    def check_room(self) -> None:
        """Raise ApiError if the request cannot be queued now."""
        with api_errors():
            self._client.check_room()

    async def run(self) -> AsyncGenerator[Delta]:
        """Yield the deltas of all choices as they are generated. Raises ApiError if a choice fails."""
        with ExitStack() as stack:
            stack.enter_context(api_errors())
            self._client.check_room()
            streams = [
                stream
                for submission in self._submissions
                for stream in stack.enter_context(self._client.submit(*submission))
            ]
            self._submissions.clear()  # pictures take much memory, and the client frees them once they are sent
            choices = [self._choice(index).read(stream) for index, stream in enumerate(streams)]
            async with aclosing(choices[0] if len(choices) == 1 else _merge(choices)) as deltas:
                async for delta in deltas:
                    yield delta

    async def shown(self, deltas: AsyncGenerator[Delta]) -> AsyncGenerator[Delta]:
        """Yield those of `deltas`, which come from `run`, that show something. They have the tokens of the others."""
        held: dict[int, Delta] = {}
        async with aclosing(deltas):
            async for delta in deltas:
                if self.is_stopped:
                    return
                if (before := held.pop(delta.index, None)) is not None:
                    delta = replace(delta, tokens=before.tokens + delta.tokens, ids=before.ids + delta.ids)
                if delta.shows:
                    yield delta
                else:
                    held[delta.index] = delta

    def _choice(self, index: int) -> ChoiceDeltas:
        body, number = self.body, index // self.body.n
        prompt_ids = self._prompt_ids[number]
        echo = (body.prompt_text(number) or self.tokenizer.decode(prompt_ids)) if body.echoes else ""
        return ChoiceDeltas(index, body, self._new_reader(), prompt_ids, echo, self.usage)


@contextmanager
def api_errors() -> Iterator[None]:
    """Turn the errors of the engine client into those of the API."""
    try:
        yield
    except RefusedError as e:
        raise ApiError(400, str(e)) from e
    except EngineGoneError as e:
        raise ApiError(503, str(e), code="engine_gone") from e
    except OverloadedError as e:
        raise ApiError(503, str(e), code="overloaded") from e


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
