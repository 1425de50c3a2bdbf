"""Responses that clients may continue or read again. They are kept in memory, within bounds."""

import json
from collections import OrderedDict
from typing import NamedTuple

from ..answer import Json

MAX_RESPONSES = 1000
MAX_BYTES = 256 << 20
"""Bytes of all responses, the conversations before them included."""
MAX_RESPONSE_BYTES = 32 << 20
"""Bytes of one response. Longer conversations, because of pictures, are not kept."""


class Stored(NamedTuple):
    """A response and the items of the conversation before it, as JSON."""

    response: bytes
    items: bytes

    @property
    def conversation(self) -> list[Json]:
        """The items of the conversation, those of the response included."""
        items: list[Json] = json.loads(self.items)
        output: list[Json] = json.loads(self.response)["output"]
        return items + output


class ResponseStore:
    """Keeps the responses that were used most recently."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._responses: OrderedDict[str, Stored] = OrderedDict()
        self._owners: dict[str, str] = {}  # the response of each output item

    @property
    def bounds(self) -> str:
        """Return what is kept, as a part of a sentence."""
        return f"the last {self._max_responses} responses, at most {self._max_bytes >> 20} MiB together"

    def put(self, response: Json, items: bytes) -> None:
        """Keep a response. items: JSON of the items before it."""
        stored = Stored(json.dumps(response, ensure_ascii=False).encode(), items)
        if _size(stored) > min(MAX_RESPONSE_BYTES, self._max_bytes):
            return
        self._responses[response["id"]] = stored
        self._num_bytes += _size(stored)
        self._owners.update((item["id"], response["id"]) for item in response["output"])
        while len(self._responses) > self._max_responses or self._num_bytes > self._max_bytes:
            self.delete(next(iter(self._responses)))

    def get(self, id: str) -> Stored | None:
        """Return a response; None if it is not kept."""
        if id in self._responses:
            self._responses.move_to_end(id)
        return self._responses.get(id)

    def item(self, id: str) -> Json | None:
        """Return an output item of a response; None if it is not kept."""
        stored = self.get(self._owners.get(id, ""))
        output = json.loads(stored.response)["output"] if stored else []
        return next((item for item in output if item["id"] == id), None)

    def delete(self, id: str) -> bool:
        """Forget a response. Returns whether it was kept."""
        stored = self._responses.pop(id, None)
        if stored is None:
            return False
        self._num_bytes -= _size(stored)
        for item in json.loads(stored.response)["output"]:
            del self._owners[item["id"]]
        return True


def _size(stored: Stored) -> int:
    return len(stored.response) + len(stored.items)
