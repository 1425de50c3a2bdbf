"""The tools of a conversation as a TypeScript namespace, in the words of openai-harmony 0.0.8."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

_ELEMENTARY = {"string": "string", "number": "number", "integer": "number", "boolean": "boolean"}


def tools_section(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the section of the developer message that describes tools, each in OpenAI's form."""
    functions = "\n".join(line for tool in tools for line in _function(tool["function"]))
    return f"# Tools\n\n## functions\n\nnamespace functions {{\n\n{functions}\n}} // namespace functions"


def _function(function: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a function and the empty one after it."""
    if description := function.get("description"):
        yield from (f"// {line}" for line in description.removesuffix("\n").split("\n"))
    parameters = function.get("parameters")
    taken = "" if parameters is None else f"_: {_type(parameters, '')}"
    yield f"type {function['name']} = ({taken}) => any;\n"


def _type(schema: Any, indent: str) -> str:
    """Return the type of the values that follow a schema. indent: of the line that it is written in."""
    if not isinstance(schema, Mapping):
        return "any"
    if isinstance(alternatives := schema.get("oneOf"), list):
        return "".join(f"\n{indent} | {_alternative(one, indent)}" for one in alternatives)
    kind = schema.get("type")
    if isinstance(kind, list) and (names := [one for one in kind if isinstance(one, str)]):
        return " | ".join("number" if name == "integer" else name for name in names)
    if kind == "object":
        return "".join([*_lines([_text(schema, "description")], indent), "{\n", *_properties(schema, indent)])
    if kind == "array":
        return f"{_type(schema['items'], indent)}[]" if "items" in schema else "Array<any>"
    if kind == "string" and (values := [one for one in _list(schema.get("enum")) if isinstance(one, str)]):
        return " | ".join(f'"{value}"' for value in values)
    return _ELEMENTARY.get(kind, "any") if isinstance(kind, str) else "any"


def _properties(schema: Mapping[str, Any], indent: str) -> Iterator[str]:
    """Yield the lines of the properties of an object, and its end."""
    properties = schema.get("properties")
    required = _list(schema.get("required"))
    for name, one in properties.items() if isinstance(properties, Mapping) else ():
        one = one if isinstance(one, Mapping) else {}
        field = f"{indent}{name}{'' if name in required else '?'}:"
        if title := _text(one, "title"):
            yield f"{indent}// {title}\n{indent}//\n"
        if isinstance(one.get("oneOf"), list):
            yield from _alternatives(one, field, indent)
            continue
        yield from _lines([_text(one, "description")], indent)
        yield from _lines(_examples(one), indent)
        default = f" // {shown}" if (shown := _default(one)) else ""
        yield f"{field} {_nullable(one, _type(one, f'{indent}    '))},{default}\n"
    yield f"{indent}}}"


def _alternatives(schema: Mapping[str, Any], field: str, indent: str) -> Iterator[str]:
    """Yield the lines of a property with alternatives. Its description is left out if the first one has the same."""
    alternatives = schema["oneOf"]
    yield from _lines(_examples(schema), indent)
    described = _text(schema, "description")
    own = [] if alternatives and described == _text(alternatives[0], "description") else [described]
    yield from _lines([*own, _default(schema)], indent)
    yield f"{field}\n"
    for i, one in enumerate(alternatives):
        known = described if i or not any(own) else _text(one, "description")
        yield f"{indent} | {_alternative(one, indent, known)}\n"
    yield f"{indent},\n"


def _alternative(schema: Any, indent: str, known: str = "") -> str:
    """Return an alternative with its description and its default as a comment. known: a description to leave out."""
    described = _text(schema, "description")
    comments = [described if described != known else "", _default(schema)]
    comment = " ".join(filter(None, comments))
    return _nullable(schema, _type(schema, f"{indent}   ")) + (f" // {comment}" if comment else "")


def _nullable(schema: Any, kind: str) -> str:
    is_nullable = isinstance(schema, Mapping) and schema.get("nullable") is True
    return f"{kind} | null" if is_nullable and "null" not in kind else kind


def _default(schema: Any) -> str:
    """Return the default of a schema as a comment; empty if it has none. One of an enum is written without quotes."""
    if not isinstance(schema, Mapping) or "default" not in schema:
        return ""
    value = schema["default"]
    if isinstance(value, str):
        return f"default: {value}" if _list(schema.get("enum")) else f'default: "{value}"'
    return f"default: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}"


def _examples(schema: Mapping[str, Any]) -> list[str]:
    examples = _list(schema.get("examples"))
    return ["Examples:", *(f'- "{one}"' for one in examples if isinstance(one, str))] if examples else []


def _lines(comments: Iterable[str], indent: str) -> Iterator[str]:
    yield from (f"{indent}// {comment}\n" for comment in comments if comment)


def _text(schema: Any, key: str) -> str:
    """Return a text of a schema; empty if it has none."""
    value = schema.get(key) if isinstance(schema, Mapping) else None
    return value if isinstance(value, str) else ""


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
