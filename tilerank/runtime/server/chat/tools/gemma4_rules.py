"""The grammar of arguments in the format of Gemma 4: {key:<|"|>text<|"|>,n:2}, with keys in alphabetical order."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ..keywords import FORMATS, followable, names_of
from ..references import ANNOTATIONS, Schema, resolved
from .types import properties_of

QUOTE = '<|"|>'
"""Stands before and after a string, which has no escapes."""
_PLAIN_KEY = re.compile(r"[^\s:,{}\[\]<>]+")
_ANY_KEY = "/[A-Za-z_][A-Za-z0-9_]*/"
_OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_SCALARS = ("number", "boolean", "null")
_OF_TYPES = {
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "minItems", "maxItems"),
    "string": ("minLength", "maxLength"),
    "number": _OF_NUMBERS,
}
"""The keywords of each type that are followed."""
_REFUSED = (
    "pattern",
    "patternProperties",
    "propertyNames",
    "minProperties",
    "maxProperties",
    "dependentRequired",
    "dependentSchemas",
    "prefixItems",
    "additionalItems",
    "contains",
    "uniqueItems",
    "unevaluatedProperties",
    "unevaluatedItems",
    "allOf",
    "oneOf",
    "not",
    "if",
)


class Gemma4Rules:
    """Makes the rules for values that follow a schema. Each schema in it is a rule, however often it is referred to."""

    def __init__(
        self,
        rule: str,
        schema: Schema,
        literal: Callable[[str], str],
        write: Callable[[Any], str],
    ) -> None:
        """literal: returns the expression for a text with marks. write: returns a value in the format."""
        self._rule, self._root, self._literal, self._write = rule, followable(schema), literal, write
        self._names: dict[str, str] = {}
        self._rules: list[str] = []

    def rules(self) -> list[str]:
        """Return the rules, the first of them for the arguments. Raises ValueError for a schema it cannot follow."""
        whole = self._object(resolved(self._root, self._root), "the parameters")
        return [f"{self._rule}: {whole}", *self._rules]

    def _value(self, schema: Any, where: str) -> str:
        """Return the name of the rule of a value."""
        key = json.dumps(schema)
        if key not in self._names:
            name = self._names[key] = f"{self._rule}_{len(self._names)}"
            self._add(name, self._expression(schema, where))
        return self._names[key]

    def _add(self, name: str, expression: str) -> str:
        self._rules.append(f"{name}: {expression}")
        return name

    def _helper(self, expression: str, options: str = "") -> str:
        """Return the name of a rule of its own for an expression."""
        key = f"{options}{expression}"
        if key not in self._names:
            self._names[key] = f"{self._rule}_{len(self._names)}"
            self._add(f"{self._names[key]}{options}", expression)
        return self._names[key]

    def _expression(self, schema: Any, where: str) -> str:
        if schema is False:
            raise ValueError(f"{where}: no value is allowed")
        found = resolved(schema, self._root)
        if "const" in found or isinstance(found.get("enum"), list):
            values = [found["const"]] if "const" in found else found["enum"]
            return self._either(self._literal(self._write(value)) for value in values)
        if isinstance(found.get("anyOf"), list):
            return self._either(self._value(part, where) for part in self._alternatives(found, where))
        return self._either(self._of_type(kind, found, where) for kind in _types(found))

    def _either(self, expressions: Iterable[str]) -> str:
        return " | ".join(dict.fromkeys(expressions))

    def _alternatives(self, schema: Schema, where: str) -> Iterator[Schema]:
        """Yield each alternative with the keywords that all of them have in common."""
        common = {key: one for key, one in schema.items() if key != "anyOf" and key not in ANNOTATIONS}
        for part in schema["anyOf"]:
            found = resolved(part, self._root)
            if both := common.keys() & found.keys() - {"type"}:
                raise _refused(where, f"anyOf beside {min(both)}")
            yield {**common, **found} if common else part

    def _of_type(self, kind: str, schema: Schema, where: str) -> str:
        _check(schema, where)
        match kind:
            case "object":
                return self._object(schema, where)
            case "array":
                return self._array(schema, where)
            case "string":
                return self._string(schema)
        bounds = {key: schema[key] for key in _OF_NUMBERS if key in schema}
        return self._helper(f"%json {json.dumps({'type': kind, **(bounds if kind in ('integer', 'number') else {})})}")

    def _string(self, schema: Schema) -> str:
        quote = self._literal(QUOTE)
        text = f"/(.|\\n){{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}/"
        if quote == json.dumps(QUOTE):
            return f"{quote} {self._helper(text, f'[suffix={quote}]')}"
        # A mark that is a token is no text, and so ends it.
        return f"{quote} {self._helper(text)} {quote}"

    def _array(self, schema: Schema, where: str) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[" "]"'
        item = self._value(schema.get("items", True), f"{where}[]")
        items = f'{item} ("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        return f'"[" {items} "]"' if least else f'"[" ({items})? "]"'

    def _object(self, schema: Schema, where: str) -> str:
        _check(schema, where)
        properties, others, names = properties_of(schema), schema.get("additionalProperties"), names_of(schema)
        required = schema["required"] if isinstance(schema.get("required"), list) else []
        if not names:
            if others is False or ("properties" in schema and others is None):
                return '"{" "}"'
            pair = self._helper(f'{_ANY_KEY} ":" {self._value(True if others is None else others, where)}')
            return f'"{{" ({pair} ("," {pair})*)? "}}"'
        pairs = list[tuple[str, bool]]()
        for name in sorted(names, key=str.lower):  # as chat templates write them
            if name not in properties and others is False:
                raise ValueError(f"required: {name} is not among the properties, and others are not allowed")
            of_value = schema["properties"][name] if name in properties else others or True
            if of_value is False and name not in required:
                continue  # no value is allowed
            pairs.append((f'{self._literal(self._key(name))} ":" {self._value(of_value, name)}', name in required))
        return f'"{{" {self._members(pairs)} "}}"'

    def _members(self, pairs: Sequence[tuple[str, bool]]) -> str:
        """Return the expression of pairs of a key and a value, which are required or not, with commas between."""
        first = after = '""'  # of the pairs that follow: as the first ones, and after another
        for pair, is_required in reversed(pairs):
            name = self._helper(pair)
            begins = f"{name} {after}"
            first = self._helper(begins if is_required else f"{begins} | {first}")
            after = self._helper(f'"," {begins}' if is_required else f'("," {name})? {after}')
        return first

    def _key(self, name: str) -> str:
        if _PLAIN_KEY.fullmatch(name):
            return name
        if QUOTE in name:
            raise ValueError(f"properties: expected names without {QUOTE}, found {name}")
        return f"{QUOTE}{name}{QUOTE}"


def _types(schema: Schema) -> Sequence[str]:
    """Return the types that a schema names, or those that its keywords are about; all of them if it has none."""
    named = schema.get("type")
    if isinstance(named, str):
        return [named]
    if isinstance(named, list) and named:
        return [one for one in named if isinstance(one, str)]
    about = [kind for kind, keywords in _OF_TYPES.items() if any(key in schema for key in keywords)]
    return about or ["string", *_SCALARS, "array", "object"]


def _check(schema: Schema, where: str) -> None:
    """Raise ValueError for a keyword that is not followed."""
    if found := next((key for key in _REFUSED if key in schema), None):
        raise _refused(where, found)
    if schema.get("format") in FORMATS:
        raise _refused(where, "format")


def _refused(where: str, keyword: str) -> ValueError:
    return ValueError(
        f"{where}: {keyword} is not supported, because this model writes arguments in a format of its own"
    )
