"""Calls as a name, a mark and an object of arguments: the formats of DeepSeek-V3.1 and of Kimi-K2."""

import json
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..references import Schema
from .calls import ToolCall
from .cursor import Cursor, NotACallError
from .format import NUMBER, ToolFormat, with_new_ids


class NamedFormat(ToolFormat):
    """A call is a name, SEPARATOR and a JSON object, between BEGIN and END. Marks stand around all calls as well.

    Models leave out every mark but SEPARATOR.
    """

    BEGIN: str
    END: str
    SEPARATOR: str
    BEGINS: tuple[str, ...]
    """The spellings of BEGIN_CALLS."""
    ENDS: tuple[str, ...]
    """The spellings of END_CALLS."""

    def read(self, cursor: Cursor, schemas: Mapping[str, Schema], bare: bool) -> list[ToolCall]:
        cursor.take(*self.BEGINS)
        cursor.skip()
        cursor.take(self.BEGIN)
        cursor.skip()
        name = self.read_name(cursor, schemas)
        cursor.skip()
        arguments = {} if cursor.ahead().take(self.END) is not None else cursor.json()
        cursor.take_after_space(self.END)
        cursor.take_after_space(*self.ENDS)
        return [ToolCall.of(name, arguments)]

    @abstractmethod
    def read_name(self, cursor: Cursor, names: Iterable[str]) -> str:
        """Go past the name of a call, which is one of `names`, and SEPARATOR. Raises as `read`."""


class DeepSeekFormat(NamedFormat):
    """The format of DeepSeek-V3.1: NAME<｜tool▁sep｜>{...}."""

    name = "deepseek"
    BEGIN, END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
    BEGIN_CALLS, END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    BEGINS, ENDS = (BEGIN_CALLS,), (END_CALLS,)
    MARKS = (BEGIN, END, SEPARATOR, BEGIN_CALLS, END_CALLS)
    OPENINGS = (BEGIN_CALLS, BEGIN)
    BEGIN_CALL, END_CALL = BEGIN + "%(name)s" + SEPARATOR, END

    def is_shown_by(self, template: str) -> bool:
        # DeepSeek-V3 and R1 put the arguments into a block of Markdown.
        return self.BEGIN in template and "```json" not in template

    def bare_openings(self, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(f"{name}{self.SEPARATOR}" for name in names)

    def read_name(self, cursor: Cursor, names: Iterable[str]) -> str:
        return cursor.expect(*(f"{name}{self.SEPARATOR}" for name in names)).removesuffix(self.SEPARATOR)

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
{DeepSeekFormat.BEGIN_CALLS}{DeepSeekFormat.BEGIN_CALL % {"name": "tool_call_name"}}tool_call_arguments\
{DeepSeekFormat.END}{{{{additional_tool_calls}}}}{DeepSeekFormat.END_CALLS}

Where:

- `tool_call_name` must be an exact match to one of the available tools
- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema
- For multiple tool calls, chain them directly without separators or spaces
"""


class KimiFormat(NamedFormat):
    """The format of Kimi-K2: functions.NAME:INDEX<|tool_call_argument_begin|>{...}.

    INDEX counts the calls of the conversation from 0. Kimi's documents call functions.NAME:INDEX the id of the call.
    """

    name = "kimi"
    BEGIN, END, SEPARATOR = "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"
    BEGIN_CALLS, END_CALLS = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    BEGINS = (BEGIN_CALLS, "<|tool_call_section_begin|>")
    ENDS = (END_CALLS, "<|tool_call_section_end|>")
    MARKS = (BEGIN, END, SEPARATOR, BEGIN_CALLS, END_CALLS)
    OPENINGS = (*BEGINS, BEGIN)
    PREFIX = "functions."
    BEGIN_CALL, END_CALL = f"{BEGIN}{PREFIX}%(name)s:{NUMBER}{SEPARATOR}", END

    def is_shown_by(self, template: str) -> bool:
        return self.SEPARATOR in template

    def bare_openings(self, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(f"{self.PREFIX}{name}" for name in names)

    def read_name(self, cursor: Cursor, names: Iterable[str]) -> str:
        """SEPARATOR may be missing after an index."""
        written = {f"{prefix}{name}": name for name in names for prefix in (self.PREFIX, "")}
        name = written[cursor.expect(*written)]
        begin = cursor.at
        cursor.take(":")
        cursor.skip("0123456789")
        has_index = cursor.at > begin + 1
        cursor.skip()
        if cursor.take(self.SEPARATOR) is None and not has_index:
            raise NotACallError
        return name

    def with_ids(self, turns: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """The chat template prints the ids, of which the model has seen no other form."""
        return with_new_ids(turns, lambda call, number: f"{self.PREFIX}{call['function']['name']}:{number}")
