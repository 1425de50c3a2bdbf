"""A format of tool calls: what every one provides. formats.py has the table of all."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..references import Schema
from ..schemas import json_rule
from .calls import ToolCall
from .cursor import Cursor

NUMBER = "%(number)s"
"""Stands in BEGIN_CALL for the number of a call."""


class ToolFormat(ABC):
    """The way in which a model writes tool calls.

    The calls of an answer are written BEGIN_CALLS, the calls, END_CALLS, and a call BEGIN_CALL, the arguments,
    END_CALL. BEGIN_CALL has %(name)s for the name, and maybe NUMBER. BETWEEN separates calls. MARKS: the parts of these
    that may be tokens. OPENINGS: marks with which a call may begin wherever they are written. NUMBERS: a regular
    expression for what stands in place of NUMBER.
    """

    name: str
    MARKS: tuple[str, ...] = ()
    OPENINGS: tuple[str, ...] = ()
    BEGIN_CALLS = END_CALLS = BETWEEN = ""
    BEGIN_CALL: str
    END_CALL: str
    NUMBERS = "[0-9]{1,4}"

    @abstractmethod
    def is_shown_by(self, template: str) -> bool:
        """Does a chat template write calls in this format?"""

    def bare_openings(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the texts with which a call of one of these tools may begin without a mark, where a line begins."""
        return ()

    @abstractmethod
    def read(self, cursor: Cursor, schemas: Mapping[str, Schema], bare: bool) -> list[ToolCall]:
        """Read a call, or several that are one value, and the marks around it.

        schemas: of the parameters of the tools that may be called, by name. bare: the call begins without a mark.
        Raises NotACallError for any other text, and IncompleteError if that is not decided yet.
        """

    def write(self, calls: Sequence[tuple[str, Any]]) -> str:
        """Return calls of an earlier answer, as (name, arguments), in this format."""
        begins = (self.BEGIN_CALL % {"name": name, "number": i} for i, (name, _) in enumerate(calls))
        ends = (f"{self.write_arguments(arguments)}{self.END_CALL}" for _, arguments in calls)
        return f"{self.BEGIN_CALLS}{self.BETWEEN.join(map(''.join, zip(begins, ends, strict=True)))}{self.END_CALLS}"

    def with_ids(self, turns: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """Return the messages of a conversation for the chat template, with ids of calls that the model understands."""
        return turns

    def write_arguments(self, arguments: Any) -> str:
        """Return the arguments of a call, a JSON object or text, in this format."""
        return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)

    def describe(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """Return the end of the system prompt that describes the tools, for chat templates that do not."""
        functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        example = self.write([("NAME", {"KEY": "VALUE"})])
        return f"You may call these functions:\n\n{functions}\n\nTo call one, write:\n\n{example}"

    def argument_rules(self, rule: str, schema: Schema, literal: Callable[[str], str] = json.dumps) -> list[str]:
        """Return grammar rules, the first of them named `rule`, for arguments that follow a schema of type object.

        literal: returns the expression for a text with marks. Raises ValueError if the format cannot follow the schema.
        """
        return [f"{rule}: {json_rule(schema)}"]


def with_new_ids(
    turns: Sequence[dict[str, Any]], new_id: Callable[[Mapping[str, Any], int], str]
) -> Sequence[dict[str, Any]]:
    """Return the messages of a conversation with other ids of its calls and of their results.

    new_id: returns that of a call, given its number in the conversation. A result without an id belongs to the first
    call that has none yet.
    """
    count, changed = 0, []
    open_calls: list[tuple[str, str]] = []  # (id of the client, new id) of calls without a result
    for turn in turns:
        if calls := turn.get("tool_calls"):
            ids = [new_id(call, number) for number, call in enumerate(calls, count)]
            count += len(calls)
            open_calls = [(call["id"], id) for call, id in zip(calls, ids, strict=True)]
            turn = {**turn, "tool_calls": [{**call, "id": id} for call, id in zip(calls, ids, strict=True)]}
        elif turn["role"] == "tool":
            given = turn.get("tool_call_id")
            call = next((one for one in open_calls if not given or given == one[0]), None)
            if call is not None:
                open_calls.remove(call)
                turn = {**turn, "tool_call_id": call[1]}
        changed.append(turn)
    return changed
