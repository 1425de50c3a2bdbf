"""Calls as JSON objects with a name and arguments: the formats of Hermes, Llama 3 and Phi-4-mini."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..references import Schema
from .calls import ARGUMENTS, ToolCall, call_from_json
from .cursor import Cursor, NotACallError
from .format import ToolFormat

BETWEEN_CALLS = " \t\r\n;,"
_BRACKETS = ("{", "[")
_HEAD = 512
"""Characters of an object that are looked at to see whether it may become a call."""


class ObjectFormat(ToolFormat):
    """A call is a JSON object. BEGIN and END: the marks around it, both of which models leave out; empty for none."""

    BEGIN = END = ""

    def bare_openings(self, names: Iterable[str]) -> tuple[str, ...]:
        return _BRACKETS

    def read(self, cursor: Cursor, schemas: Mapping[str, Schema], bare: bool) -> list[ToolCall]:
        if bare:
            _check_head(cursor, schemas)
        else:
            cursor.expect(self.BEGIN)
            cursor.skip()
        value = cursor.json(_BRACKETS)
        calls = [call_from_json(one, schemas) for one in (value if isinstance(value, list) else [value])]
        found = [call for call in calls if call is not None]
        if not found or len(found) < len(calls):
            raise NotACallError
        if not (self.END and cursor.take_after_space(self.END)) and bare:
            _check_end(cursor, schemas)
        return found


def _check_head(cursor: Cursor, names: Iterable[str]) -> None:
    """Raise NotACallError as soon as an object shows that it is none, so that JSON which is an answer is streamed."""
    written = "".join(cursor.text[cursor.at : cursor.at + _HEAD].split()).lstrip("[")
    heads = [f'{{"name":"{name}"' for name in names] + [f'{{"{key}":' for key in (*ARGUMENTS, "type", "id")]
    if not any(written.startswith(head) for head in heads):
        if any(head.startswith(written) for head in heads):
            raise cursor.unfinished()
        raise NotACallError


def _check_end(cursor: Cursor, names: Iterable[str]) -> None:
    """Raise NotACallError if the line goes on after a call without marks, except with another one."""
    ahead = cursor.ahead()
    ahead.skip(" \t")
    if ahead.ended or ahead.take("\n", "\r") is not None:
        return
    ahead.skip(BETWEEN_CALLS)
    if not ahead.ended:
        _check_head(ahead, names)


class HermesFormat(ObjectFormat):
    """The format of Hermes, which Qwen2.5 and Qwen3 use: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

    name = "hermes"
    MARKS = BEGIN, END = "<tool_call>", "</tool_call>"
    OPENINGS = (BEGIN,)
    BEGIN_CALL, END_CALL = BEGIN + '\n{"name": "%(name)s", "arguments": ', "}\n" + END
    BETWEEN = "\n"

    def is_shown_by(self, template: str) -> bool:
        return self.BEGIN in template


class LlamaFormat(ObjectFormat):
    """The format of Llama 3: {"name": ..., "parameters": {...}}, or several of these separated by semicolons."""

    name = "llama"
    BEGIN = "<|python_tag|>"
    OPENINGS = (BEGIN,)
    BEGIN_CALL, END_CALL = '{"name": "%(name)s", "parameters": ', "}"
    BETWEEN = "; "

    def is_shown_by(self, template: str) -> bool:
        return False  # its templates look like many others; the families name the format


class PhiFormat(ObjectFormat):
    """The format of Phi-4-mini: <|tool_call|>[{"name": ..., "arguments": {...}}, ...]<|/tool_call|>.

    The model may also write functools before the list, without marks.
    """

    name = "phi"
    MARKS = BEGIN, END = "<|tool_call|>", "<|/tool_call|>"
    FUNCTOOLS = "functools"
    OPENINGS = (BEGIN,)
    BEGIN_CALLS, BETWEEN, END_CALLS = f"{BEGIN}[", ", ", f"]{END}"
    BEGIN_CALL, END_CALL = '{"name": "%(name)s", "arguments": ', "}"

    def is_shown_by(self, template: str) -> bool:
        return "<|tool|>" in template

    def bare_openings(self, names: Iterable[str]) -> tuple[str, ...]:
        return (*_BRACKETS, self.FUNCTOOLS)

    def read(self, cursor: Cursor, schemas: Mapping[str, Schema], bare: bool) -> list[ToolCall]:
        if bare:
            cursor.take(self.FUNCTOOLS)
        return super().read(cursor, schemas, bare)

    def describe(self, tools: Sequence[Mapping[str, Any]]) -> str:
        # The chat template prints this after the system prompt, where it has a field for tools that no client fills.
        functions = [tool["function"] for tool in tools]
        return f"<|tool|>{json.dumps(functions, ensure_ascii=False)}<|/tool|>"
