"""Builds the grammar of a request (runtime/grammar.py) from its response_format, regular expression and tools."""

import json
import re
from typing import Any

from llguidance import regex_to_lark

from tilerank.loader.tokenizer import Tokenizer

from .answers.reasoning import BEGIN, END, Thinking, mark_token
from .answers.tools import ToolParser, json_rule
from .api import ChatCompletion, Sampling, Tool
from .errors import ApiError

MAX_GRAMMAR = 128 << 10
"""Characters."""
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def request_grammar(
    body: Sampling,
    tokenizer: Tokenizer,
    parser: type[ToolParser] | None = None,
    thinking: Thinking = Thinking.NEVER,
) -> str | None:
    """Return the grammar of the answer; None if any text is allowed. Raises ApiError for a schema that is too large.

    parser: defines the format of tool calls; None if there are no tools to call. thinking: the reasoning before the
    answer is free.
    """
    answer = _answer_rule(body)
    rules = [] if answer is None else [f"answer: {answer}"]
    alternatives = ["answer"] if rules else []
    if isinstance(body, ChatCompletion) and parser is not None and (body.must_call or rules):
        rules += _call_rules(body, tokenizer, parser)
        alternatives = ["calls"] if body.must_call else [*alternatives, "calls"]
    if not alternatives:
        return None
    begin, thinking_rules = _thinking_rules(tokenizer, thinking)
    grammar = "\n".join([f"start: {begin} final", f"final: {' | '.join(alternatives)}", *thinking_rules, *rules])
    if len(grammar) > MAX_GRAMMAR:
        raise ApiError(
            400, f"The schemas make a grammar of {len(grammar)} characters; at most {MAX_GRAMMAR} are allowed."
        )
    return grammar


def _thinking_rules(tokenizer: Tokenizer, thinking: Thinking) -> tuple[str, list[str]]:
    """Return the expression of the reasoning, with the line breaks that follow it, and its rules."""
    if thinking is Thinking.NEVER:
        return "", []
    begin, end = (mark_token(mark, tokenizer) for mark in (BEGIN, END))
    any_text, line_breaks = "/(.|\\n)*/", "line_breaks: /\\n+/"
    if end is None:
        thought = [f"thought[suffix={json.dumps(END)}]: {any_text}"]
    else:
        thought = [f"thought: thought_text <[{end}]>", f"thought_text: {any_text}"]
    whole = "thought line_breaks?"
    return f"(<[{begin}]> {whole})?" if thinking is Thinking.OPTIONAL else whole, [*thought, line_breaks]


def _answer_rule(body: Sampling) -> str | None:
    if body.guided_regex is not None:
        return f"/{regex_to_lark(body.guided_regex, '')}/"
    requested = body.response_format
    if requested is None or requested.type == "text":
        return None
    return json_rule({"type": "object"} if requested.json_schema is None else requested.json_schema.definition)


def _call_rules(body: ChatCompletion, tokenizer: Tokenizer, parser: type[ToolParser]) -> list[str]:
    # Each tool's schema is a rule of its own, because its references begin at its root.
    tools = body.callable_tools
    any_call = " | ".join(f"call_{i}" for i in range(len(tools)))
    begin_calls, between, end_call, end_calls = (
        _literal(text, tokenizer, parser)
        for text in (parser.BEGIN_CALLS, parser.BETWEEN, parser.END_CALL, parser.END_CALLS)
    )
    more_calls = f"({between} call)*" if body.may_call_several else ""
    rules = [f"calls: {begin_calls} call {more_calls} {end_calls}", f"call: {any_call}"]
    for i, tool in enumerate(tools):
        begin = _literal(parser.BEGIN_CALL % tool.function.name, tokenizer, parser)
        rules.append(f"call_{i}: {begin} arguments_{i} {end_call}")
        try:
            rules += parser.argument_rules(f"arguments_{i}", _parameters(tool))
        except ValueError as e:
            raise ApiError(400, f"tools: the parameters of {tool.function.name}: {e}", param="tools") from e
    return rules


def _literal(text: str, tokenizer: Tokenizer, parser: type[ToolParser]) -> str:
    """Return the expression for a text. Marks that are tokens of the model must be named by their ids: llguidance takes
    tokens in angle brackets for special ones, which are no text to it.
    """
    ids = {mark: mark_token(mark, tokenizer) for mark in parser.MARKS}
    marks = [mark for mark, id in ids.items() if id is not None]
    pieces = re.split(f"({'|'.join(map(re.escape, marks))})", text) if marks else [text]
    return " ".join(f"<[{ids[piece]}]>" if piece in marks else json.dumps(piece) for piece in pieces if piece)


def _parameters(tool: Tool) -> dict[str, Any]:
    schema = _NO_PARAMETERS if tool.function.parameters is None else tool.function.parameters
    if schema.get("type", "object") != "object":
        raise ApiError(400, f"tools: the parameters of {tool.function.name} must have type object", param="tools")
    return {"type": "object"} | schema
