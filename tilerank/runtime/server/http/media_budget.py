"""Bounds the memory of media from the time they are read to the time the engine has taken them."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import ApiError

MAX_ENCODED = 48 << 20
"""Bytes of the media of a request, as they are sent or fetched."""
MAX_DECODED = 512 << 20
"""Bytes of the media of a request as RGB frames."""
MAX_HELD = 1 << 30
"""Bytes of the media of all requests, as they are sent or fetched. Further requests are refused."""
MAX_WAITING = 512 << 20
"""Bytes of all frames that wait for the engine. While they take more, no further request is decoded."""


class Share:
    """The media of one request. Raises ApiError if they, or those of all requests, exceed a limit."""

    def __init__(self, budget: "MediaBudget") -> None:
        self._budget = budget
        self._encoded = self._decoded = 0

    def add_encoded(self, nbytes: int) -> None:
        """Count bytes that are to be decoded."""
        self._encoded += nbytes
        self._budget.count(nbytes, 0)
        if self._encoded > MAX_ENCODED:
            raise ApiError(400, f"The media of a request may have {MAX_ENCODED >> 20} MiB together.", param="messages")
        if self._budget.encoded > MAX_HELD:
            raise ApiError(503, "The server holds too many media of other requests.", code="overloaded")

    def add_decoded(self, nbytes: int) -> None:
        """Count frames."""
        self._decoded += nbytes
        self._budget.count(0, nbytes)
        if self._decoded > MAX_DECODED:
            raise ApiError(
                400,
                f"The media of a request may have {MAX_DECODED // 3 >> 20} million pixels together, in all pictures "
                "and frames that the model looks at.",
                param="messages",
            )

    def drop_encoded(self) -> None:
        """Count only frames from now on: all media are decoded."""
        self._budget.count(-self._encoded, 0)
        self._encoded = 0

    async def wait_for_room(self) -> None:
        """Wait until these media may be decoded, because the engine has taken enough of those of other requests."""
        await self._budget.wait_for_room()

    def close(self) -> None:
        """Free all: the engine has taken the media, or the request has failed."""
        self._budget.count(-self._encoded, -self._decoded)
        self._encoded = self._decoded = 0


class MediaBudget:
    """The media that the server holds. encoded, decoded: their bytes."""

    def __init__(self) -> None:
        self.encoded = self.decoded = 0
        self._has_room = asyncio.Event()
        self._has_room.set()

    @contextmanager
    def share(self) -> Iterator[Share]:
        """Give a request its share, and free it afterwards."""
        share = Share(self)
        try:
            yield share
        finally:
            share.close()

    async def wait_for_room(self) -> None:
        """See Share.wait_for_room."""
        await self._has_room.wait()

    def count(self, encoded: int, decoded: int) -> None:
        """Add bytes."""
        self.encoded += encoded
        self.decoded += decoded
        if self.decoded > MAX_WAITING:
            self._has_room.clear()
        else:
            self._has_room.set()
