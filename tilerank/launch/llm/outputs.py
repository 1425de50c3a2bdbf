"""What `LLM` returns, under the names that vLLM gives these values."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tilerank.loader.tokenizer import Tokenizer
from tilerank.runtime.protocol.events import HiddenEvent
from tilerank.runtime.protocol.params import Logprobs
from tilerank.runtime.protocol.prompt import Prompt
from tilerank.runtime.server.apis.completions.choices import ChatFormatter
from tilerank.runtime.server.chat.deltas import Delta, Opening
from tilerank.runtime.server.chat.generation import Generation
from tilerank.runtime.server.link.connection import Progress


@dataclass(frozen=True)
class Logprob:
    """The natural log-probability of a token, before temperature and penalties. rank: 1 for the most likely token."""

    logprob: float
    rank: int
    decoded_token: str


TokenLogprobs = dict[int, Logprob]
"""Of one place in a text: the token there, and the most likely ones, by their ids."""


@dataclass(frozen=True)
class CompletionOutput:
    """One answer to a prompt.

    text: without reasoning and tool calls, where the answer to a chat has them. token_ids: with one that ends the text.
    logprobs: of the tokens of the text. stop_reason: the stop string that ended it, if one did.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its answers. prompt: its text; None for chats and token ids. prompt_logprobs: of the tokens of the
    prompt, of which the first has none."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int | None = None
    finished: bool = True


@dataclass(frozen=True)
class EmbeddingOutput:
    embedding: list[float]


@dataclass(frozen=True)
class EmbeddingRequestOutput:
    """The vector of a text."""

    outputs: EmbeddingOutput


@dataclass(frozen=True)
class ScoringOutput:
    score: float


@dataclass(frozen=True)
class ScoringRequestOutput:
    """The score of a pair of texts."""

    outputs: ScoringOutput


@dataclass(frozen=True)
class HiddenStatesOutput:
    """The hidden states of a prompt [tokens, hidden] by layer, numbered as they were asked for."""

    prompt_token_ids: list[int]
    hidden_states: dict[int, npt.NDArray[np.float32]]


class AnswerCollector:
    """Puts one answer together from its deltas. top: alternatives of each token; None for no log-probabilities."""

    def __init__(self, tokenizer: Tokenizer, top: int | None) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._formatter = ChatFormatter(tokenizer, None)
        self._deltas: list[Delta] = []
        self._chunks: list[dict[str, Any]] = []

    def add(self, delta: Delta) -> None:
        self._deltas.append(delta)
        self._chunks.append(self._formatter.chunk(delta))

    def output(self, index: int) -> CompletionOutput:
        """Return the answer, which is complete."""
        choice = self._formatter.choice(self._chunks)
        message = choice["message"]
        logprobs = None
        if self._top is not None:
            tokens = [token for delta in self._deltas for token in delta.tokens]
            logprobs = [
                token_logprobs(self._tokenizer, t.token_id, t.logprobs, self._top) for t in tokens if t.logprobs
            ]
        return CompletionOutput(
            index,
            message["content"] or "",
            [id for delta in self._deltas for id in delta.ids],
            choice["finish_reason"],
            self._deltas[-1].stop_string,
            logprobs,
            None if logprobs is None else sum(next(iter(one.values())).logprob for one in logprobs),
            message.get("reasoning_content", ""),
            message.get("tool_calls", []),
        )


def token_logprobs(tokenizer: Tokenizer, id: int, logprobs: Logprobs, top: int) -> TokenLogprobs:
    """Return the log-probabilities of the token with this id, which comes first, and of `top` alternatives."""

    def entry(id: int, value: float, rank: int) -> Logprob:
        return Logprob(value, rank, tokenizer.token_bytes(id, first=False).decode(errors="replace"))

    alternatives = {other: entry(other, value, i + 1) for i, (other, value) in enumerate(logprobs.top[:top])}
    return {id: entry(id, logprobs.chosen, logprobs.rank)} | {o: one for o, one in alternatives.items() if o != id}


async def collect(generation: Generation, prompt: str | None) -> RequestOutput:
    """Run a request with one prompt and return its output. prompt: as in RequestOutput. Raises ApiError."""
    body, tokenizer = generation.body, generation.tokenizer
    answers = [AnswerCollector(tokenizer, body.alternatives) for _ in range(body.n)]
    opening: Opening | None = None
    async with aclosing(generation.run()) as deltas:
        async for delta in deltas:
            answers[delta.index].add(delta)
            opening = opening or delta.opening
    assert opening is not None
    scores = None
    if opening.prompt_logprobs is not None and body.scores is not None:
        pairs = zip(opening.prompt_ids, opening.prompt_logprobs, strict=True)
        scores = [None if one is None else token_logprobs(tokenizer, id, one, body.scores) for id, one in pairs]
    return RequestOutput(
        generation.id,
        prompt,
        list(opening.prompt_ids),
        [answer.output(index) for index, answer in enumerate(answers)],
        scores,
        None if opening.start is None else opening.start.cached_tokens,
    )


async def collect_hidden_states(
    stream: AsyncGenerator[Progress], prompt: Prompt, layers: Sequence[int]
) -> HiddenStatesOutput:
    """Return the hidden states that the engine reports for a prompt. layers: as they were asked for."""
    ids = list(prompt.token_ids)
    states: dict[int, npt.NDArray[np.float32]] = {}
    async with aclosing(stream) as events:
        async for event in events:
            if isinstance(event, HiddenEvent):
                values = np.frombuffer(event.values, "<f4").reshape(event.count, -1)
                whole = states.setdefault(layers[event.index], np.empty((len(ids), values.shape[1]), np.float32))
                whole[event.start : event.start + event.count] = values
    return HiddenStatesOutput(ids, states)
