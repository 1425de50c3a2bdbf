"""Responses that clients may continue or read again. They are kept in memory, within bounds."""

from collections import OrderedDict
from typing import NamedTuple

import msgspec

from ...http.json_values import MAX_NUMBERS, MAX_STRUCTURES, JsonValues
from ...http.memory import parsed_bytes
from ..answer import Json
from .items import ITEMS, Item

MAX_RESPONSES = 1000
MAX_BYTES = 96 << 20
"""Bytes of all responses, the conversations before them included."""
MAX_MEDIA_BYTES = 256 << 20
"""MAX_BYTES for a model that takes media, which conversations hold in base64."""
MAX_RESPONSE_BYTES = 8 << 20
"""Bytes of one response with the conversation before it. Longer ones are not kept."""
MAX_MEDIA_RESPONSE_BYTES = 32 << 20
"""MAX_RESPONSE_BYTES for a model that takes media."""


class KeptItems(NamedTuple):
    """Items of a conversation as a list in JSON, without what no prompt needs. values, parsed_bytes: of `data`."""

    data: bytes
    values: JsonValues
    parsed_bytes: int

    @staticmethod
    def of(items: list[Item]) -> "KeptItems":
        """Return these items to be kept."""
        data, values = ITEMS.dump_json(items, exclude_none=True, by_alias=True), JsonValues()
        values.add(data)
        return KeptItems(data, values, parsed_bytes(data, values))

    def parsed(self) -> list[Item]:
        """Return the items."""
        return ITEMS.validate_json(self.data)


class StoredResponse(NamedTuple):
    """A response.

    data: as JSON. before: the items of the conversation before it, in lists that all responses to it share. output: its
    own items, each under its id.
    """

    status: str
    data: bytes
    before: tuple[KeptItems, ...]
    output: dict[str, KeptItems]

    @property
    def conversation(self) -> tuple[KeptItems, ...]:
        """The items of the conversation, those of the response included."""
        return (*self.before, *self.output.values())

    @property
    def nbytes(self) -> int:
        return len(self.data) + sum(len(kept.data) for kept in self.conversation)


class ResponseStore:
    """Keeps the responses that were used most recently."""

    def __init__(
        self,
        max_responses: int = MAX_RESPONSES,
        max_bytes: int = MAX_BYTES,
        max_response_bytes: int = MAX_RESPONSE_BYTES,
    ) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self.max_response_bytes = min(max_response_bytes, max_bytes)
        self._num_bytes = 0
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._owners: dict[str, str] = {}  # the response of each output item

    @property
    def bounds(self) -> str:
        """Return what is kept, as a part of a sentence."""
        return (
            f"the last {self._max_responses} responses, at most {self._max_bytes >> 20} MiB together and "
            f"{self.max_response_bytes >> 20} MiB each"
        )

    def put(self, response: Json, before: tuple[KeptItems, ...]) -> None:
        """Keep a response, unless it is too large. before: the items before it."""
        output = {item["id"]: KeptItems.of(ITEMS.validate_python([item])) for item in response["output"]}
        data = msgspec.json.encode(response)
        stored = StoredResponse(response["status"], data, before, output)
        values = [kept.values for kept in stored.conversation]
        structures, numbers = sum(one.structures for one in values), sum(one.numbers for one in values)
        if stored.nbytes > self.max_response_bytes or structures > MAX_STRUCTURES or numbers > MAX_NUMBERS:
            return
        self._responses[response["id"]] = stored
        self._num_bytes += stored.nbytes
        self._owners.update(dict.fromkeys(output, response["id"]))
        while len(self._responses) > self._max_responses or self._num_bytes > self._max_bytes:
            self.delete(next(iter(self._responses)))

    def get(self, id: str) -> StoredResponse | None:
        """Return a response; None if it is not kept."""
        if id in self._responses:
            self._responses.move_to_end(id)
        return self._responses.get(id)

    def item(self, id: str) -> KeptItems | None:
        """Return an output item of a response; None if it is not kept."""
        stored = self.get(self._owners.get(id, ""))
        return stored and stored.output[id]

    def delete(self, id: str) -> bool:
        """Forget a response. Returns whether it was kept."""
        stored = self._responses.pop(id, None)
        if stored is None:
            return False
        self._num_bytes -= stored.nbytes
        for item in stored.output:
            del self._owners[item]
        return True
