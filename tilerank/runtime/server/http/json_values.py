"""Counts the values of a JSON text before it is parsed, because each takes many times as much memory as its bytes."""

from collections.abc import Iterable

from .errors import ApiError

MAX_STRUCTURES = 1 << 16
"""Strings, keys, objects and lists of one body: parsed and checked, each takes hundreds of bytes and microseconds."""
MAX_NUMBERS = 1 << 17
"""Numbers, true, false and null of one body."""
MAX_TOKEN_IDS = 1 << 20
"""Token ids of one body beside MAX_NUMBERS, if the context is long enough."""
_PIECE = 64 << 10
"""Bytes that are counted at once: the memory that counting takes is a multiple of them."""


class JsonValues:
    """Counts the values of a JSON text, whose pieces arrive one after the other, without parsing them.

    Exact for valid JSON, except that each empty object or list counts as a number as well. The values before the first
    error of a text, which are all that a parser makes of it, are counted exactly as well.
    """

    def __init__(self) -> None:
        self._quotes = self._opened = self._separators = 0
        self._backslash = b""  # that the last piece ends with, if it begins an escape

    @property
    def structures(self) -> int:
        """Strings, keys, objects and lists."""
        return self._strings + self._opened

    @property
    def numbers(self) -> int:
        """Numbers, true, false and null: what commas and colons separate and is no structure.

        The count of the beginning of a text exceeds that of the whole by at most one."""
        return max(0, self._separators + 1 - self._strings)

    @property
    def _strings(self) -> int:
        return (self._quotes + 1) // 2

    def exceed(self, max_numbers: int) -> bool:
        """Return whether there are more values than a body may have."""
        return self.structures > MAX_STRUCTURES or self.numbers > max_numbers

    def check(self, where: str, max_numbers: int) -> None:
        """Raise ApiError with status 413 if there are more values than a body may have. where: they are."""
        _check(where, self.structures, self.numbers, max_numbers)

    def add(self, data: bytes) -> None:
        """Count the next piece of a text."""
        for begin in range(0, len(data), _PIECE):
            self._add(self._backslash + data[begin : begin + _PIECE])

    def _add(self, piece: bytes) -> None:
        # A run of backslashes begins with an escape, so that an odd one ends within an escape.
        cut = (len(piece) - len(piece.rstrip(b"\\"))) % 2
        self._backslash = piece[len(piece) - cut :]
        piece = piece[: len(piece) - cut].replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.split(b'"')  # alternately outside and inside of strings
        outside = b"".join(parts[self._quotes % 2 :: 2])
        self._separators += outside.count(b",") + outside.count(b":")
        self._opened += outside.count(b"[") + outside.count(b"{")
        self._quotes += len(parts) - 1


def check_texts(where: str, texts: Iterable[str]) -> None:
    """Raise ApiError with status 413 if strings hold JSON with more values together than a body may have."""
    structures = numbers = 0
    for text in texts:
        values = JsonValues()
        values.add(text.encode("utf-8", "surrogatepass"))
        structures += values.structures
        numbers += values.numbers
    _check(where, structures, numbers, MAX_NUMBERS)


def _check(where: str, structures: int, numbers: int, max_numbers: int) -> None:
    for what, found, most in (
        ("strings, objects and lists", structures, MAX_STRUCTURES),
        ("numbers", numbers, max_numbers),
    ):
        if found > most:
            raise ApiError(413, f"{where}: expected at most {most:,} {what}, found at least {found:,}")
