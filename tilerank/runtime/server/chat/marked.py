"""Answers with marks in their text, such as <think> and </think> around the reasoning, and tool calls in the model's
format."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial

from tilerank.loader.chat.template import THINK, ReasoningStart
from tilerank.loader.tokenizer import Tokenizer

from ..http.errors import ApiError
from .answer_format import AnswerFormat, AnswerReader, Part
from .reasoning import Text
from .references import Schema
from .request import Sampling
from .text import StopStrings, TextStream
from .tools.format import NUMBER, ToolFormat
from .tools.parser import ToolParser


class MarkedReader(AnswerReader):
    """Reads an answer with marks.

    parser: finds tool calls; None if there are no tools to call. call_marks: the marks of calls. These and the marks of
    the reasoning stay in the text where they are special tokens, as in Mistral's vocabularies.
    """

    def __init__(
        self,
        body: Sampling,
        tokenizer: Tokenizer,
        thinking: ReasoningStart = ReasoningStart.NEVER,
        parser: ToolParser | None = None,
        call_marks: Sequence[str] = (),
    ) -> None:
        marks = tokenizer.reasoning_marks or THINK
        shown = (*call_marks, *(() if thinking is ReasoningStart.NEVER else marks[:2]))
        stream = tokenizer.stream(special=not body.skip_special_tokens, marks=shown)
        self.stops = StopStrings(body.stop_strings, body.min_tokens, body.keeps_stop)
        self._text = TextStream(stream, self.stops, thinking, marks)
        self._parser = parser

    @property
    def reasoning_tokens(self) -> int:
        return self._text.reasoning_tokens

    def push(self, token_id: int) -> Part:
        text = self._text.push(token_id)
        if self._parser is None:
            return Part(text.reasoning, (text.answer,) if text.answer else ())
        return Part(text.reasoning, tuple(self._parser.push(text.answer)))

    def flush(self, cut: bool) -> Part:
        text = Text() if self.stops.stopped else self._text.flush()
        if self._parser is None:
            return Part(text.reasoning, (text.answer,) if text.answer else ())
        return Part(text.reasoning, (*self._parser.push(text.answer), *self._parser.flush(cut)))


class MarkedFormat(AnswerFormat):
    """The format of models whose chat template writes marks. tool_format: of calls; None if it is unknown."""

    def __init__(self, tool_format: ToolFormat | None) -> None:
        self.takes_tools = tool_format is not None
        self.tool_format = tool_format

    def new_reader(
        self, body: Sampling, tokenizer: Tokenizer, thinking: ReasoningStart, schemas: Mapping[str, Schema]
    ) -> AnswerReader:
        if self.tool_format is None or not schemas:
            return MarkedReader(body, tokenizer, thinking)
        parser = ToolParser(self.tool_format, schemas)
        return MarkedReader(body, tokenizer, thinking, parser, self.tool_format.MARKS)

    def call_rules(self, body: Sampling, tokenizer: Tokenizer) -> list[str]:
        # Each tool's schema is a rule of its own, because its references begin at its root.
        format, tools = self.tool_format, body.callable_tools
        assert format is not None, "there are no tools to call"
        literal = partial(_literal, tokenizer=tokenizer, format=format)
        any_call = " | ".join(f"call_{i}" for i in range(len(tools)))
        begin_calls, between, end_call, end_calls = (
            literal(text) for text in (format.BEGIN_CALLS, format.BETWEEN, format.END_CALL, format.END_CALLS)
        )
        more_calls = f"({between} call)*" if body.may_call_several else ""
        rules = [f"calls: {begin_calls} call {more_calls} {end_calls}", f"call: {any_call}"]
        for i, tool in enumerate(tools):
            parts = (part % {"name": tool.function.name} for part in format.BEGIN_CALL.split(NUMBER))
            begin = f" /{format.NUMBERS}/ ".join(literal(part) for part in parts)
            rules.append(f"call_{i}: {begin} arguments_{i} {end_call}")
            try:
                rules += format.argument_rules(f"arguments_{i}", tool.function.arguments_schema, literal)
            except ValueError as e:
                message = f"tools: the parameters of {tool.function.name}: {e}"
                raise ApiError(400, message, param="tools") from e
        return rules

    def frame_rules(self, constrained: Sequence[str], tokenizer: Tokenizer, thinking: ReasoningStart) -> list[str]:
        begin, rules = _thinking_rules(tokenizer, thinking)
        return [f"start: {begin} final", f"final: {' | '.join(constrained)}", *rules]


PLAIN_TEXT = MarkedFormat(None)
"""The format of answers that are all text."""


def _thinking_rules(tokenizer: Tokenizer, thinking: ReasoningStart) -> tuple[str, list[str]]:
    """Return the expression of the reasoning, with the line breaks that follow it, and its rules."""
    if thinking is ReasoningStart.NEVER:
        return "", []
    marks = tokenizer.reasoning_marks or THINK
    begin, end = map(tokenizer.token_id, marks[:2])
    any_text, line_breaks = "/(.|\\n)*/", "line_breaks: /\\n+/"
    if end is None:
        thought = [f"thought[suffix={json.dumps(marks.end)}]: {any_text}"]
    else:
        thought = [f"thought: thought_text <[{end}]>", f"thought_text: {any_text}"]
    whole = "thought line_breaks?"
    return f"(<[{begin}]> {whole})?" if thinking is ReasoningStart.OPTIONAL else whole, [*thought, line_breaks]


def _literal(text: str, tokenizer: Tokenizer, format: ToolFormat) -> str:
    """Return the expression for a text. Marks that are tokens of the model must be named by their ids: llguidance takes
    tokens in angle brackets for special ones, which are no text to it.
    """
    ids = {mark: tokenizer.token_id(mark) for mark in format.MARKS}
    marks = [mark for mark, id in ids.items() if id is not None]
    pieces = re.split(f"({'|'.join(map(re.escape, marks))})", text) if marks else [text]
    return " ".join(f"<[{ids[piece]}]>" if piece in marks else json.dumps(piece) for piece in pieces if piece)
