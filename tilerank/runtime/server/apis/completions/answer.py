"""Answers in the form of /v1/chat/completions and /v1/completions: choices, as chunks or whole."""

from ....protocol.params import Logprobs
from ...chat.deltas import ActiveRequest, Delta
from ...chat.request import ChatCompletion
from ...http.errors import ApiError
from ..answer import Answer, Event, Json
from .choices import Formatter

_DONE = Event("[DONE]")


class ChoicesAnswer(Answer):
    """An answer with choices.

    stream: are the choices sent in chunks? usage: does a last chunk of the stream count the tokens?
    """

    def __init__(self, active: ActiveRequest, model: str, formatter: Formatter, stream: bool, usage: bool) -> None:
        super().__init__(active, f"{formatter.prefix}-")
        chunk_object, whole_object = formatter.objects
        self._envelope: Json = {
            "id": self.id,
            "created": active.created,
            "model": model,
            "object": chunk_object if stream else whole_object,
        }
        self.costly = formatter.costly
        self._formatter = formatter
        self._stream = stream
        self._usage = usage
        self._chunks: dict[int, list[Json]] = {}  # of each choice of a whole answer
        self._ids: dict[int, list[int]] = {}  # of the tokens of each choice whose chunk is still to come

    def add(self, delta: Delta) -> list[Event]:
        chunk = self._formatter.chunk(delta)
        self._ids.setdefault(delta.index, []).extend(delta.ids)
        if chunk is None:
            return []
        chunk |= self._additions(delta)
        if not self._stream:
            self._chunks.setdefault(delta.index, []).append(chunk)
            return []
        shared = {name: chunk.pop(name) for name in self._shared_names if name in chunk}
        options = self._active.body.stream_options
        counted = options is not None and options.continuous_usage_stats
        usage = {"usage": self._active.usage if counted else None} if self._usage or counted else {}
        return [Event(self._envelope | shared | {"choices": [chunk]} | usage)]

    def end(self) -> list[Event]:
        last = Event(self._envelope | {"choices": [], "usage": self._active.usage})
        return [last, _DONE] if self._usage else [_DONE]

    def fail(self, error: ApiError) -> list[Event]:
        return [Event(error.body())]

    def whole(self) -> Json:
        choices: list[Json] = []
        shared: Json = {}
        for _, chunks in sorted(self._chunks.items()):
            choice = self._formatter.choice(chunks)
            choice |= {name: chunks[0][name] for name in ("prompt_token_ids", "prompt_logprobs") if name in chunks[0]}
            if "token_ids" in chunks[0]:
                choice["token_ids"] = [id for chunk in chunks for id in chunk["token_ids"]]
            shared |= {name: choice.pop(name) for name in self._shared_names if name in choice}
            choices.append(choice)
        return self._envelope | shared | {"choices": choices, "usage": self._active.usage}

    @property
    def _shared_names(self) -> tuple[str, ...]:
        """What all choices of an answer share. All choices of a chat have the same prompt."""
        return ("prompt_token_ids",) if isinstance(self._active.body, ChatCompletion) else ()

    def _additions(self, delta: Delta) -> Json:
        """Return the fields of a chunk that other servers have: token ids, and scores of the prompt."""
        added: Json = {}
        if self._active.body.return_token_ids:
            added["token_ids"] = self._ids.pop(delta.index, [])
            if delta.opening is not None:
                added["prompt_token_ids"] = list(delta.opening.prompt_ids)
        if delta.opening is not None and delta.opening.prompt_logprobs is not None:
            ids, scores = delta.opening.prompt_ids, delta.opening.prompt_logprobs
            added["prompt_logprobs"] = [
                None if score is None else self._scored(id, score) for id, score in zip(ids, scores, strict=True)
            ]
        return added

    def _scored(self, id: int, score: Logprobs) -> Json:
        """Return the likeliest tokens, and the token of the prompt, by their ids."""
        ranked = [
            *((one, value, rank) for rank, (one, value) in enumerate(score.top, 1)),
            (id, score.chosen, score.rank),
        ]
        wanted = getattr(self._active.body, "prompt_logprobs", None) or 0
        return {
            str(one): {"logprob": value, "rank": rank, "decoded_token": self._active.tokenizer.decode([one])}
            for one, value, rank in [*ranked[:wanted], ranked[-1]]
        }
