"""A tool call, and the JSON in which most formats write one."""

import json
import secrets
import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, NoReturn

ARGUMENTS = ("arguments", "parameters")
"""The keys under which models write the arguments of a call."""


@dataclass(frozen=True)
class ToolCall:
    """A call of the tool `name`. arguments: JSON text, as in the API, or its beginning, before MoreArguments."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    @staticmethod
    def of(name: str, arguments: dict[str, Any]) -> "ToolCall":
        return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


@dataclass(frozen=True)
class MoreArguments:
    """Text that continues the arguments of the last call."""

    text: str


Piece = str | ToolCall | MoreArguments
"""A part of an answer."""


def call_from_json(value: Any, names: Collection[str]) -> ToolCall | None:
    """Return the call that a JSON value describes; None unless it has one of `names` and arguments under one key."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or value["name"] not in names:
        return None
    keys = [key for key in ARGUMENTS if key in value]
    arguments = arguments_from_json(value[keys[0]]) if len(keys) == 1 else None
    return None if arguments is None else ToolCall.of(value["name"], arguments)


def arguments_from_json(value: Any) -> dict[str, Any] | None:
    """Return the arguments of a call: an object, or the text of one. Null and a blank text are an empty object.

    None for any other value.
    """
    if isinstance(value, str):
        text = value.strip()
        value = parse_json(text) if text not in ("", "null") else {}
    elif value is None:
        value = {}
    return value if isinstance(value, dict) else None


def parse_json(text: str, default: Any = None) -> Any:
    """Return the JSON value of `text`; `default` if it is not JSON. Strings may hold line breaks as they are."""
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        return default


def _finite(text: str) -> float:
    """Clamp numbers that are too large for a float, because JSON has no infinity."""
    return max(min(float(text), sys.float_info.max), -sys.float_info.max)


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_refuse_constant, strict=False)
