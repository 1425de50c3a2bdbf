"""Reads the bodies of requests, bounded each and all together."""

from starlette.requests import Request

from .errors import ApiError

MAX_BODY = 8 << 20
"""Bytes: a prompt of a million tokens. What Python makes of it is many times as large."""
MAX_BODIES = 256 << 20
"""Bytes of those that are read at a time."""


class Bodies:
    def __init__(self) -> None:
        self._held = 0

    async def read(self, request: Request) -> bytes:
        """ApiError if there is no room for it."""
        data = bytearray()
        try:
            async for piece in request.stream():
                data += piece
                self._held += len(piece)
                if len(data) > MAX_BODY:
                    raise ApiError(413, f"the body is longer than {MAX_BODY} bytes")
                if self._held > MAX_BODIES:
                    raise ApiError(503, "too many large requests at a time", code="overloaded")
            return bytes(data)
        finally:
            self._held -= len(data)
