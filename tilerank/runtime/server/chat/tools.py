"""Tool calls: what a parser of a format provides. tool_formats.py has the formats."""

import json
import secrets
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NoReturn

from .schemas import Schema as Schema
from .schemas import closed

# Enough for the indentation of pretty-printed JSON. Some models would otherwise generate whitespace forever.
_JSON_OPTIONS = {"x-guidance": {"whitespace_pattern": r"[ \n]{0,32}"}}


@dataclass(frozen=True)
class ToolCall:
    """A call of the tool `name`. arguments: JSON text, as in the API."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    @staticmethod
    def from_json(value: Any, arguments_key: str) -> "ToolCall | None":
        """Return the call that `value` describes; None unless it has a name and an object under `arguments_key`."""
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return None
        arguments = value.get(arguments_key, {})
        if not isinstance(arguments, dict):
            return None
        return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False))


Piece = str | ToolCall


class ToolParser(ABC):
    """Splits the streamed text of one choice into text and tool calls. A malformed call stays text.

    schemas: JSON schemas of the parameters, by the name of the tool.

    The calls of an answer are written BEGIN_CALLS, the calls, END_CALLS, and a call BEGIN_CALL % name, the arguments,
    END_CALL. BETWEEN separates calls. MARKS: the parts of these that may be tokens.
    """

    MARKS: tuple[str, ...] = ()
    BEGIN_CALLS = END_CALLS = BETWEEN = ""
    BEGIN_CALL: str
    END_CALL: str

    def __init__(self, schemas: Mapping[str, Schema] = MappingProxyType({})) -> None:
        self._schemas = schemas
        self._buffer = ""

    @abstractmethod
    def push(self, text: str) -> list[Piece]:
        """Append text and return the pieces that are complete."""

    @abstractmethod
    def flush(self) -> list[Piece]:
        """Return the remaining pieces. No text follows."""

    @classmethod
    def write(cls, calls: Sequence[tuple[str, Any]]) -> str:
        """Return calls of an earlier answer, as (name, arguments), in this format."""
        written = (
            f"{cls.BEGIN_CALL % name}{cls.write_arguments(arguments)}{cls.END_CALL}" for name, arguments in calls
        )
        return f"{cls.BEGIN_CALLS}{cls.BETWEEN.join(written)}{cls.END_CALLS}"

    @staticmethod
    def write_arguments(arguments: Any) -> str:
        """Return the arguments of a call, a JSON object or text, in this format."""
        return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)

    @staticmethod
    def describe(tools: Sequence[Mapping[str, Any]]) -> str | None:
        """Return the end of the system prompt that describes the tools, for chat templates that do not; None if the
        format has none.
        """
        return None

    @staticmethod
    def argument_rules(rule: str, schema: Schema) -> list[str]:
        """Return grammar rules, the first of them named `rule`, for arguments that follow a schema of type object.

        Raises ValueError if the format cannot follow the schema.
        """
        return [f"{rule}: {json_rule(schema)}"]


def split(parser: ToolParser | None, text: str, *, last: bool) -> list[Piece]:
    """Return the pieces that new text completes. parser: None if there are no tools to call. last: no text follows."""
    if parser is None:
        return [text] if text else []
    return parser.push(text) + (parser.flush() if last else [])


def json_rule(schema: Schema) -> str:
    """Return the expression of a grammar for JSON that follows `schema`, with its objects closed."""
    return f"%json {json.dumps({**closed(schema), **_JSON_OPTIONS})}"


def parse_json(text: str, default: Any = None) -> Any:
    """Return the JSON value of `text`; `default` if it is not JSON."""
    try:
        return DECODER.decode(text)
    except (ValueError, RecursionError):
        return default


def _finite(text: str) -> float:
    """Clamp numbers that are too large for a float, because JSON has no infinity."""
    return max(min(float(text), sys.float_info.max), -sys.float_info.max)


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_refuse_constant)
