"""Calls as a name, a mark and an object of arguments: the format of DeepSeek-V3.1."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..keywords import Schema
from .calls import ToolCall
from .cursor import Cursor, NotACallError
from .format import ToolFormat


class DeepSeekFormat(ToolFormat):
    """The format of DeepSeek-V3.1: NAME<｜tool▁sep｜>{...} between marks, and other marks around all calls."""

    name = "deepseek"
    BEGIN, END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
    BEGIN_CALLS, END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    MARKS = (BEGIN, END, SEPARATOR, BEGIN_CALLS, END_CALLS)
    OPENINGS = (BEGIN_CALLS, BEGIN)
    BEGIN_CALL, END_CALL = BEGIN + "%s" + SEPARATOR, END

    def is_shown_by(self, template: str) -> bool:
        # DeepSeek-V3 and R1 put the arguments into a block of Markdown.
        return self.BEGIN in template and "```json" not in template

    def bare_openings(self, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(f"{name}{self.SEPARATOR}" for name in names)

    def read(self, cursor: Cursor, schemas: Mapping[str, Schema], bare: bool) -> list[ToolCall]:
        if cursor.take(self.BEGIN_CALLS) is not None:
            cursor.skip()
        cursor.take(self.BEGIN)
        cursor.skip()
        name = cursor.expect(*(f"{name}{self.SEPARATOR}" for name in schemas)).removesuffix(self.SEPARATOR)
        cursor.skip()
        arguments = cursor.json()
        if not isinstance(arguments, dict):
            raise NotACallError
        cursor.take_after_space(self.END)
        cursor.take_after_space(self.END_CALLS)
        return [ToolCall.of(name, arguments)]

    def describe(self, tools: Sequence[Mapping[str, Any]]) -> str:
        functions = [tool["function"] for tool in tools]
        described = (
            f"### {function['name']}\nDescription: {function.get('description') or ''}\n\n"
            f"Parameters: {json.dumps(function.get('parameters') or {}, ensure_ascii=False)}\n\n"
            for function in functions
        )
        return f"{_TOOLS}{''.join(described)}{_RULES}"


# The model has been trained on this text, which its model card gives. Its chat template leaves tools out.
_TOOLS = "## Tools\nYou have access to the following tools:\n\n"
_RULES = f"""IMPORTANT: ALWAYS adhere to this exact format for tool use:
{DeepSeekFormat.BEGIN_CALLS}{DeepSeekFormat.BEGIN_CALL % "tool_call_name"}tool_call_arguments{DeepSeekFormat.END}\
{{{{additional_tool_calls}}}}{DeepSeekFormat.END_CALLS}

Where:

- `tool_call_name` must be an exact match to one of the available tools
- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema
- For multiple tool calls, chain them directly without separators or spaces
"""
