"""What a request wants its answers to look like, as a grammar (runtime/grammar.py): formats, and calls of tools."""

import json
from typing import Any

from llguidance import regex_to_lark

from .api import ChatCompletion, Sampling, Tool
from .errors import ApiError
from .tools import ToolParser

MAX_GRAMMAR = 128 << 10
"""Characters."""
# Room for the indents of a pretty print, but not for the blanks without end that some models fall into.
_OPTIONS = {"x-guidance": {"whitespace_pattern": r"[ \n]{0,32}"}}
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def grammar_of(body: Sampling, family: type[ToolParser] | None = None) -> str | None:
    """None where any text will do. `family`: how calls are written, where there are tools to call."""
    form = _form(body)
    rules = [] if form is None else [f"answer: {form}"]
    ways = ["answer"] if rules else []
    if isinstance(body, ChatCompletion) and family is not None and (body.must_call or rules):
        rules += _calls(body, family)
        ways = ["calls"] if body.must_call else [*ways, "calls"]
    if not ways:
        return None
    grammar = "\n".join([f"start: {' | '.join(ways)}", *rules])
    if len(grammar) > MAX_GRAMMAR:
        raise ApiError(
            400, f"expected schemas that make a grammar of at most {MAX_GRAMMAR} characters, found {len(grammar)}"
        )
    return grammar


def _form(body: Sampling) -> str | None:
    if body.guided_regex is not None:
        return f"/{regex_to_lark(body.guided_regex, '')}/"
    form = body.response_format
    if form is None or form.type == "text":
        return None
    return _json({"type": "object"} if form.json_schema is None else form.json_schema.of)


def _calls(body: ChatCompletion, family: type[ToolParser]) -> list[str]:
    """The schema of each tool is a rule of its own, because it may refer to its parts from its root."""
    tools = body.callable_tools
    one = " | ".join(f"call_{i}" for i in range(len(tools)))
    more = f" ({json.dumps(family.BETWEEN)} call)*" if body.may_call_more else ""
    rules = [f"calls: call{more}", f"call: {one}"]
    for i, tool in enumerate(tools):
        begin = json.dumps(family.BEGIN_CALL % tool.function.name)
        rules.append(f"call_{i}: {begin} arguments_{i} {json.dumps(family.END_CALL)}")
        rules.append(f"arguments_{i}: {_json(_parameters(tool))}")
    return rules


def _parameters(tool: Tool) -> dict[str, Any]:
    given = _NO_PARAMETERS if tool.function.parameters is None else tool.function.parameters
    if given.get("type", "object") != "object":
        raise ApiError(400, f"the parameters of {tool.function.name}: expected the schema of an object", param="tools")
    return {"type": "object"} | given


def _json(schema: dict[str, Any]) -> str:
    return f"%json {json.dumps(schema | _OPTIONS)}"
