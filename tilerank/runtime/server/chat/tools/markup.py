"""Calls as marked-up text: a name, and between marks the key and the value of each argument.

Values are plain text or JSON, as the tool's schema says. functions.py has the formats of models.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..keywords import followable, names_of
from ..references import Schema
from ..schemas import json_rule
from .calls import ToolCall, parse_json
from .cursor import Cursor, NotACallError
from .format import ToolFormat
from .types import bounds_of, choices_of, properties_of, types_of

_CONSTANTS = {"True": True, "False": False, "None": None}
"""The chat template writes earlier calls with Python's constants, so that models write them as well."""
_JSON_TYPES: dict[type, tuple[str, ...]] = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number", "integer"),  # 5.0 is an integer
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}


class MarkupFormat(ToolFormat):
    """Calls with marks around each value. Models leave out BEGIN often, and one of the marks at the end sometimes.

    BEGIN, END: around a call, or around all calls. FUNCTION, END_NAME, END_FUNCTION: before and after a name, and after
    its arguments. KEY, END_KEY: around the key of an argument. VALUE, END_VALUE: around its value; VALUE is empty where
    END_KEY is before the value. BREAK: the white space that is written before and after a value and is no part of it.
    VALUE_MARKS: matches the mark before a value, and that after it. BEFORE_VALUE, AFTER_VALUE: what is written before a
    value, with %s for the key, and after it.
    """

    BEGIN: str
    END: str
    FUNCTION: str
    END_NAME: str
    END_FUNCTION: str
    KEY: str
    END_KEY: str
    VALUE = ""
    END_VALUE: str
    BREAK = ""
    VALUE_MARKS: re.Pattern[str]
    BEFORE_VALUE: str
    AFTER_VALUE: str

    def read(self, cursor: Cursor, schemas: Mapping[str, Schema], bare: bool) -> list[ToolCall]:
        if self.BEGIN != self.FUNCTION:
            cursor.take(self.BEGIN)
            cursor.skip()
        cursor.expect(self.FUNCTION)
        cursor.skip()
        name = cursor.expect(*(f"{name}{self.END_NAME}" for name in schemas)).removesuffix(self.END_NAME)
        begin = cursor.at
        for nests in (True, False):
            cursor.at = begin
            try:
                return [ToolCall.of(name, self._arguments(cursor, schemas[name], nests))]
            except NotACallError:
                continue
        raise NotACallError

    def _arguments(self, cursor: Cursor, schema: Schema, nests: bool) -> dict[str, Any]:
        """Read the arguments and the marks at the end. nests: as in `_value`."""
        properties = properties_of(schema)
        arguments: dict[str, Any] = {}
        while True:
            cursor.skip()
            if cursor.take(self.KEY) is not None:
                key = self._key(cursor)
                arguments[key] = typed(self._value(cursor, nests), properties.get(key, {}), schema)
            elif cursor.take(self.END_FUNCTION) is not None:
                if self.END != self.END_FUNCTION:
                    cursor.take_after_space(self.END)
                return arguments
            elif cursor.take(self.END) is not None or (arguments and self._is_left(cursor)):
                return arguments
            else:
                raise NotACallError

    def _key(self, cursor: Cursor) -> str:
        """Read a key and the marks before its value."""
        key, named, _ = cursor.text[cursor.at :].partition(self.END_KEY)
        if "\n" in key:
            raise NotACallError
        if not named:
            raise cursor.unfinished()
        cursor.at += len(key) + len(self.END_KEY)
        if self.VALUE:
            cursor.skip()
            cursor.expect(self.VALUE)
        return key

    def _value(self, cursor: Cursor, nests: bool) -> str:
        """Read a value, which ends at the first END_VALUE that the call goes on after.

        nests: marks inside of the value, such as those in a file about this format, come in pairs.
        """
        open_inside = 0
        for mark in self.VALUE_MARKS.finditer(cursor.text, cursor.at):
            if mark[0] != self.END_VALUE:
                open_inside += nests
            elif open_inside:
                open_inside -= 1
            elif self._goes_on(cursor.ahead(mark.end())):
                value = cursor.text[cursor.at : mark.start()]
                cursor.at = mark.end()
                return value.removeprefix(self.BREAK).removesuffix(self.BREAK)
        raise cursor.unfinished()

    def _goes_on(self, ahead: Cursor) -> bool:
        """Does a call go on or end after an END_VALUE?"""
        ahead.skip()
        if ahead.take(self.END_FUNCTION) is not None:
            line = ahead.ahead()
            ahead.skip()
            return ahead.ended or ahead.take(self.END, *self.OPENINGS) is not None or line.take("\n", "\r") is not None
        return self._is_left(ahead) or ahead.take(self.KEY, self.END) is not None

    def _is_left(self, cursor: Cursor) -> bool:
        """Does the text end here, or another call begin? A text that was cut off leaves no call."""
        if cursor.ended:
            return not cursor.cut
        return cursor.ahead().take(*self.OPENINGS) is not None

    def write_arguments(self, arguments: Any) -> str:
        if not isinstance(arguments, Mapping):
            return str(arguments)
        texts = {
            name: one if isinstance(one, str) else json.dumps(one, ensure_ascii=False)
            for name, one in arguments.items()
        }
        return "".join(f"{self.BEFORE_VALUE % name}{text}{self.AFTER_VALUE}" for name, text in texts.items())

    def argument_rules(self, rule: str, schema: Schema, literal: Callable[[str], str] = json.dumps) -> list[str]:
        schema = followable(schema)
        required, properties, others = schema.get("required"), properties_of(schema), schema.get("additionalProperties")
        sequence, rules = ['""'], []
        for i, name in enumerate(names_of(schema)):
            if name not in properties and others is False:
                raise ValueError(f"required: {name} is not among the properties, and others are not allowed")
            of_value = properties.get(name, others if isinstance(others, Mapping) else {})
            value = f"{rule}_{i}"
            sequence.append(f"{value}{'' if isinstance(required, list) and name in required else '?'}")
            rules.append(f"{value}: {literal(self.BEFORE_VALUE % name)} {value}_value")
            rules += self._value_rules(f"{value}_value", name, of_value, schema, literal)
        return [f"{rule}: {' '.join(sequence)}", *rules]

    def _value_rules(
        self, rule: str, name: str, schema: Schema, root: Schema, literal: Callable[[str], str]
    ) -> list[str]:
        end = literal(self.AFTER_VALUE)
        types = types_of(schema, root)
        if "string" not in types:
            return [f"{rule}: {rule}_json {end}", f"{rule}_json: {json_rule(with_definitions(schema, root))}"]
        if (choices := choices_of(schema, root)) is not None:
            texts = (one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for one in choices)
            return [f"{rule}: ({' | '.join(json.dumps(text, ensure_ascii=False) for text in texts)}) {end}"]
        bounds = bounds_of(schema, root)
        if refused := next((key for key in ("pattern", "format") if key in bounds), None):
            raise ValueError(f"{name}: {refused} is not supported, because this model writes strings without quotes")
        least, most = bounds.get("minLength", 0), bounds.get("maxLength", "")
        text = f"/(.|\\n){{{least},{most}}}/"
        if end == json.dumps(self.AFTER_VALUE):
            return [f"{rule}[suffix={end}]: {text}"]
        # A mark that is a token is no text, and so ends it.
        return [f"{rule}: {rule}_text {end}", f"{rule}_text: {text}"]


