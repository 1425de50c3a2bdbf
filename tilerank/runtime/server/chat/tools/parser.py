"""Finds the tool calls of an answer in its streamed text."""

import re
from collections.abc import Mapping

from ..reasoning import overlap
from ..references import Schema
from .calls import Piece
from .cursor import Cursor, IncompleteError, NotACallError
from .format import ToolFormat

_SEPARATORS = " \t\r\n;,"
"""White space before a call, and these characters between two calls, belong to the calls."""
_LONG = 256
"""Characters. What a longer beginning of a call is can only be decided by text with one of _DECIDING."""
_DECIDING = re.compile(r"[}>\]]")


class ToolParser:
    """Splits the streamed text of one choice into text and calls of the tools in `schemas`, by name.

    A text that is no call stays text. A call may begin with a mark of the format anywhere, and without one where a line
    begins, except in a code block.
    """

    def __init__(self, format: ToolFormat, schemas: Mapping[str, Schema]) -> None:
        self._format = format
        self._schemas = schemas
        self._bare = format.bare_openings(schemas)
        marks = "|".join(map(re.escape, format.OPENINGS))
        bare = "|".join(map(re.escape, self._bare)) or "(?!)"
        self._opening = re.compile(f"{marks}|^[ \\t;,]*+(?P<bare>{bare})", re.MULTILINE)
        self._buffer = ""
        self._said = ""  # the text so far
        self._follows_call = False  # and no text but separators has come since

    def push(self, text: str) -> list[Piece]:
        """Append text and return the pieces that no later text can change."""
        self._buffer += text
        if len(self._buffer) > _LONG and not _DECIDING.search(text):
            return []
        return self._read(complete=False, cut=False)

    def flush(self, cut: bool) -> list[Piece]:
        """Return the remaining pieces. cut: the text ends because the answer reached its greatest length."""
        return self._read(complete=True, cut=cut)

    def _read(self, complete: bool, cut: bool) -> list[Piece]:
        pieces: list[Piece] = []
        at = 0
        while (opening := self._opening.search(self._buffer, at)) is not None:
            is_bare = opening["bare"] is not None
            begin = opening.start("bare") if is_bare else opening.start()
            at = begin + 1
            if is_bare and not self._begins_line(begin):
                continue
            cursor = Cursor(self._buffer, begin, complete, cut)
            try:
                calls = self._format.read(cursor, self._schemas, is_bare)
            except NotACallError:
                continue
            except IncompleteError:
                return pieces + self._say(begin)
            rest = self._buffer[cursor.at :]
            pieces += [*self._say(begin), *calls]
            self._buffer, self._follows_call, at = rest, True, 0
        if not complete:
            return pieces + self._say(len(self._buffer) - self._held())
        text, self._buffer = self._buffer, ""
        return [*pieces, text] if text and not (self._follows_call and _is_between(text)) else pieces

    def _say(self, end: int) -> list[Piece]:
        """Return the text before `end` as a piece.

        Line breaks and separators at its end stay in the buffer, because they belong to a call that may follow.
        """
        whole = self._buffer[:end]
        spaces = whole[len(whole.rstrip()) :]
        text = whole[: len(whole) - len(spaces.lstrip(" \t"))]
        if not (self._said or text.strip()) or (self._follows_call and _is_between(text)) or not text:
            return []
        self._buffer = self._buffer[len(text) :]
        self._said += text
        self._follows_call = False
        return [text]

    def _begins_line(self, at: int) -> bool:
        """May a call begin at this position of the buffer without a mark?"""
        before = self._buffer[:at]
        if not (self._follows_call and _is_between(before)):
            _, broken, line = before.rpartition("\n")
            if line.strip(" \t") or (self._said and not broken):
                return False
        return (self._said + before).count("```") % 2 == 0

    def _held(self) -> int:
        """Return how many characters at the end of the buffer may be the beginning of an opening."""
        held = max(overlap(self._buffer, mark) for mark in self._format.OPENINGS)
        begin = self._buffer.rfind("\n") + 1
        line = self._buffer[begin:].lstrip(" \t;,")
        if any(opening.startswith(line) for opening in self._bare):
            held = max(held, len(line))
        return held


def _is_between(text: str) -> bool:
    """May this text stand between two calls without being said?"""
    return not text.strip(_SEPARATORS)
