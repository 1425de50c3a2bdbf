"""Answers in the form of /v1/chat/completions and /v1/completions: choices, as chunks or whole."""

from collections.abc import Sequence

from ....protocol.params import Logprobs
from ...chat.deltas import Delta, Usage
from ...chat.generation import Generation
from ..answer import Answer, Json, ServerSentEvent, as_json
from .choices import Formatter

MAX_CHUNKS = 64
"""A choice of a whole answer keeps so many chunks, each of some 600 bytes, before they become one."""
_DONE = ServerSentEvent("[DONE]")


class ChoicesAnswer(Answer):
    """An answer with choices.

    stream: are the choices sent in chunks? usage: does a last chunk of the stream count the tokens?
    """

    def __init__(self, generation: Generation, model: str, formatter: Formatter, stream: bool, usage: bool) -> None:
        super().__init__(generation, f"{formatter.prefix}-")
        chunk_object, whole_object = formatter.objects
        self._envelope: Json = {
            "id": self.id,
            "created": generation.created,
            "model": model,
            "object": chunk_object if stream else whole_object,
        }
        self.costly = formatter.costly
        self._formatter = formatter
        self._stream = stream
        self._usage = usage
        self._chunks: dict[int, list[Json]] = {}  # of each choice of a whole answer

    def add(self, delta: Delta) -> list[ServerSentEvent]:
        chunk = self._formatter.chunk(delta) | self._additions(delta)
        if not self._stream:
            self._keep(delta.index, chunk)
            return []
        shared = {name: chunk.pop(name) for name in self._formatter.shared if name in chunk}
        options = self._generation.body.stream_options
        counted = options is not None and options.continuous_usage_stats
        usage = {"usage": usage_json(self._generation.usage) if counted else None} if self._usage or counted else {}
        return [ServerSentEvent(self._envelope | shared | {"choices": [chunk]} | usage)]

    def _keep(self, index: int, chunk: Json) -> None:
        """Keep a chunk of a whole answer in little memory: log-probabilities as JSON, and many chunks as one."""
        chunks = self._chunks.setdefault(index, [])
        if chunk["logprobs"] is not None:
            named = chunk["logprobs"].items()
            chunk["logprobs"] = {name: as_json(one) if isinstance(one, list) else one for name, one in named}
        if len(chunks) == MAX_CHUNKS:
            ids = {"token_ids": _token_ids(chunks)} if "token_ids" in chunks[0] else {}
            chunks[:] = [self._formatter.merged(chunks) | ids]
        chunks.append(chunk)

    def end(self) -> list[ServerSentEvent]:
        last = ServerSentEvent(self._envelope | {"choices": [], "usage": usage_json(self._generation.usage)})
        return [last, _DONE] if self._usage else [_DONE]

    def whole(self) -> Json:
        choices: list[Json] = []
        shared: Json = {}
        for _, chunks in sorted(self._chunks.items()):
            choice = self._formatter.choice(chunks)
            choice |= {name: chunks[0][name] for name in ("prompt_token_ids", "prompt_logprobs") if name in chunks[0]}
            if "token_ids" in chunks[0]:
                choice["token_ids"] = _token_ids(chunks)
            shared |= {name: choice.pop(name) for name in self._formatter.shared if name in choice}
            choices.append(choice)
        return self._envelope | shared | {"choices": choices, "usage": usage_json(self._generation.usage)}

    def _additions(self, delta: Delta) -> Json:
        """Return the fields of a chunk that other servers have: token ids, and scores of the prompt."""
        added: Json = {}
        if self._generation.body.return_token_ids:
            added["token_ids"] = list(delta.ids)
            if delta.opening is not None:
                added["prompt_token_ids"] = list(delta.opening.prompt_ids)
        if delta.opening is not None and delta.opening.prompt_logprobs is not None:
            ids, scores = delta.opening.prompt_ids, delta.opening.prompt_logprobs
            scored = (one if one is None else self._scored(id, one) for id, one in zip(ids, scores, strict=True))
            added["prompt_logprobs"] = as_json(list(scored))
        return added

    def _scored(self, id: int, score: Logprobs) -> Json:
        """Return the likeliest tokens, and the token of the prompt, by their ids."""
        ranked = [
            *((one, value, rank) for rank, (one, value) in enumerate(score.top, 1)),
            (id, score.chosen, score.rank),
        ]
        wanted = getattr(self._generation.body, "prompt_logprobs", None) or 0
        return {
            str(one): {"logprob": value, "rank": rank, "decoded_token": self._generation.tokenizer.decode([one])}
            for one, value, rank in [*ranked[:wanted], ranked[-1]]
        }


def _token_ids(chunks: Sequence[Json]) -> list[int]:
    return [id for chunk in chunks for id in chunk["token_ids"]]


def usage_json(usage: Usage) -> Json:
    """Return the counts of tokens under OpenAI's names."""
    counts: Json = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
    }
    if usage.cached_tokens is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
    details = {
        "reasoning_tokens": usage.reasoning_tokens,
        "audio_tokens": usage.audio_tokens,
        "accepted_prediction_tokens": usage.accepted_tokens,
        "rejected_prediction_tokens": usage.rejected_tokens,
    }
    if any(details.values()):
        counts["completion_tokens_details"] = {name: count for name, count in details.items() if count}
    return counts
