"""Reads the bodies of requests, bounded each and all together, and says what is wrong with one."""

from typing import Any

import pydantic
import pydantic_core
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


def fault(data: bytes, error: pydantic.ValidationError) -> ApiError:
    """The first of them. Where a value may be of several kinds, each kind has found something: what is told is of the
    kind that it comes nearest to, which has found more than that it is of another, or has looked deepest into it."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    body = pydantic_core.from_json(data) if errors[0]["loc"] else None
    found = [
        (not one["type"].endswith(("_type", "_parsing")), _path(body, one["loc"], one["type"] == "missing"), one["msg"])
        for one in errors
        if one["loc"][:1] == errors[0]["loc"][:1]
    ]
    _, path, says = max(found, key=lambda one: (one[0], len(one[1])))
    where, says = ".".join(path), says.removeprefix("Value error, ")  # that of a validator of ours
    return ApiError(400, f"{where}: {says}" if where else says, param=where or None)


def _path(value: Any, loc: tuple[int | str, ...], missing: bool) -> list[str]:
    """`loc` as the client knows it, without pydantic's names for the kinds. missing: its last part is not there."""
    path = []
    for i, part in enumerate(loc):
        if isinstance(part, int):
            known = isinstance(value, list)
        else:
            known = isinstance(value, dict) and part in value
        if known:
            value = value[part]
        elif part != "[key]" and not (missing and i == len(loc) - 1):
            continue
        path.append(str(part))
    return path
