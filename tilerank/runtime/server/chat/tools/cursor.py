"""Reads a text that may still grow, such that what is read never depends on how the text arrives."""

import re
from collections.abc import Iterable
from typing import Any

from .calls import parse_json

_JSON_TOKEN = re.compile(r'"(?:[^"\\]++|\\.)*+"|["{}\[\]]', re.DOTALL)
SPACE = " \t\r\n"


class NotACallError(Exception):
    """The text is no tool call, whatever follows."""


class IncompleteError(Exception):
    """What the text is depends on text that is still to come."""


class Cursor:
    """A position `at` in `text`.

    Every method raises IncompleteError where more text could change its result, so that a format is one function that
    reads a call from beginning to end. complete: no more text follows. cut: the text ends because the answer reached
    its greatest length.
    """

    def __init__(self, text: str, at: int, complete: bool, cut: bool = False) -> None:
        self.text = text
        self.at = at
        self.complete = complete
        self.cut = cut

    def ahead(self, at: int | None = None) -> "Cursor":
        """Return another cursor on the same text, by default at the same position."""
        return Cursor(self.text, self.at if at is None else at, self.complete, self.cut)

    def skip(self, characters: str = SPACE) -> None:
        """Go past all of `characters`."""
        while self.at < len(self.text) and self.text[self.at] in characters:
            self.at += 1

    def take(self, *marks: str) -> str | None:
        """Go past the longest of `marks` that begins here, and return it; None if none does."""
        for mark in sorted(marks, key=len, reverse=True):
            if self.text.startswith(mark, self.at):
                self.at += len(mark)
                return mark
            if not self.complete and mark.startswith(self.text[self.at :]):
                raise IncompleteError
        return None

    def take_after_space(self, *marks: str) -> bool:
        """Go past white space and one of `marks`, if it follows; else stay."""
        ahead = self.ahead()
        ahead.skip()
        if ahead.take(*marks) is None:
            return False
        self.at = ahead.at
        return True

    def expect(self, *marks: str) -> str:
        """Go past one of `marks`, and return it. Raises NotACallError if none begins here."""
        if (found := self.take(*marks)) is None:
            raise NotACallError
        return found

    @property
    def ended(self) -> bool:
        """Does the text end here?"""
        if self.at == len(self.text) and not self.complete:
            raise IncompleteError
        return self.at == len(self.text)

    def unfinished(self) -> NotACallError | IncompleteError:
        """Return the error for a text that is not whole: IncompleteError, unless no more text follows."""
        return NotACallError() if self.complete else IncompleteError()

    def json(self, begins: Iterable[str] = "{") -> Any:
        """Go past a JSON value that begins with one of the brackets `begins`, and return it. Raises NotACallError."""
        self.ahead().expect(*begins)
        depth = 0
        for token in _JSON_TOKEN.finditer(self.text, self.at):
            if token[0] == '"':
                break  # a string without an end
            depth += (token[0] in "{[") - (token[0] in "}]")
            if not depth:
                if (value := parse_json(self.text[self.at : token.end()])) is None:
                    raise NotACallError
                self.at = token.end()
                return value
        raise self.unfinished()
