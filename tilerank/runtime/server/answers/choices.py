"""Answers in the form of /v1/chat/completions and /v1/completions: choices, as chunks or whole."""

from ..errors import ApiError
from .answer import Answer, Event, Json
from .completions import ActiveRequest, Delta
from .responses import Formatter

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
        self._formatter = formatter
        self._stream = stream
        self._usage = usage
        self._chunks: dict[int, list[Json]] = {}  # of each choice of a whole answer

    def add(self, delta: Delta) -> list[Event]:
        chunk = self._formatter.chunk(delta)
        if chunk is None:
            return []
        if not self._stream:
            self._chunks.setdefault(delta.index, []).append(chunk)
            return []
        return [Event(self._envelope | {"choices": [chunk]} | ({"usage": None} if self._usage else {}))]

    def end(self) -> list[Event]:
        last = Event(self._envelope | {"choices": [], "usage": self._active.usage})
        return [last, _DONE] if self._usage else [_DONE]

    def fail(self, error: ApiError) -> list[Event]:
        return [Event(error.body())]

    def whole(self) -> Json:
        choices = [self._formatter.choice(self._chunks[index]) for index in sorted(self._chunks)]
        return self._envelope | {"choices": choices, "usage": self._active.usage}
