"""Reads a form, multipart/form-data (RFC 7578), whose whole body is in memory."""

from email.message import Message
from email.parser import HeaderParser
from typing import NamedTuple

from .errors import ApiError

FORM = "multipart/form-data"
MAX_FIELDS = 64
MAX_HEAD = 4096
"""Bytes of the headers of one field."""
MAX_BOUNDARY = 70
"""Characters, by RFC 2046."""
MAX_TEXT = 64 << 10
"""Bytes of a field that is not a file."""


class FormField(NamedTuple):
    """A field of a form. is_file: the client gave it a file name."""

    name: str
    data: bytes
    is_file: bool

    def value(self) -> str | bytes:
        """Return the content of a file, or the text of any other field. Raises ApiError."""
        if self.is_file:
            return self.data
        if len(self.data) > MAX_TEXT:
            raise ApiError(413, f"{self.name}: the field has more than {MAX_TEXT >> 10} KiB.", param=self.name)
        try:
            return self.data.decode()
        except UnicodeDecodeError as e:
            raise ApiError(400, f"{self.name}: expected UTF-8.", param=self.name) from e


def read_form(content_type: str, body: bytes) -> list[FormField]:
    """Return the fields of a form in their order. Raises ApiError."""
    delimiter = b"--" + _boundary(content_type)
    if not body.startswith(delimiter):
        raise _malformed("its body does not begin with the boundary that Content-Type names")
    fields: list[FormField] = []
    at, between = len(delimiter), b"\r\n" + delimiter
    while not body.startswith(b"--", at):
        if len(fields) == MAX_FIELDS:
            raise ApiError(413, f"The form has more than {MAX_FIELDS} fields.")
        head_end = body.find(b"\r\n\r\n", at, at + MAX_HEAD)
        end = body.find(between, head_end + 4)
        if not body.startswith(b"\r\n", at) or head_end < 0 or end < 0 or between in body[at:head_end]:
            raise _malformed("a field is cut off, or has no headers")
        fields.append(_field(body[at + 2 : head_end], body[head_end + 4 : end]))
        at = end + len(between)
    return fields


def _boundary(content_type: str) -> bytes:
    header = Message()
    header["Content-Type"] = content_type
    boundary = header.get_boundary()
    if header.get_content_type() != FORM or not boundary or len(boundary) > MAX_BOUNDARY or not boundary.isascii():
        raise ApiError(400, f"Content-Type: expected {FORM} with a boundary, found {content_type!r}.")
    return boundary.encode()


def _field(head: bytes, data: bytes) -> FormField:
    header = HeaderParser().parsestr(head.decode("utf-8", "replace"))
    name = header.get_param("name", header="Content-Disposition")
    if header.get_content_disposition() != "form-data" or not isinstance(name, str) or not name:
        raise _malformed("expected a name of each field in Content-Disposition: form-data")
    if header.get("Content-Transfer-Encoding", "binary").lower() not in ("binary", "8bit", "7bit"):
        raise _malformed("fields must not have a Content-Transfer-Encoding")
    return FormField(name, data, header.get_filename() is not None)


def _malformed(why: str) -> ApiError:
    return ApiError(400, f"The form cannot be read: {why}.")
