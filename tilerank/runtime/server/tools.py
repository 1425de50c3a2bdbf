"""Parsers for the tool calls in a model's text, one for each format.

Qwen: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them, with text around them.
Llama 3.x: the whole text is {"name": ..., "parameters": {...}}, or several of these separated by semicolons.
"""

import json
import secrets
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from .text import overlap


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

    A call is written BEGIN_CALL % name, the arguments, END_CALL. BETWEEN separates calls. MARKS: the parts of these
    that may be tokens.
    """

    MARKS: tuple[str, ...] = ()
    BEGIN_CALL: str
    END_CALL: str
    BETWEEN: str

    @abstractmethod
    def push(self, text: str) -> list[Piece]:
        """Append text and return the pieces that are complete."""

    @abstractmethod
    def flush(self) -> list[Piece]:
        """Return the remaining pieces. No text follows."""


class QwenTools(ToolParser):
    """The format of Qwen models."""

    MARKS = BEGIN, END = "<tool_call>", "</tool_call>"
    BEGIN_CALL, END_CALL = BEGIN + '\n{"name": "%s", "arguments": ', "}\n" + END
    BETWEEN = "\n"

    def __init__(self) -> None:
        self._buffer = ""

    def push(self, text: str) -> list[Piece]:
        self._buffer += text
        pieces: list[Piece] = []
        while True:
            before, begun, rest = self._buffer.partition(self.BEGIN)
            if not begun:
                keep = max(overlap(self._buffer, self.BEGIN), overlap(self._buffer, "\n" + self.BEGIN))
                pieces.append(self._buffer[: len(self._buffer) - keep])
                self._buffer = self._buffer[len(self._buffer) - keep :]
                break
            inside, ended, after = rest.partition(self.END)
            if not ended:
                break
            call = ToolCall.from_json(_parsed(inside), "arguments")
            # The line break before a call belongs to the call.
            pieces += [before.removesuffix("\n"), call] if call else [before + self.BEGIN + inside + self.END]
            self._buffer = after
        return [piece for piece in pieces if piece]

    def flush(self) -> list[Piece]:
        rest, self._buffer = self._buffer, ""
        return [rest] if rest else []


class LlamaTools(ToolParser):
    """The format of Llama 3.x models."""

    BEGIN_CALL, END_CALL = '{"name": "%s", "parameters": ', "}"
    BETWEEN = "; "

    def __init__(self) -> None:
        self._buffer = ""
        self._is_text = False

    def push(self, text: str) -> list[Piece]:
        self._buffer += text
        if not self._is_text and (not self._buffer.strip() or self._buffer.lstrip().startswith("{")):
            return []
        self._is_text = True
        text, self._buffer = self._buffer, ""
        return [text] if text else []

    def flush(self) -> list[Piece]:
        text, self._buffer = self._buffer, ""
        calls = [ToolCall.from_json(value, "parameters") for value in _objects(text)]
        whole = [call for call in calls if call is not None]
        if whole and len(whole) == len(calls):
            return [*whole]
        return [text] if text else []


def tool_parser(model_type: str) -> type[ToolParser] | None:
    """Return the parser for models of this type; None if their format of tool calls is unknown."""
    if model_type.startswith("qwen"):
        return QwenTools
    return LlamaTools if model_type in ("llama", "mllama") else None


def _finite(text: str) -> float:
    """Clamp numbers that are too large for a float, because JSON has no infinity."""
    return max(min(float(text), sys.float_info.max), -sys.float_info.max)


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_refuse_constant)


def _parsed(text: str) -> Any:
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        return None


def _objects(text: str) -> list[Any]:
    """Return the JSON values of a text that separates them by semicolons; [None] for any other text."""
    found, at = [], 0
    text = text.strip()
    while at < len(text):
        try:
            value, at = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            return [None]
        found.append(value)
        while at < len(text) and text[at] in "; \n":
            at += 1
    return found
