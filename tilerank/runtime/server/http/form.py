"""Reads a form, multipart/form-data (RFC 7578), with Starlette's parser. Its fields and files stay in memory."""

import sys

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from .body import read_pieces
from .errors import ApiError

FORM = "multipart/form-data"
MAX_FIELDS = 64
"""Fields that are not files, and files."""
MAX_TEXT = 64 << 10
"""Bytes of a field that is not a file."""


class _Parser(MultiPartParser):
    spool_max_size = sys.maxsize  # bytes of a file beyond which it is written to the disk


async def read_form(request: Request, max_bytes: int) -> list[tuple[str, str | bytes]]:
    """Return names and contents of the fields in their order: texts, and the bytes of files.

    Raises ApiError for a body of more than `max_bytes`, and for one that is no form.
    """
    found = request.headers.get("content-type", "")
    if not found.lower().startswith(FORM):
        raise ApiError(400, f"Content-Type: expected {FORM} with a boundary, found {found!r}.")
    pieces = read_pieces(request, max_bytes)
    parser = _Parser(request.headers, pieces, max_files=MAX_FIELDS, max_fields=MAX_FIELDS, max_part_size=MAX_TEXT)
    try:
        form = await parser.parse()
    except MultiPartException as e:
        raise ApiError(400, f"The form cannot be read: {e.message}") from e
    return [(name, await _content(value)) for name, value in form.multi_items()]


async def _content(value: str | UploadFile) -> str | bytes:
    return value if isinstance(value, str) else await value.read()
