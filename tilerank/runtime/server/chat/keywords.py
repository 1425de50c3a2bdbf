"""Rewrites schemas of requests in the keywords that llguidance follows.

Each rewrite leaves only values that the schema as it was allows too. What cannot be rewritten stays, and llguidance
refuses the schema.
"""

import json
import re
from collections.abc import Mapping
from itertools import chain
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from ...protocol.grammar import NOTHING_FOLLOWS
from .disjoint import told_apart
from .references import ANNOTATIONS, Schema, followed, is_number

OF_MANY = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
OF_LISTS = ("prefixItems", "items")
OF_ONE = ("items", "additionalItems", "additionalProperties", "unevaluatedProperties", "contains", "propertyNames")
PARTS = ("allOf", "anyOf", "oneOf")
CONDITIONS = ("if", "then", "else", "not", "$ref")

FORMATS = frozenset(("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"))
"""The formats of strings that grammars enforce. Any other `format` is an annotation, as JSON Schema says."""
MAX_COMPARED = 1000
"""Pairs of a pattern and the name of a property in a schema; each takes up to some milliseconds."""
_MAX_NUMBER = 2**63 - 1024
"""The largest double below 2 ** 63. Beyond it, llguidance cannot write a range of numbers as a regular expression."""
_MAX_LENGTH = 2**31
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_DRAFTS = re.compile(r"json-schema\.org/draft(-0[4-7]|/2019-09|/2020-12)/")
_NEEDS = {"then": "if", "else": "if", "minContains": "contains", "maxContains": "contains"}
"""Keywords that say nothing without another."""
_NOTHING: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
}
"""Values of keywords that any answer follows."""


def followable(schema: Schema) -> dict[str, Any]:
    """Return the schema in the keywords that llguidance follows. Raises ValueError if it has too many patterns."""
    rewritten = _Rewriter(schema).rewritten(schema)
    if not isinstance(rewritten, Mapping):
        raise ValueError("not: no answer follows this schema")
    return dict(rewritten)


class _Rewriter:
    def __init__(self, root: Schema) -> None:
        self._root = root
        self._compared = 0
        self._copied: set[str] = set()  # references whose schemas are being copied

    def rewritten(self, schema: Any) -> Any:
        if not isinstance(schema, Mapping):
            return schema
        result = dict(schema)
        for key, value in schema.items():
            if key in OF_MANY and isinstance(value, Mapping):
                result[key] = {name: self.rewritten(one) for name, one in value.items()}
            elif key in (*OF_LISTS, *PARTS) and isinstance(value, list):
                result[key] = [self.rewritten(one) for one in value]
            elif key in OF_ONE or key in CONDITIONS:
                result[key] = self.rewritten(value)
        if result.get("not") in ({}, True):
            return False  # as zod writes what is undefined
        _drop_annotations(result)
        _narrow_bounds(result)
        _name_unevaluated(result)
        self._name_properties(result)
        self._drop_alternatives(result)
        self._tell_apart(result)
        for pattern, of_pattern in list(_mapping(result.get("patternProperties")).items()):
            self._separate(pattern, of_pattern, result)
        return result

    def _name_properties(self, schema: dict[str, Any]) -> None:
        """Write `propertyNames` as named properties, or as a pattern of names."""
        if not isinstance(schema.get("propertyNames"), Mapping) or "patternProperties" in schema:
            return
        names = followed(schema["propertyNames"], self._root)
        keywords = names.keys() - ANNOTATIONS - {"type"}
        if names.get("type", "string") != "string":
            return
        properties, others = _mapping(schema.get("properties")), schema.get("additionalProperties", True)
        if keywords and keywords <= {"enum", "const"}:
            allowed = [names["const"]] if "const" in names else names["enum"]
            texts = [name for name in allowed if isinstance(name, str)] if isinstance(allowed, list) else []
            schema["properties"] = {name: properties.get(name, others) for name in texts}
        elif not properties and keywords == {"pattern"}:
            schema["patternProperties"] = {names["pattern"]: others}
        elif not properties and keywords and keywords <= {"minLength", "maxLength"}:
            pattern = f"^.{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
            schema["patternProperties"] = {pattern: others}
        else:
            return
        schema["additionalProperties"] = False
        del schema["propertyNames"]

    def _drop_alternatives(self, schema: dict[str, Any]) -> None:
        """Drop alternatives whose pattern looks around, which llguidance cannot do, if others are left: a Decimal of
        pydantic is a number then, and no string."""
        parts = schema.get("anyOf")
        if isinstance(parts, list):
            left = [part for part in parts if not _looks_around(followed(part, self._root).get("pattern"))]
            schema["anyOf"] = left or parts

    def _tell_apart(self, schema: dict[str, Any]) -> None:
        """Write `oneOf` as `anyOf`, if its alternatives can be made such that no value follows two of them."""
        parts = schema.get("oneOf")
        if not isinstance(parts, list) or "anyOf" in schema:
            return
        added = told_apart(parts, self._root)
        if added is None:
            return
        alternatives = []
        for part, more in zip(parts, added, strict=True):
            reference = part.get("$ref") if isinstance(part, Mapping) else None
            if more is None:
                alternatives.append(part)
            elif reference in self._copied:
                return
            else:
                alternatives.append(self._with_more(part, more, reference))
        schema["anyOf"] = alternatives
        del schema["oneOf"]

    def _with_more(self, schema: Any, more: Schema, reference: str | None) -> Any:
        """Return a schema with further properties. What it refers to is copied, so that the definition stays."""
        whole = dict(followed(schema, self._root))
        whole |= {**more, "properties": {**_mapping(whole.get("properties")), **more["properties"]}}
        if reference is None:
            return whole
        self._copied.add(reference)
        try:
            return self.rewritten(whole)
        finally:
            self._copied.remove(reference)

    def _separate(self, pattern: str, of_pattern: Any, schema: dict[str, Any]) -> None:
        """Remove a pattern that matches nothing but named properties, and give its schema to those that it matches.

        llguidance excludes the names from the pattern, then has a comma be followed by a property that cannot exist.
        """
        names = names_of(schema)
        if not names or not re.search(r"\$|\\[zZ]", pattern):
            return  # whatever follows a match is a match as well
        self._compared += len(names)
        if self._compared > MAX_COMPARED:
            raise ValueError(f"patternProperties: expected at most {MAX_COMPARED} pairs of a pattern and a property")
        if not _matches_only(pattern, names):
            return
        properties = dict(_mapping(schema.get("properties")))
        matcher = _matcher({"type": "string", "pattern": pattern})
        for name in names:
            if _accepts(matcher.deep_copy(), name):
                properties[name] = {"allOf": [properties[name], of_pattern]} if name in properties else of_pattern
        patterns = {key: one for key, one in schema["patternProperties"].items() if key != pattern}
        schema |= {"properties": properties, "patternProperties": patterns}


