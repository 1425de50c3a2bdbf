"""Tool calls in a model's text, as the families write them.

Qwen: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number, text around them.
Llama 3.x: the whole text is {"name": ..., "parameters": {...}}, or several of these with semicolons between.
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
    """`arguments`: JSON, as the API wants it."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    @staticmethod
    def of(value: Any, arguments: str) -> "ToolCall | None":
        """What `value` calls, if it is a call whose arguments are an object under the key `arguments`."""
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return None
        given = value.get(arguments, {})
        return ToolCall(value["name"], json.dumps(given, ensure_ascii=False)) if isinstance(given, dict) else None


Piece = str | ToolCall


class ToolParser(ABC):
    """Cuts the text of one choice, as it comes, into text and calls. What only looked like a call stays text.

    BEGIN_CALL, of the tool's name, and END_CALL stand around the arguments; BETWEEN between calls.
    """

    BEGIN_CALL: str
    END_CALL: str
    BETWEEN: str

    @abstractmethod
    def push(self, text: str) -> list[Piece]: ...

    @abstractmethod
    def flush(self) -> list[Piece]:
        """No text follows."""


class QwenTools(ToolParser):
    BEGIN, END = "<tool_call>", "</tool_call>"
    BEGIN_CALL, END_CALL = BEGIN + '\n{"name": "%s", "arguments": ', "}\n" + END
    BETWEEN = "\n"

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while True:
            before, begun, rest = self._held.partition(self.BEGIN)
            if not begun:
                keep = max(overlap(self._held, self.BEGIN), overlap(self._held, "\n" + self.BEGIN))
                pieces.append(self._held[: len(self._held) - keep])
                self._held = self._held[len(self._held) - keep :]
                break
            inside, ended, after = rest.partition(self.END)
            if not ended:
                break
            call = ToolCall.of(_parsed(inside), "arguments")
            # The line break before a call is its own, not the text's.
            pieces += [before.removesuffix("\n"), call] if call else [before + self.BEGIN + inside + self.END]
            self._held = after
        return [piece for piece in pieces if piece]

    def flush(self) -> list[Piece]:
        rest, self._held = self._held, ""
        return [rest] if rest else []


class LlamaTools(ToolParser):
    BEGIN_CALL, END_CALL = '{"name": "%s", "parameters": ', "}"
    BETWEEN = "; "

    def __init__(self) -> None:
        self._held = ""
        self._plain = False

    def push(self, text: str) -> list[Piece]:
        self._held += text
        if not self._plain and (not self._held.strip() or self._held.lstrip().startswith("{")):
            return []
        self._plain = True
        text, self._held = self._held, ""
        return [text] if text else []

    def flush(self) -> list[Piece]:
        text, self._held = self._held, ""
        calls = [ToolCall.of(value, "parameters") for value in _objects(text)]
        whole = [call for call in calls if call is not None]
        if whole and len(whole) == len(calls):
            return [*whole]
        return [text] if text else []


def tool_parser(model_type: str) -> type[ToolParser] | None:
    """That of a family; None where it is not known how calls are written."""
    if model_type.startswith("qwen"):
        return QwenTools
    return LlamaTools if model_type in ("llama", "mllama") else None


def _finite(text: str) -> float:
    """JSON has no infinity: what is too large for a float becomes the largest."""
    return max(min(float(text), sys.float_info.max), -sys.float_info.max)


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_no_constant)


def _parsed(text: str) -> Any:
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        return None


def _objects(text: str) -> list[Any]:
    """JSON values with semicolons between; [None] if that is not what the text is."""
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
