"""Calls as marked-up text: the format of Qwen3-Coder and Qwen3.5.

<tool_call>, <function=NAME>, a <parameter=KEY>value</parameter> for each argument, </function> and </tool_call>. Values
are plain text or JSON, as the tool's schema says. The models often leave out <tool_call>, and sometimes one of the
marks at the end.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ..keywords import followable, names_of
from ..references import Schema
from ..schemas import json_rule
from .calls import ToolCall, parse_json
from .cursor import Cursor, NotACallError
from .format import ToolFormat
from .types import bounds_of, choices_of, properties_of, types_of

_PARAMETER_MARK = re.compile(r"<parameter=[^>\n]*>|</parameter>")
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


class FunctionFormat(ToolFormat):
    """The format of Qwen3-Coder and Qwen3.5."""

    name = "functions"
    MARKS = BEGIN, END = "<tool_call>", "</tool_call>"
    FUNCTION, END_FUNCTION = "<function=", "</function>"
    PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
    OPENINGS = (BEGIN, FUNCTION)
    BEGIN_CALL, END_CALL = BEGIN + "\n" + FUNCTION + "%(name)s>\n", END_FUNCTION + "\n" + END
    BETWEEN = "\n"

    def is_shown_by(self, template: str) -> bool:
        return self.FUNCTION in template and self.PARAMETER in template

    def read(self, cursor: Cursor, schemas: Mapping[str, Schema], bare: bool) -> list[ToolCall]:
        cursor.take(self.BEGIN)
        cursor.skip()
        cursor.expect(self.FUNCTION)
        name = cursor.expect(*(f"{name}>" for name in schemas))[:-1]
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
            if cursor.take(self.PARAMETER) is not None:
                key = self._key(cursor)
                arguments[key] = typed(self._value(cursor, nests), properties.get(key, {}), schema)
            elif cursor.take(self.END_FUNCTION) is not None:
                cursor.take_after_space(self.END)
                return arguments
            elif cursor.take(self.END) is not None or (arguments and self._is_left(cursor)):
                return arguments
            else:
                raise NotACallError

    def _key(self, cursor: Cursor) -> str:
        key, named, _ = cursor.text[cursor.at :].partition(">")
        if "\n" in key:
            raise NotACallError
        if not named:
            raise cursor.unfinished()
        cursor.at += len(key) + 1
        return key

    def _value(self, cursor: Cursor, nests: bool) -> str:
        """Read a value, which ends at the first </parameter> that the call goes on after.

        nests: marks inside of the value, such as those in a file about this format, come in pairs.
        """
        open_inside = 0
        for mark in _PARAMETER_MARK.finditer(cursor.text, cursor.at):
            if mark[0] != self.END_PARAMETER:
                open_inside += nests
            elif open_inside:
                open_inside -= 1
            elif self._goes_on(cursor.ahead(mark.end())):
                value = cursor.text[cursor.at : mark.start()]
                cursor.at = mark.end()
                return value.removeprefix("\n").removesuffix("\n")
        raise cursor.unfinished()

    def _goes_on(self, ahead: Cursor) -> bool:
        """Does a call go on or end after a </parameter>?"""
        ahead.skip()
        if ahead.take(self.END_FUNCTION) is not None:
            line = ahead.ahead()
            ahead.skip()
            return ahead.ended or ahead.take(self.END, *self.OPENINGS) is not None or line.take("\n", "\r") is not None
        return self._is_left(ahead) or ahead.take(self.PARAMETER, self.END) is not None

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
        return "".join(f"{self.PARAMETER}{name}>\n{text}\n{self.END_PARAMETER}\n" for name, text in texts.items())

    def argument_rules(self, rule: str, schema: Schema) -> list[str]:
        schema = followable(schema)
        required, properties, others = schema.get("required"), properties_of(schema), schema.get("additionalProperties")
        sequence, rules = ['""'], []
        for i, name in enumerate(names_of(schema)):
            if name not in properties and others is False:
                raise ValueError(f"required: {name} is not among the properties, and others are not allowed")
            of_value = properties.get(name, others if isinstance(others, Mapping) else {})
            value = f"{rule}_{i}"
            sequence.append(f"{value}{'' if isinstance(required, list) and name in required else '?'}")
            rules.append(f"{value}: {json.dumps(self.PARAMETER + name + '>' + chr(10))} {value}_value")
            rules += self._value_rules(f"{value}_value", name, of_value, schema)
        return [f"{rule}: {' '.join(sequence)}", *rules]

    def _value_rules(self, rule: str, name: str, schema: Schema, root: Schema) -> list[str]:
        end = json.dumps(f"\n{self.END_PARAMETER}\n")
        types = types_of(schema, root)
        if "string" not in types:
            return [f"{rule}: {rule}_json {end}", f"{rule}_json: {json_rule(_with_definitions(schema, root))}"]
        if (choices := choices_of(schema, root)) is not None:
            texts = (one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for one in choices)
            return [f"{rule}: ({' | '.join(json.dumps(text, ensure_ascii=False) for text in texts)}) {end}"]
        bounds = bounds_of(schema, root)
        if refused := next((key for key in ("pattern", "format") if key in bounds), None):
            raise ValueError(f"{name}: {refused} is not supported, because this model writes strings without quotes")
        least, most = bounds.get("minLength", 0), bounds.get("maxLength", "")
        return [f"{rule}[suffix={end}]: /(.|\\n){{{least},{most}}}/"]


def _with_definitions(schema: Schema, root: Schema) -> Schema:
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
