"""Builds the grammar of a request (protocol/grammar.py) from what its answer must follow, and from its tools."""

import json
import re
from typing import Any

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from tilerank.loader.tokenizer import Tokenizer

from ..http.errors import ApiError
from .reasoning import BEGIN, END, ReasoningStart
from .references import Schema
from .request import Sampling, Tool
from .schemas import json_rule
from .structured import Constraint, StructuralTag
from .tools.format import NUMBER, ToolFormat

MAX_GRAMMAR = 128 << 10
"""Characters."""
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def request_grammar(
    body: Sampling,
    tokenizer: Tokenizer,
    format: ToolFormat | None = None,
    thinking: ReasoningStart = ReasoningStart.NEVER,
) -> str | None:
    """Return the grammar of the answer; None if any text is allowed. Raises ApiError for a schema that is too large.

    format: of tool calls; None if there are no tools to call. thinking: the reasoning before the
    answer is free.
    """
    _check_size(body)
    rules = [] if body.constraint is None else _answer_rules(body.constraint, tokenizer)
    alternatives = ["answer"] if rules else []
    if format is not None and (body.must_call or rules):
        rules += _call_rules(body, tokenizer, format)
        alternatives = ["calls"] if body.must_call else [*alternatives, "calls"]
    if not alternatives:
        return None
    if body.allowed_token_ids is not None:
        message = "allowed_token_ids cannot be combined with a constrained answer or forced tool calls"
        raise ApiError(400, message, param="allowed_token_ids")
    begin, thinking_rules = _thinking_rules(tokenizer, thinking)
    grammar = "\n".join([f"start: {begin} final", f"final: {' | '.join(alternatives)}", *thinking_rules, *rules])
    if len(grammar) > MAX_GRAMMAR:
        raise _too_large(len(grammar))
    return grammar


def _check_size(body: Sampling) -> None:
    """Refuse schemas that are too large before any work on them."""
    constraint = body.constraint or Constraint()
    tag = constraint.structural_tag
    schemas: list[Any] = [constraint.json_schema, *(one.definition for one in (tag.structures if tag else ()))]
    schemas += [tool.function.parameters for tool in body.callable_tools]
    size = sum(len(json.dumps(schema)) for schema in schemas if schema is not None)
    if size > MAX_GRAMMAR:
        raise _too_large(size)


def _too_large(size: int) -> ApiError:
    return ApiError(400, f"The schemas make a grammar of {size} characters; at most {MAX_GRAMMAR} are allowed.")


def _thinking_rules(tokenizer: Tokenizer, thinking: ReasoningStart) -> tuple[str, list[str]]:
    """Return the expression of the reasoning, with the line breaks that follow it, and its rules."""
    if thinking is ReasoningStart.NEVER:
        return "", []
    begin, end = (tokenizer.token_id(mark) for mark in (BEGIN, END))
    any_text, line_breaks = "/(.|\\n)*/", "line_breaks: /\\n+/"
    if end is None:
        thought = [f"thought[suffix={json.dumps(END)}]: {any_text}"]
    else:
        thought = [f"thought: thought_text <[{end}]>", f"thought_text: {any_text}"]
    whole = "thought line_breaks?"
    return f"(<[{begin}]> {whole})?" if thinking is ReasoningStart.OPTIONAL else whole, [*thought, line_breaks]


def _answer_rules(constraint: Constraint, tokenizer: Tokenizer) -> list[str]:
    """Return the rules of an answer that follows `constraint`, the first of them named `answer`."""
    match constraint:
        case Constraint(regex=str(regex)):
            return [f"answer: /{regex_to_lark(regex, '')}/"]
        case Constraint(grammar=str(grammar)):
            return [f"answer: %lark {{\n{_lark(grammar)}\n}}"]
        case Constraint(choices=[*choices]):
            return [f"answer: {' | '.join(_quoted(choice) for choice in choices)}"]
        case Constraint(structural_tag=StructuralTag() as tag):
            return _tag_rules(tag, tokenizer)
    assert constraint.json_schema is not None
    return [f"answer: {_json_rule(constraint.json_schema)}"]


