"""Builds the grammar of a request (protocol/grammar.py) from what its answer must follow, and from its tools."""

import json
from typing import Any

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from tilerank.loader.chat.template import ReasoningStart
from tilerank.loader.tokenizer import Tokenizer

from ..http.errors import ApiError
from .answer_format import AnswerFormat
from .marked import PLAIN_TEXT
from .references import Schema
from .request import Sampling
from .schemas import json_rule
from .structured import Constraint, StructuralTag

MAX_GRAMMAR = 128 << 10
"""Characters."""


def request_grammar(
    body: Sampling,
    tokenizer: Tokenizer,
    format: AnswerFormat = PLAIN_TEXT,
    thinking: ReasoningStart = ReasoningStart.NEVER,
) -> str | None:
    """Return the grammar of the answer; None if any text is allowed. Raises ApiError for a schema that is too large.

    thinking: the reasoning before the answer is free.
    """
    _check_size(body)
    rules = [] if body.constraint is None else _answer_rules(body.constraint, tokenizer)
    constrained = ["answer"] if rules else []
    if body.callable_tools and (body.must_call or rules):
        rules += format.call_rules(body, tokenizer)
        constrained = ["calls"] if body.must_call else [*constrained, "calls"]
    if not constrained:
        return None
    if body.allowed_token_ids is not None:
        message = "allowed_token_ids cannot be combined with a constrained answer or forced tool calls"
        raise ApiError(400, message, param="allowed_token_ids")
    grammar = "\n".join([*format.frame_rules(constrained, tokenizer, thinking), *rules])
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
