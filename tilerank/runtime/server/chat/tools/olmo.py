"""The format of OLMo 3: calls as in Python, a line each, between <function_calls> and </function_calls>."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..keywords import followable, names_of
from ..references import Schema
from ..schemas import json_rule
from .calls import ToolCall, parse_json
from .cursor import Cursor, NotACallError
from .format import ToolFormat
from .markup import with_definitions
from .types import properties_of

_KEY = re.compile(r"[^\W\d][\w.-]*+")
_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"|' r"'(?:[^'\\]++|\\.)*+'", re.DOTALL)
_QUOTES = re.compile(r'\\.|"', re.DOTALL)
_LITERAL = re.compile(r"[^,()\[\]{}:'\"\s]++")
_CONSTANTS = {"True": True, "False": False, "None": None}
_MOST_DEPTH = 64


class OlmoFormat(ToolFormat):
    """NAME(KEY=VALUE, ...) in a line for each call. Values are JSON, as in the chat template, or Python's literals."""

    name = "olmo"
    MARKS = BEGIN, END = "<function_calls>", "</function_calls>"
    OPENINGS = (BEGIN,)
    BEGIN_CALLS, BETWEEN, END_CALLS = BEGIN, "\n", END
    BEGIN_CALL, END_CALL = "%(name)s(", ")"

    def is_shown_by(self, template: str) -> bool:
        return self.BEGIN in template

    def read(self, cursor: Cursor, schemas: Mapping[str, Schema], bare: bool) -> list[ToolCall]:
        cursor.expect(self.BEGIN)
        calls = list[ToolCall]()
        while True:
            cursor.skip(" \t\r\n,;")
            if calls and (cursor.take(self.END) is not None or (cursor.ended and not cursor.cut)):
                return calls
            name = cursor.expect(*(f"{name}(" for name in schemas)).removesuffix("(")
            calls.append(ToolCall.of(name, self._arguments(cursor)))

    def _arguments(self, cursor: Cursor) -> dict[str, Any]:
        """Read what follows the opening bracket of a call."""
        found: dict[str, Any] = {}
        cursor.skip()
        while cursor.take(")") is None:
            key = _match(_KEY, cursor)
            cursor.skip()
            cursor.expect("=")
            found[key] = self._value(cursor, 1)
            _separate(cursor, ")")
        return found

    def _value(self, cursor: Cursor, depth: int) -> Any:
        if depth > _MOST_DEPTH:
            raise NotACallError
        cursor.skip()
        if cursor.ahead().take('"', "'") is not None:
            return _string(cursor)
        match cursor.take("{", "["):
            case "{":
                return self._object(cursor, depth + 1)
            case "[":
                return self._array(cursor, depth + 1)
        text = _match(_LITERAL, cursor)
        value = _CONSTANTS[text] if text in _CONSTANTS else parse_json(text, self)
        if value is self:
            raise NotACallError
        return value

    def _object(self, cursor: Cursor, depth: int) -> dict[str, Any]:
        """Read what follows the opening brace of an object."""
        found: dict[str, Any] = {}
        cursor.skip()
        while cursor.take("}") is None:
            key = _string(cursor)
            cursor.skip()
            cursor.expect(":")
            found[key] = self._value(cursor, depth)
            _separate(cursor, "}")
        return found

    def _array(self, cursor: Cursor, depth: int) -> list[Any]:
        """Read what follows the opening bracket of an array."""
        found: list[Any] = []
        cursor.skip()
        while cursor.take("]") is None:
            found.append(self._value(cursor, depth))
            _separate(cursor, "]")
        return found

    def write_arguments(self, arguments: Any) -> str:
        if not isinstance(arguments, Mapping):
            return str(arguments)
        return ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in arguments.items())

    def argument_rules(self, rule: str, schema: Schema, literal: Callable[[str], str] = json.dumps) -> list[str]:
        schema = followable(schema)
        properties, others, required = properties_of(schema), schema.get("additionalProperties"), schema.get("required")
        names, rules = names_of(schema), []
        for i, name in enumerate(names):
            if name not in properties and others is False:
                raise ValueError(f"required: {name} is not among the properties, and others are not allowed")
            if not _KEY.fullmatch(name):
                raise ValueError(f"properties: expected names of letters, digits and _, found {name}")
            of_value = properties.get(name, others if isinstance(others, Mapping) else {})
            rules.append(f"{rule}_{i}: {literal(f'{name}=')} {rule}_{i}_value")
            rules.append(f"{rule}_{i}_value: {json_rule(with_definitions(of_value, schema))}")
        wanted = [isinstance(required, list) and name in required for name in names]
        return [f"{rule}: {rule}_first_0", *_member_rules(rule, wanted), *rules]


def _match(pattern: re.Pattern[str], cursor: Cursor) -> str:
    """Go past what `pattern` matches, and return it; it ends before the end of the text."""
    found = pattern.match(cursor.text, cursor.at)
    end = cursor.at if found is None else found.end()
    if end == len(cursor.text):
        raise cursor.unfinished()
    if found is None:
        raise NotACallError
    cursor.at = end
    return found[0]


def _separate(cursor: Cursor, end: str) -> None:
    """Go past a comma. Raises NotACallError unless one or the end follows."""
    cursor.skip()
    if cursor.take(",") is not None:
        cursor.skip()
    elif cursor.ahead().take(end) is None:
        raise NotACallError


def _string(cursor: Cursor) -> str:
    """Read a string in double quotes, or in single ones as Python writes them."""
    cursor.ahead().expect('"', "'")
    found = _STRING.match(cursor.text, cursor.at)
    if found is None:
        raise cursor.unfinished()
    # In JSON, a double quote needs a backslash and a single one must not have any.
    changed = {"\\'": "'", '"': '\\"'}
    inner = _QUOTES.sub(lambda part: changed.get(part[0], part[0]), found[0][1:-1])
    value = parse_json(f'"{inner}"')
    if not isinstance(value, str):
        raise NotACallError
    cursor.at = found.end()
    return value


def _member_rules(rule: str, required: Sequence[bool]) -> Iterator[str]:
    """Yield rules for the arguments rule_0, rule_1 and so on, with commas between; those not `required` may be missing.

    rule_first_i: the arguments from i on, where none is before them. rule_after_i: the same after another one.
    """
    for i, is_required in enumerate(required):
        one, rest = f"{rule}_{i}", f"{rule}_after_{i + 1}"
        yield f"{rule}_first_{i}: {one} {rest}{'' if is_required else f' | {rule}_first_{i + 1}'}"
        yield f'{rule}_after_{i}: (", " {one}){"" if is_required else "?"} {rest}'
    yield from (f'{rule}_{which}_{len(required)}: ""' for which in ("first", "after"))