def with_definitions(schema: Schema, root: Schema) -> Schema:
    """Return a part of the schema `root` as a schema of its own, with what it refers to.

    zod refers to the first place where a schema is written, such as #/properties/from.
    """
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    if all(place.startswith(("#/$defs/", "#/definitions/")) for place in _references([schema, definitions])):
        return {**definitions, **schema}
    return {**_moved(schema), "$defs": {"root": _moved(root)}}


def _references(value: Any) -> Iterator[str]:
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    if isinstance(value, Mapping) and isinstance(value.get("$ref"), str):
        yield value["$ref"]
    for part in parts:
        yield from _references(part)


def _moved(value: Any) -> Any:
    """Return a part of a schema whose root becomes a definition."""
    if isinstance(value, list):
        return [_moved(part) for part in value]
    if not isinstance(value, Mapping):
        return value
    moved = {key: _moved(part) for key, part in value.items()}
    if isinstance(value.get("$ref"), str):
        moved["$ref"] = "#/$defs/root" + value["$ref"].removeprefix("#")
    return moved


def typed(text: str, schema: Schema, root: Schema) -> Any:
    """Return the value of an argument: its text where the schema wants a string, otherwise JSON if it is JSON.

    root: the schema to which references in `schema` refer.
    """
    types = types_of(schema, root)
    if types == {"string"}:
        return text
    value = _CONSTANTS[text] if text in _CONSTANTS else parse_json(text, text)
    if "string" in types and types.isdisjoint(_JSON_TYPES.get(type(value), ())):
        return text
    return value
