"""Reads request bodies within limits, and describes what is wrong with an invalid one."""

from collections.abc import AsyncGenerator
from typing import Any

import pydantic
import pydantic_core
from starlette.requests import Request

from .errors import ApiError
from .json_values import MAX_NUMBERS, JsonValues
from .media_budget import MAX_ENCODED
from .memory import request_memory

MAX_BODY = 8 << 20
"""Bytes of one body, enough for a prompt of a million tokens. What it may hold: json_values.py."""
MAX_MEDIA_BODY = MAX_BODY + MAX_ENCODED // 3 * 4
"""Bytes of one body for a model that takes media, which data: URLs hold in base64."""
MAX_FORM = MAX_ENCODED + (1 << 20)
"""Bytes of a form with a file, which it holds as it is."""


async def read_pieces(request: Request, max_bytes: int) -> AsyncGenerator[bytes]:
    """Yield the body as it arrives, which counts as the request's memory. Raises ApiError with status 413 or 503 if it
    exceeds a limit.

    A request for which there is no memory is read to its end before it is refused, because a client that still sends
    would not see the answer.
    """
    memory, nbytes, refused = request_memory(request), 0, None
    async for piece in request.stream():
        nbytes += len(piece)
        if nbytes > max_bytes:
            raise ApiError(413, f"The body is larger than {max_bytes >> 20} MiB.")
        if refused is None:
            try:
                memory.add_read(len(piece))
            except ApiError as e:
                refused = e
                memory.drop_read()
            else:
                yield piece
    if refused is not None:
        raise refused


async def read_json(request: Request, max_bytes: int, max_numbers: int = MAX_NUMBERS) -> tuple[bytearray, JsonValues]:
    """Return the body and its values. Raises ApiError as `read_pieces`, and with status 413 for too many values."""
    data, values = bytearray(), JsonValues()
    async for piece in read_pieces(request, max_bytes):
        if not values.exceed(max_numbers + 1):  # else the rest is neither counted nor kept
            values.add(piece)
            data += piece
    values.check("body", max_numbers)
    return data, values


def parse_object(data: bytes | bytearray) -> dict[str, Any]:
    """Return the JSON object that a body is. Raises ApiError."""
    try:
        value = pydantic_core.from_json(data)
    except ValueError as e:
        raise ApiError(400, f"Invalid JSON: {e}") from e
    if not isinstance(value, dict):
        raise ApiError(400, f"The body: expected a JSON object, found a value of type {type(value).__name__}.")
    return value


def validation_error(body: Any, error: pydantic.ValidationError) -> ApiError:
    """Return the API error for the first invalid field of a parsed body.

    pydantic reports an error for every alternative of a union field. The error of the best-matching alternative is
    used: one that is not about the type, else the one that lies deepest.
    """
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    candidates = [
        (not one["type"].endswith(("_type", "_parsing")), _path(body, one["loc"], one["type"] == "missing"), one["msg"])
        for one in errors
        if one["loc"][:1] == errors[0]["loc"][:1]
    ]
    _, path, message = max(candidates, key=lambda one: (one[0], len(one[1])))
    where, message = ".".join(path), message.removeprefix("Value error, ")  # pydantic's prefix for our own validators
    return ApiError(400, f"{where}: {message}" if where else message, param=where or None)


def _path(value: Any, loc: tuple[int | str, ...], missing: bool) -> list[str]:
    """Return pydantic's `loc` without its names of union alternatives. missing: the last part names an absent field."""
    path = []
    for i, part in enumerate(loc):
        if isinstance(part, int):
            exists = isinstance(value, list)
        else:
            exists = isinstance(value, dict) and part in value
        if exists:
            value = value[part]
        elif part != "[key]" and not (missing and i == len(loc) - 1):
            continue
        path.append(str(part))
    return path