def _json_rule(schema: Schema) -> str:
    try:
        return json_rule(schema)
    except ValueError as e:
        raise ApiError(400, f"the schema: {e}", code="invalid_grammar") from e


def _lark(grammar: str) -> str:
    """Return a grammar of the request, which may be in GBNF, in Lark's format."""
    try:
        return any_to_lark(grammar)
    except Exception as e:  # the library raises no other class
        raise ApiError(400, f"the grammar: expected Lark or GBNF: {e}", code="invalid_grammar") from e


def _tag_rules(tag: StructuralTag, tokenizer: Tokenizer) -> list[str]:
    """Return the rules of free text with structures in it.

    A lazy terminal ends where its trigger is written first, so that the rest of the structure must follow.
    """
    names = [f"tag_{i}" for i in range(len(tag.structures))]
    rules = [f"answer: ({' | '.join(names)})* free_text", "free_text: FREE_TEXT", "FREE_TEXT: /(.|\\n)*/"]
    for name, structure in zip(names, tag.structures, strict=True):
        trigger = tag.trigger_of(structure)
        assert trigger is not None, "checked by StructuralTag"
        id, rest = tokenizer.token_id(trigger), structure.begin.removeprefix(trigger)
        if id is None:
            rules.append(f"{name}_trigger[lazy]: FREE_TEXT {_quoted(trigger)}")
            begin = f"{name}_trigger"
        else:
            begin = f"FREE_TEXT <[{id}]>"
        parts = [begin, *(_quoted(rest) for _ in rest[:1]), _json_rule(structure.definition)]
        rules.append(f"{name}: {' '.join([*parts, *(_quoted(structure.end) for _ in structure.end[:1])])}")
    return rules


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _call_rules(body: Sampling, tokenizer: Tokenizer, format: ToolFormat) -> list[str]:
    # Each tool's schema is a rule of its own, because its references begin at its root.
    tools = body.callable_tools
    any_call = " | ".join(f"call_{i}" for i in range(len(tools)))
    begin_calls, between, end_call, end_calls = (
        _literal(text, tokenizer, format)
        for text in (format.BEGIN_CALLS, format.BETWEEN, format.END_CALL, format.END_CALLS)
    )
    more_calls = f"({between} call)*" if body.may_call_several else ""
    rules = [f"calls: {begin_calls} call {more_calls} {end_calls}", f"call: {any_call}"]
    for i, tool in enumerate(tools):
        parts = (part % {"name": tool.function.name} for part in format.BEGIN_CALL.split(NUMBER))
        begin = " /[0-9]{1,4}/ ".join(_literal(part, tokenizer, format) for part in parts)
        rules.append(f"call_{i}: {begin} arguments_{i} {end_call}")
        try:
            rules += format.argument_rules(f"arguments_{i}", _parameters(tool))
        except ValueError as e:
            raise ApiError(400, f"tools: the parameters of {tool.function.name}: {e}", param="tools") from e
    return rules


def _literal(text: str, tokenizer: Tokenizer, format: ToolFormat) -> str:
    """Return the expression for a text. Marks that are tokens of the model must be named by their ids: llguidance takes
    tokens in angle brackets for special ones, which are no text to it.
    """
    ids = {mark: tokenizer.token_id(mark) for mark in format.MARKS}
    marks = [mark for mark, id in ids.items() if id is not None]
    pieces = re.split(f"({'|'.join(map(re.escape, marks))})", text) if marks else [text]
    return " ".join(f"<[{ids[piece]}]>" if piece in marks else json.dumps(piece) for piece in pieces if piece)


def _parameters(tool: Tool) -> dict[str, Any]:
    schema = _NO_PARAMETERS if tool.function.parameters is None else tool.function.parameters
    if schema.get("type", "object") != "object":
        raise ApiError(400, f"tools: the parameters of {tool.function.name} must have type object", param="tools")
    return {"type": "object"} | schema
