"""The format of answers in harmony."""

from collections.abc import Mapping, Sequence

from tilerank.loader.chat.template import ReasoningStart
from tilerank.loader.harmony.marks import (
    ANALYSIS,
    CHANNEL,
    COMMENTARY,
    CONSTRAIN,
    END,
    FINAL,
    FUNCTIONS,
    MESSAGE,
    START,
)
from tilerank.loader.tokenizer import Tokenizer

from ...http.errors import ApiError
from ..answer_format import AnswerFormat, AnswerReader
from ..references import Schema
from ..request import Sampling
from ..schemas import json_rule
from .reader import HarmonyReader


class HarmonyFormat(AnswerFormat):
    """Messages in channels: the reasoning, texts before calls, then a call or the answer."""

    takes_tools = True

    def new_reader(
        self, body: Sampling, tokenizer: Tokenizer, thinking: ReasoningStart, schemas: Mapping[str, Schema]
    ) -> AnswerReader:
        return HarmonyReader(body, tokenizer, thinking, schemas.keys())

    def call_rules(self, body: Sampling, tokenizer: Tokenizer) -> list[str]:
        """Calls come one at a time: the model gets the result of one before it writes the next."""
        tools = body.callable_tools
        channel, message = (_mark(mark, tokenizer) for mark in (CHANNEL, MESSAGE))
        rules = [
            f"calls: {' | '.join(f'call_{i}' for i in range(len(tools)))}",
            f'content_type: " "? {_mark(CONSTRAIN, tokenizer)} "json" | " json"',
        ]
        for i, tool in enumerate(tools):
            to = f"to={FUNCTIONS}{tool.function.name}"
            header = f'({channel} "{COMMENTARY} {to}" | " {to}" {channel} "{COMMENTARY}") content_type?'
            rules.append(f"call_{i}: {header} {message} arguments_{i}")
            try:
                rules.append(f"arguments_{i}: {json_rule(tool.function.arguments_schema)}")
            except ValueError as e:
                text = f"tools: the parameters of {tool.function.name}: {e}"
                raise ApiError(400, text, param="tools") from e
        return rules

    def frame_rules(self, constrained: Sequence[str], tokenizer: Tokenizer, thinking: ReasoningStart) -> list[str]:
        """Text before a call is left out where the answer is constrained, because it would be a part of the answer."""
        start, channel, constrain, message, end = (
            _mark(mark, tokenizer) for mark in (START, CHANNEL, CONSTRAIN, MESSAGE, END)
        )
        channels = f'"{ANALYSIS}"' if "answer" in constrained else f'("{ANALYSIS}" | "{COMMENTARY}")'
        final = f'{channel} "{FINAL}" (" "? {constrain} "json")? {message} answer'
        begins = {
            ReasoningStart.OPTIONAL: "before* last",
            ReasoningStart.OPENED: "rest before* last",
            ReasoningStart.NEVER: "answer" if "answer" in constrained else "rest before* last",
        }
        return [
            f"start: {begins[thinking]}",
            f"before: {channel} {channels} {message} rest",
            f'rest: any_text {end} {start} "assistant"',
            "any_text: /(.|\\n)*/",
            f"last: {' | '.join(final if one == 'answer' else one for one in constrained)}",
        ]


def _mark(mark: str, tokenizer: Tokenizer) -> str:
    """Return the expression for a special token."""
    return f"<[{tokenizer.token_id(mark)}]>"
