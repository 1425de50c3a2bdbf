"""Alternatives of `oneOf` that no value follows together, so that they may be written as `anyOf`.

llguidance compares the types and the required constants of alternatives, and does not follow their references.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from .references import MAX_DEPTH, Schema, followed, is_number

_CONTAINS = {"number": ("integer",)}
_BOUNDS = (("minimum", "maximum"), ("exclusiveMinimum", "maximum"), ("minimum", "exclusiveMaximum"))


def told_apart(alternatives: Sequence[Any], root: Schema) -> list[dict[str, Any] | None] | None:
    """Return for each alternative what has to be added to it, so that no value follows two of them; None for nothing.

    Of objects that require different properties, each is made to have none that another one requires: what follows two
    alternatives follows no `oneOf`. Returns None if alternatives cannot be told apart.
    """
    schemas = [followed(one, root) for one in alternatives]
    forbidden: list[list[str]] = [[] for _ in schemas]
    for (i, one), (j, other) in itertools.combinations(enumerate(schemas), 2):
        if are_disjoint(one, other, root):
            continue
        mine, theirs = (
            [name for name in _required(a) if name not in _required(b)] for a, b in ((one, other), (other, one))
        )
        if not mine or not theirs or any(_types(schema) - {"object"} for schema in (one, other)):
            return None
        forbidden[i].append(theirs[0])
        forbidden[j].append(mine[0])
    return [{"type": "object", "properties": dict.fromkeys(names, False)} if names else None for names in forbidden]


def are_disjoint(one: Any, other: Any, root: Schema, depth: int = 0) -> bool:
    """Return True if certainly no value follows both schemas."""
    if one is False or other is False:
        return True
    one, other = followed(one, root), followed(other, root)
    values = [_values(schema) for schema in (one, other)]
    if values[0] is not None and values[1] is not None:
        return not any(_same(a, b) for a in values[0] for b in values[1])
    types = [_types(schema) for schema in (one, other)]
    if types[0] and types[1] and not types[0] & types[1]:
        return True
    if types[0] <= {"integer", "number"} and types[1] <= {"integer", "number"} and types[0] and types[1]:
        return _lies_below(one, other) or _lies_below(other, one)
    if types[0] != {"object"} or types[1] != {"object"} or depth > MAX_DEPTH:
        return False
    if any(_forbids(a, name) for a, b in ((one, other), (other, one)) for name in _required(b)):
        return True
    common = [name for name in _required(one) if name in _required(other)]
    parts = [(_properties(one).get(name, {}), _properties(other).get(name, {})) for name in common]
    return any(are_disjoint(a, b, root, depth + 1) for a, b in parts)


def _values(schema: Schema) -> list[Any] | None:
    """Return the values that a schema lists; None if it lists none."""
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _same(a: Any, b: Any) -> bool:
    """Are two values the same in JSON, where true is not 1 and 1.0 is 1?"""
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def _types(schema: Schema) -> set[str]:
    """Return the types that a schema names, those within them included; none if it names none."""
    named = schema.get("type")
    types = [named] if isinstance(named, str) else named if isinstance(named, list) else []
    return {inner for one in types if isinstance(one, str) for inner in (one, *_CONTAINS.get(one, ()))}


def _lies_below(one: Schema, other: Schema) -> bool:
    """Are all numbers of a schema below those of another?"""
    pairs = [(one.get(upper), other.get(lower), "exclusive" in lower + upper) for lower, upper in _BOUNDS]
    return any(
        is_number(top) and is_number(bottom) and (top < bottom or (exclusive and top == bottom))
        for top, bottom, exclusive in pairs
    )


def _required(schema: Schema) -> list[str]:
    names = schema.get("required")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _properties(schema: Schema) -> Schema:
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _forbids(schema: Schema, name: str) -> bool:
    if name in _properties(schema):
        return _properties(schema)[name] is False
    return schema.get("additionalProperties") is False and "patternProperties" not in schema
