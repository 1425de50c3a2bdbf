"""Follows the references of a JSON schema, and lists the keywords that do not constrain its values."""

from collections.abc import Mapping
from typing import Any, TypeGuard

Schema = Mapping[str, Any]

ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment")
)
"""Keywords that do not constrain a value."""
MAX_DEPTH = 16
"""References and alternatives inside each other; a schema may refer to itself."""


def resolved(schema: Any, root: Schema) -> Schema:
    """Return the schema with what its `$ref` and a single part of `allOf` say, its own keywords first."""
    for _ in range(MAX_DEPTH):
        if not isinstance(schema, Mapping):
            return {}
        parts = schema.get("allOf")
        if isinstance(schema.get("$ref"), str):
            more = _at(schema["$ref"], root)
            schema = {**more, **{key: one for key, one in schema.items() if key != "$ref"}}
        elif isinstance(parts, list) and len(parts) == 1 and isinstance(parts[0], Mapping):
            schema = {**parts[0], **{key: one for key, one in schema.items() if key != "allOf"}}
        else:
            return schema
    return {}


def followed(schema: Any, root: Schema) -> Schema:
    """Return the schema to which one refers that says nothing else; any other stays as it is."""
    for _ in range(MAX_DEPTH):
        if not isinstance(schema, Mapping):
            return {}
        parts = schema.get("allOf")
        if schema.keys() - ANNOTATIONS == {"$ref"} and isinstance(schema["$ref"], str):
            schema = _at(schema["$ref"], root)
        elif schema.keys() - ANNOTATIONS == {"allOf"} and isinstance(parts, list) and len(parts) == 1:
            schema = parts[0]
        else:
            return schema
    return {}


def is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _at(reference: str, root: Schema) -> Schema:
    """Return the schema to which a JSON pointer such as #/$defs/Name refers; one that allows all if there is none."""
    found: Any = root
    if not reference.startswith("#"):
        return {}
    for step in reference.removeprefix("#").split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}
