"""The files of a batch, in OpenAI's format: requests in, results out as they finish. No torch in here."""

import codecs
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from ..errors import LaunchError


class BatchRequest(msgspec.Struct):
    """A line of the input: a request under an id that no other line has. body: JSON."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Error(msgspec.Struct):
    """What is wrong with a line. line: its number, where its custom_id does not identify it."""

    code: str
    message: str
    line: int | None = None


class _Result(msgspec.Struct):
    """The part of a line of the output that says which request it belongs to."""

    id: str
    custom_id: str | None
    error: _Error | None


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file of JSON lines that are not blank, with their numbers. Raises LaunchError."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if number == 1 and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                    raise LaunchError(f"{path}: expected UTF-8, found the byte order mark of UTF-16")
                # Editors of some systems put a mark before UTF-8, too, where it means nothing.
                text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if text.strip():
                    yield number, text
    except OSError as e:
        raise LaunchError(f"{path} cannot be read: {e.strerror}") from e


def parse_line(line: bytes) -> BatchRequest:
    """Return the request of a line. Raises ValueError with a sentence."""
    try:
        request = msgspec.json.decode(line, type=BatchRequest)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise ValueError(str(e)) from e
    if request.method != "POST":
        raise ValueError(f"method: expected POST, found {request.method}")
    if not request.url.startswith("/v1/"):
        raise ValueError(f"url: expected a path such as /v1/chat/completions, found {request.url}")
    return request


class Results:
    """The output. Results of an earlier run stay: `ids` and `lines` are what they answer. Its last line is dropped if
    it is incomplete. Raises LaunchError if the file has other content, or another process writes it."""

    def __init__(self, path: Path) -> None:
        self.ids: set[str] = set()
        self.lines: set[int] = set()
        try:
            self._file = path.open("a+b", buffering=0)
        except OSError as e:
            raise LaunchError(f"{path} cannot be written: {e.strerror}") from e
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            self._file.close()
            raise LaunchError(f"{path} is written by another process") from e
        self._read(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add_response(self, custom_id: str, status: int, body: bytes) -> None:
        """Write the response to a request. body: JSON."""
        id = secrets.token_hex(12)
        response = {"status_code": status, "request_id": id, "body": msgspec.Raw(body)}
        self._write(id, custom_id, response, None)

    def add_error(self, error: str, message: str, *, custom_id: str | None = None, line: int | None = None) -> None:
        """Write that there is no response to a request, which its id or the number of its line identifies."""
        self._write(secrets.token_hex(12), custom_id, None, _Error(error, message, line))

    def _write(self, id: str, custom_id: str | None, response: dict[str, Any] | None, error: _Error | None) -> None:
        result = {"id": f"batch_req_{id}", "custom_id": custom_id, "response": response, "error": error}
        rest = memoryview(msgspec.json.encode(result) + b"\n")
        while rest:
            rest = rest[os.write(self._file.fileno(), rest) :]

    def _read(self, path: Path) -> None:
        end = 0
        self._file.seek(0)
        with open(os.dup(self._file.fileno()), "rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break
                try:
                    result = msgspec.json.decode(line, type=_Result)
                except (msgspec.DecodeError, UnicodeDecodeError) as e:
                    raise LaunchError(
                        f"{path} line {number}: expected the result of a batch, found something else"
                    ) from e
                end += len(line)
                if result.custom_id is not None:
                    self.ids.add(result.custom_id)
                elif result.error is not None and result.error.line is not None:
                    self.lines.add(result.error.line)
        self._file.truncate(end)
