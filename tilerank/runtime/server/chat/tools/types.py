"""The JSON types that a schema allows, also behind references and in alternatives."""

from collections.abc import Mapping
from typing import Any

from ..keywords import FORMATS
from ..references import MAX_DEPTH, Schema, resolved

_BOUNDS = ("pattern", "format", "minLength", "maxLength")
_NAMES: dict[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}


def properties_of(schema: Schema) -> dict[str, Schema]:
    """Return the schema of each property. It allows any value if the request has something else than a schema there."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return {}
    return {name: one if isinstance(one, Mapping) else {} for name, one in properties.items()}


def types_of(schema: Any, root: Schema, depth: int = 0) -> set[str]:
    """Return the JSON types that a schema names; none if it allows any."""
    if depth > MAX_DEPTH:
        return set()
    schema = resolved(schema, root)
    named = schema.get("type")
    types = {one for one in ([named] if isinstance(named, str) else _list(named)) if isinstance(one, str)}
    if types:
        return types
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return {_NAMES[type(value)] for value in values}
    alternatives: list[set[str]] = [
        types_of(one, root, depth + 1) for key in ("anyOf", "oneOf") for one in _list(schema.get(key))
    ]
    return set[str]().union(*alternatives) if all(alternatives) else set()


def choices_of(schema: Any, root: Schema, depth: int = 0) -> list[Any] | None:
    """Return the values that a schema lists; None if it allows others."""
    schema = resolved(schema, root)
    if "const" in schema:
        return [schema["const"]]
    if isinstance(schema.get("enum"), list):
        return list(schema["enum"])
    if schema.get("type") == "null":
        return [None]
    alternatives: list[Any] = next((schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)), [])
    found = [choices_of(one, root, depth + 1) if depth < MAX_DEPTH else None for one in alternatives]
    whole = [one for one in found if one is not None]
    return [value for values in whole for value in values] if whole and len(whole) == len(found) else None


def bounds_of(schema: Any, root: Schema) -> dict[str, Any]:
    """Return the keywords that bound a string, of the schema or of its alternatives."""
    schema = resolved(schema, root)
    alternatives = [resolved(one, root) for key in ("anyOf", "oneOf") for one in _list(schema.get(key))]
    bounds = {key: one[key] for one in (schema, *alternatives) for key in _BOUNDS if key in one}
    if bounds.get("format") not in FORMATS:
        bounds.pop("format", None)  # an annotation
    return bounds


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
