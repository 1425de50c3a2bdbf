"""Builds the grammar of a request (runtime/grammar.py) from its response_format, regular expression and tools."""

import json
import re
from typing import Any

from llguidance import regex_to_lark

from tilerank.loader.tokenizer import Tokenizer

from .api import ChatCompletion, Sampling, Tool
from .errors import ApiError
from .tools import ToolParser

MAX_GRAMMAR = 128 << 10
"""Characters."""
# Enough for the indentation of pretty-printed JSON. Some models would otherwise generate whitespace forever.
_JSON_OPTIONS = {"x-guidance": {"whitespace_pattern": r"[ \n]{0,32}"}}
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def request_grammar(body: Sampling, tokenizer: Tokenizer, parser: type[ToolParser] | None = None) -> str | None:
    """Return the grammar of the answer; None if any text is allowed. Raises ApiError for a schema that is too large.

    parser: defines the format of tool calls; None if there are no tools to call.
    """
    answer = _answer_rule(body)
    rules = [] if answer is None else [f"answer: {answer}"]
    alternatives = ["answer"] if rules else []
    if isinstance(body, ChatCompletion) and parser is not None and (body.must_call or rules):
        rules += _call_rules(body, tokenizer, parser)
        alternatives = ["calls"] if body.must_call else [*alternatives, "calls"]
    if not alternatives:
        return None
    grammar = "\n".join([f"start: {' | '.join(alternatives)}", *rules])
    if len(grammar) > MAX_GRAMMAR:
        raise ApiError(
            400, f"The schemas make a grammar of {len(grammar)} characters; at most {MAX_GRAMMAR} are allowed."
        )
    return grammar


def _answer_rule(body: Sampling) -> str | None:
    if body.guided_regex is not None:
        return f"/{regex_to_lark(body.guided_regex, '')}/"
    requested = body.response_format
    if requested is None or requested.type == "text":
        return None
    return _json_rule({"type": "object"} if requested.json_schema is None else requested.json_schema.definition)


def _call_rules(body: ChatCompletion, tokenizer: Tokenizer, parser: type[ToolParser]) -> list[str]:
    # Each tool's schema is a rule of its own, because its references begin at its root.
    tools = body.callable_tools
    any_call = " | ".join(f"call_{i}" for i in range(len(tools)))
    more_calls = f" ({json.dumps(parser.BETWEEN)} call)*" if body.may_call_several else ""
    rules = [f"calls: call{more_calls}", f"call: {any_call}"]
    end = _literal(parser.END_CALL, tokenizer, parser)
    for i, tool in enumerate(tools):
        begin = _literal(parser.BEGIN_CALL % tool.function.name, tokenizer, parser)
        rules.append(f"call_{i}: {begin} arguments_{i} {end}")
        rules.append(f"arguments_{i}: {_json_rule(_parameters(tool))}")
    return rules


def _literal(text: str, tokenizer: Tokenizer, parser: type[ToolParser]) -> str:
    """Return the rule for a text. Marks that are tokens of the model must be named as such: llguidance takes tokens in
    angle brackets for special ones, which are no text to it.
    """
    marks = [mark for mark in parser.MARKS if len(tokenizer.encode(mark, add_special_tokens=False)) == 1]
    pieces = re.split(f"({'|'.join(map(re.escape, marks))})", text) if marks else [text]
    return " ".join(piece if piece in marks else json.dumps(piece) for piece in pieces if piece)


def _parameters(tool: Tool) -> dict[str, Any]:
    schema = _NO_PARAMETERS if tool.function.parameters is None else tool.function.parameters
    if schema.get("type", "object") != "object":
        raise ApiError(400, f"tools: the parameters of {tool.function.name} must have type object", param="tools")
    return {"type": "object"} | schema


def _json_rule(schema: dict[str, Any]) -> str:
    return f"%json {json.dumps(schema | _JSON_OPTIONS)}"
