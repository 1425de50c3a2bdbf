"""The formats of Mistral's models: [TOOL_CALLS] before each call, or before a list of calls in older ones."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..references import Schema
from .calls import ToolCall, arguments_from_json, call_from_json
from .cursor import Cursor, NotACallError
from .format import NUMBER, ToolFormat, with_new_ids

_ID = re.compile("[0-9A-Za-z]{9}")
"""The only ids of calls that many chat templates accept."""


class MistralFormat(ToolFormat):
    """The format of Ministral 3, Devstral and Magistral: [TOOL_CALLS]NAME[ARGS]{...} for each call.

    All of the formats below are read, whichever a model writes.
    """

    name = "mistral"
    BEGIN, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
    MARKS = (BEGIN, CALL_ID, ARGUMENTS)
    OPENINGS = (BEGIN,)
    BEGIN_CALL, END_CALL = f"{BEGIN}%(name)s{ARGUMENTS}", ""

    def is_shown_by(self, template: str) -> bool:
        return all(mark in template for mark in (self.BEGIN, self.ARGUMENTS)) and self.CALL_ID not in template

    def read(self, cursor: Cursor, schemas: Mapping[str, Schema], bare: bool) -> list[ToolCall]:
        cursor.expect(self.BEGIN)
        cursor.skip()
        if (name := cursor.take(*schemas)) is None:
            value = cursor.json(("{", "["))
            calls = [call_from_json(one, schemas) for one in (value if isinstance(value, list) else [value])]
            found = [call for call in calls if call is not None]
            if not found or len(found) < len(calls):
                raise NotACallError
            return found
        cursor.skip()
        if cursor.take(self.CALL_ID) is not None:
            self._skip_id(cursor)
        cursor.take(self.ARGUMENTS)
        cursor.skip()
        arguments = arguments_from_json(cursor.json())
        if arguments is None:
            raise NotACallError
        return [ToolCall.of(name, arguments)]

    def _skip_id(self, cursor: Cursor) -> None:
        end = cursor.text.find(self.ARGUMENTS, cursor.at)
        if end < 0:
            raise cursor.unfinished()
        cursor.at = end

    def with_ids(self, turns: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """Return the messages with ids of nine letters and digits; many templates refuse others."""

        def new_id(call: Mapping[str, Any], _: int) -> str:
            id = str(call["id"])
            return id if _ID.fullmatch(id) else hashlib.sha256(id.encode()).hexdigest()[:9]

        return with_new_ids(turns, new_id)


class MistralIdFormat(MistralFormat):
    """The format of Mistral Small 3.2: [TOOL_CALLS]NAME[CALL_ID]ID[ARGS]{...} for each call."""

    name = "mistral_ids"
    BEGIN_CALL = f"{MistralFormat.BEGIN}%(name)s{MistralFormat.CALL_ID}{NUMBER}{MistralFormat.ARGUMENTS}"
    NUMBERS = _ID.pattern

    def is_shown_by(self, template: str) -> bool:
        return all(mark in template for mark in self.MARKS)


class MistralListFormat(MistralFormat):
    """The format of Mistral Small 3.1 and older models: [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]."""

    name = "mistral_list"
    BEGIN_CALLS, BETWEEN, END_CALLS = f"{MistralFormat.BEGIN} [", ", ", "]"
    BEGIN_CALL, END_CALL = '{"name": "%(name)s", "arguments": ', "}"

    def is_shown_by(self, template: str) -> bool:
        return self.BEGIN in template and self.ARGUMENTS not in template