def _matches_only(pattern: str, names: list[str]) -> bool:
    """Does a pattern match no other names than these?"""
    described = {"properties": dict.fromkeys(names, True), "required": names, "additionalProperties": False}
    matcher = _matcher({"type": "object", "patternProperties": {pattern: True}} | described)
    named = "".join(f"{json.dumps(name, ensure_ascii=False)}:0," for name in names)
    matcher.consume_tokens(_tokens(f"{{{named}"))
    matcher.compute_bitmask()
    return NOTHING_FOLLOWS in matcher.get_error()


def _accepts(matcher: LLMatcher, text: str) -> bool:
    return matcher.consume_tokens(_tokens(json.dumps(text, ensure_ascii=False))) and bool(matcher.is_accepting())


def _matcher(schema: Schema) -> LLMatcher:
    """Return a matcher of JSON without spaces over bytes. It takes linear time, unlike Python's `re`."""
    limits = LLParserLimits(initial_lexer_fuel=20_000, step_lexer_fuel=20_000, verbose_errors=False)
    grammar = f"start: %json {json.dumps({**schema, 'x-guidance': {'whitespace_flexible': False}})}"
    return LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=limits)


def _tokens(text: str) -> list[int]:
    return list(text.encode(errors="replace"))


def names_of(schema: Schema) -> list[str]:
    """Return the names of the properties that an object describes or requires."""
    required = schema.get("required")
    names = chain(_mapping(schema.get("properties")), required if isinstance(required, list) else ())
    return list(dict.fromkeys(name for name in names if isinstance(name, str)))


def _drop_annotations(schema: dict[str, Any]) -> None:
    """Remove keywords that say nothing about the answer and that llguidance refuses."""
    types = schema.get("type", "string")
    is_string = types == "string" or (isinstance(types, list) and "string" in types)
    form, draft, length = (schema.get(key) for key in ("format", "$schema", "maxLength"))
    dropped = {
        "format": not is_string or not isinstance(form, str) or form not in FORMATS,
        "$schema": not isinstance(draft, str) or not _DRAFTS.search(draft),
        "maxLength": is_number(length) and length >= _MAX_LENGTH,
        "$dynamicAnchor": True,
        "$recursiveAnchor": True,
        **{key: other not in schema for key, other in _NEEDS.items()},
        **{key: any(schema.get(key) == one for one in values) for key, values in _NOTHING.items()},
    }
    for key in dropped:
        if dropped[key]:
            schema.pop(key, None)


def _narrow_bounds(schema: dict[str, Any]) -> None:
    """Bring bounds of numbers, such as those of 64-bit integers, into the range that llguidance can follow."""
    for key in _LOWER:
        if is_number(bound := schema.get(key)) and bound < -_MAX_NUMBER:
            schema[key] = -_MAX_NUMBER
    for key in _UPPER:
        if is_number(bound := schema.get(key)) and bound > _MAX_NUMBER and schema.get("type") != "integer":
            schema[key] = _MAX_NUMBER  # upper bounds of integers are followed up to 2 ** 63 - 1


def _name_unevaluated(schema: dict[str, Any]) -> None:
    """Write `unevaluatedProperties` as `additionalProperties` in objects that are described in one place."""
    if (
        not any(key in schema for key in (*PARTS, *CONDITIONS, "dependentSchemas"))
        and "unevaluatedProperties" in schema
    ):
        schema.setdefault("additionalProperties", schema.pop("unevaluatedProperties"))


def _looks_around(pattern: Any) -> bool:
    return isinstance(pattern, str) and re.search(r"(?<!\\)\(\?<?[=!]", pattern) is not None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
