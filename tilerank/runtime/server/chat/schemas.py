"""Turns JSON schemas of requests into grammars, and closes their objects: an object with `properties` and no word about
others has no others.

JSON Schema leaves such objects open, and weak models then go on inventing properties. Other servers close them as well.
"""

import json
from collections.abc import Mapping
from typing import Any

from .keywords import CONDITIONS, OF_LISTS, OF_MANY, OF_ONE, PARTS, followable, names_of
from .references import Schema

_OPEN = ("additionalProperties", "unevaluatedProperties")

MAX_PASSES = 8
"""A schema stays open if finding its shared definitions takes more: its references form a long chain."""

# Enough for the indentation of pretty-printed JSON. Some models would otherwise generate whitespace forever.
_JSON_OPTIONS = {"x-guidance": {"whitespace_pattern": r"[ \n]{0,32}"}}


def json_rule(schema: Schema) -> str:
    """Return the expression of a grammar for JSON that follows `schema`, with its objects closed.

    Raises ValueError for a schema that cannot be followed.
    """
    return f"%json {json.dumps({**closed(followable(schema)), **_JSON_OPTIONS})}"


def closed(schema: Schema) -> dict[str, Any]:
    """Return the schema with its objects closed, except those that say otherwise or require what they do not describe.

    An object that is described in several parts stays open, because each part would forbid the properties of the
    others. So do the definitions that such parts refer to.
    """
    shared: set[str] = set()
    for _ in range(MAX_PASSES):
        known = len(shared)
        result = _closed(schema, False, "#", shared)
        if len(shared) == known:
            return dict(result)
    return dict(schema)


def _closed(schema: Any, is_part: bool, where: str, shared: set[str]) -> Any:
    """is_part: other parts describe the same object. where: the pointer to the schema. shared: gets the references of
    parts."""
    if not isinstance(schema, Mapping):
        return schema
    is_part = is_part or where in shared
    in_parts = is_part or _is_divided(schema)
    if in_parts and isinstance(schema.get("$ref"), str):
        shared.add(schema["$ref"])
    result = dict(schema)
    for key, value in schema.items():
        at = f"{where}/{key}"
        if key in OF_MANY and isinstance(value, Mapping):
            result[key] = {name: _closed(one, False, f"{at}/{name}", shared) for name, one in value.items()}
        elif key in OF_LISTS and isinstance(value, list):
            result[key] = [_closed(one, False, at, shared) for one in value]
        elif key in OF_ONE:
            result[key] = _closed(value, False, at, shared)
        elif key in PARTS and isinstance(value, list):
            result[key] = [_closed(one, in_parts, at, shared) for one in value]
        elif key in CONDITIONS:
            result[key] = _closed(value, True, at, shared)
    is_closable = "properties" in schema and not in_parts and not any(key in schema for key in _OPEN)
    if is_closable and all(name in schema["properties"] for name in names_of(schema)):
        result["additionalProperties"] = False
    return result


def _is_divided(schema: Schema) -> bool:
    """Do several parts of a schema describe the same object?"""
    parts = sum(len(schema[key]) if key == "allOf" else 1 for key in PARTS if isinstance(schema.get(key), list))
    return parts + ("properties" in schema) + any(key in schema for key in CONDITIONS) > 1
