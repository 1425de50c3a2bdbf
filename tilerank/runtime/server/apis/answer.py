"""What an API provides to write answers in its form. One request has one answer."""

import json
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from ..chat.deltas import ActiveRequest, Delta
from ..http.errors import ApiError

Json = dict[str, Any]
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


class Event(NamedTuple):
    """A server-sent event. data: JSON, or text as it is. name: of the event's type, None for an event without."""

    data: Json | str
    name: str | None = None

    def encode(self) -> bytes:
        """Return the bytes of the event."""
        data = self.data
        text = data if isinstance(data, str) else _JSON.encode(data)
        name = "" if self.name is None else f"event: {self.name}\n"
        return f"{name}data: {text}\n\n".encode()


class Answer(ABC):
    """Writes the answer to one request, from its deltas. id: of the answer in the API. stopped: no delta is needed.
    costly: whether `whole` takes long.

    The methods are called in this order: begin, add for each delta, then end; fail instead, at any time, if the request
    fails. They return the events of a streamed answer. `whole` is called after `end`, for an answer in one piece.
    """

    def __init__(self, active: ActiveRequest, prefix: str) -> None:
        self.id = f"{prefix}{active.id}"
        self.stopped = self.costly = False
        self._active = active

    def begin(self) -> list[Event]:
        """Return the events before the first text."""
        return []

    @abstractmethod
    def add(self, delta: Delta) -> list[Event]:
        """Append new text and return its events."""

    @abstractmethod
    def end(self) -> list[Event]:
        """Return the last events."""

    @abstractmethod
    def fail(self, error: ApiError) -> list[Event]:
        """Return the last events of a request that failed."""

    @abstractmethod
    def whole(self) -> Json | str:
        """Return the whole answer: JSON, or plain text."""
