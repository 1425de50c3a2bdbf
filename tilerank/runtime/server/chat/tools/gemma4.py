"""The format of Gemma 4: <|tool_call>call:NAME{key:value,..}<tool_call|>, with strings between marks of their own."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from ..references import Schema
from .calls import ToolCall, parse_json
from .cursor import Cursor, NotACallError
from .format import ToolFormat
from .gemma4_rules import Gemma4Rules

_LITERAL = re.compile(r"[^,\]}\s]+")
_MOST_DEPTH = 64


class Gemma4Format(ToolFormat):
    """The format of Gemma 4. Keys are written without quotes, and strings between two QUOTEs without escapes."""

    name = "gemma4"
    MARKS = BEGIN, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
    OPENINGS = (BEGIN,)
    BEGIN_CALL, END_CALL = f"{BEGIN}call:%(name)s", END

    def is_shown_by(self, template: str) -> bool:
        return f"{self.BEGIN}call:" in template

    def read(self, cursor: Cursor, schemas: Mapping[str, Schema], bare: bool) -> list[ToolCall]:
        cursor.expect(self.BEGIN)
        cursor.skip()
        cursor.expect("call:")
        cursor.skip()
        name = cursor.expect(*(f"{name}{{" for name in schemas))[:-1]
        arguments = self._object(cursor, 1)
        cursor.take_after_space(self.END)
        return [ToolCall.of(name, arguments)]

    def _object(self, cursor: Cursor, depth: int) -> dict[str, Any]:
        """Read what follows the opening brace of an object."""
        found: dict[str, Any] = {}
        cursor.skip()
        while cursor.take("}") is None:
            key = self._string(cursor) if cursor.take(self.QUOTE) is not None else self._key(cursor)
            cursor.skip()
            cursor.take(":")
            found[key] = self._value(cursor, depth)
            self._separate(cursor, "}")
        return found

    def _array(self, cursor: Cursor, depth: int) -> list[Any]:
        """Read what follows the opening bracket of an array."""
        found: list[Any] = []
        cursor.skip()
        while cursor.take("]") is None:
            found.append(self._value(cursor, depth))
            self._separate(cursor, "]")
        return found

    def _separate(self, cursor: Cursor, end: str) -> None:
        """Go past a comma. Raises NotACallError unless one or the end follows."""
        cursor.skip()
        if cursor.take(",") is not None:
            cursor.skip()
        elif cursor.ahead().take(end) is None:
            raise NotACallError

    def _value(self, cursor: Cursor, depth: int) -> Any:
        if depth > _MOST_DEPTH:
            raise NotACallError
        cursor.skip()
        match cursor.take(self.QUOTE, "{", "["):
            case self.QUOTE:
                return self._string(cursor)
            case "{":
                return self._object(cursor, depth + 1)
            case "[":
                return self._array(cursor, depth + 1)
        return self._literal(cursor)

    def _string(self, cursor: Cursor) -> str:
        """Read what follows an opening QUOTE."""
        end = cursor.text.find(self.QUOTE, cursor.at)
        if end < 0:
            raise cursor.unfinished()
        text, cursor.at = cursor.text[cursor.at : end], end + len(self.QUOTE)
        return text

    def _key(self, cursor: Cursor) -> str:
        end = cursor.text.find(":", cursor.at)
        if end < 0:
            raise cursor.unfinished()
        key, cursor.at = cursor.text[cursor.at : end].strip(), end
        if not key or any(mark in key for mark in (*self.MARKS, "\n", "{", "}", ",")):
            raise NotACallError
        return key

    def _literal(self, cursor: Cursor) -> Any:
        """Read a number, true, false or null."""
        found = _LITERAL.match(cursor.text, cursor.at)
        end = cursor.at if found is None else found.end()
        if end == len(cursor.text):
            raise cursor.unfinished()
        value = parse_json(cursor.text[cursor.at : end], self)
        if value is self or isinstance(value, str):
            raise NotACallError
        cursor.at = end
        return value

    def write_arguments(self, arguments: Any) -> str:
        if isinstance(arguments, Mapping):
            return "{" + ",".join(f"{key}:{self.write_arguments(arguments[key])}" for key in sorted(arguments)) + "}"
        if isinstance(arguments, list):
            return f"[{','.join(map(self.write_arguments, arguments))}]"
        return f"{self.QUOTE}{arguments}{self.QUOTE}" if isinstance(arguments, str) else json.dumps(arguments)

    def argument_rules(self, rule: str, schema: Schema, literal: Callable[[str], str] = json.dumps) -> list[str]:
        return Gemma4Rules(rule, schema, literal, self.write_arguments).rules()
