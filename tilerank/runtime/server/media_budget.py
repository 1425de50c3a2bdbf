"""Bounds the memory of media from the time they are read to the time the engine has taken them."""

from collections.abc import Iterator
from contextlib import contextmanager

from .errors import ApiError

MAX_ENCODED = 48 << 20
"""Bytes of the media of a request, as they are sent or fetched."""
MAX_DECODED = 512 << 20
"""Bytes of the media of a request as RGB frames."""
MAX_HELD = 1 << 30
"""Bytes of the media of all requests, encoded and decoded."""


class Share:
    """The media of one request. Raises ApiError if they, or those of all requests, exceed a limit."""

    def __init__(self, budget: "MediaBudget") -> None:
        self.held = 0
        self._encoded = 0
        self._decoded = 0
        self._budget = budget

    def add_encoded(self, nbytes: int) -> None:
        """Count bytes that are to be decoded."""
        self._encoded += nbytes
        if self._encoded > MAX_ENCODED:
            raise ApiError(400, f"The media of a request may have {MAX_ENCODED >> 20} MiB together.", param="messages")
        self._add(nbytes)

    def replace_encoded(self, nbytes: int, decoded: int) -> None:
        """Count the frames that `nbytes` of a medium have become; these bytes are no longer held."""
        self._add(-nbytes)
        self._decoded += decoded
        if self._decoded > MAX_DECODED:
            raise ApiError(
                400,
                f"The media of a request may have {MAX_DECODED // 3 >> 20} million pixels together, in all pictures "
                "and frames that the model looks at.",
                param="messages",
            )
        self._add(decoded)

    def _add(self, nbytes: int) -> None:
        self.held += nbytes
        self._budget.held += nbytes
        if self._budget.held > MAX_HELD:
            raise ApiError(503, "The server holds too many media of other requests.", code="overloaded")


class MediaBudget:
    """The media that the server holds. held: their bytes."""

    def __init__(self) -> None:
        self.held = 0

    @contextmanager
    def share(self) -> Iterator[Share]:
        """Give a request its share, and free it afterwards."""
        share = Share(self)
        try:
            yield share
        finally:
            self.held -= share.held
