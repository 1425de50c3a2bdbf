"""The reasoning and the tool calls of Gemma 4, however tokens cut them, and the ends of its turns."""

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from tiny import make_tokenizer

from tilerank.loader.chat.template import GEMMA_THINK, ReasoningStart, thinking_after
from tilerank.loader.tokenizer import Tokenizer
from tilerank.runtime.server.chat.reasoning import ReasoningSplitter, Text
from tilerank.runtime.server.chat.tools.calls import Piece, ToolCall
from tilerank.runtime.server.chat.tools.gemma4 import Gemma4Format
from tilerank.runtime.server.chat.tools.parser import ToolParser

SCHEMAS: dict[str, dict[str, Any]] = {"weather": {"type": "object"}, "stop": {"type": "object"}}
ARGUMENTS = {
    "city": 'S\u00e3o "Paulo", {x}: [1]',
    "days": [1, -2.5, True, None],
    "near": {"deep": {"a": "", "b": []}},
    "n": 3,
}


def split(text: str, thinking: ReasoningStart, *cuts: int) -> Text:
    splitter, found = ReasoningSplitter(thinking, GEMMA_THINK), Text()
    for begin, end in zip((0, *cuts), (*cuts, len(text)), strict=True):
        found += splitter.push(text[begin:end])
    return found + splitter.flush()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|channel>thought\nWhy?\nSo.<channel|>It is", Text("Why?\nSo.", "It is")),
        ("<|channel>thought<channel|>b", Text("", "b")),
        ("<|channel>thoughts\na<channel|>b", Text("thoughts\na", "b")),
        ("thought\nis text", Text("", "thought\nis text")),
    ],
)
def test_the_label_of_the_reasoning_is_no_part_of_it(text: str, expected: Text) -> None:
    for cuts in combinations(range(len(text) + 1), 2):
        assert split(text, ReasoningStart.OPTIONAL, *cuts) == expected


def test_a_prompt_with_an_empty_thought_turns_the_reasoning_off() -> None:
    turn = "<turn|>\n<|turn>model\n"
    assert thinking_after(turn, GEMMA_THINK) is ReasoningStart.OPTIONAL
    assert thinking_after(f"{turn}<|channel>thought\n<channel|>", GEMMA_THINK) is ReasoningStart.NEVER
    assert thinking_after(f"{turn}<|channel>thought\n", GEMMA_THINK) is ReasoningStart.OPENED


def read(text: str, *cuts: int) -> list[Any]:
    parser = ToolParser(Gemma4Format(), SCHEMAS)
    pieces: list[Piece] = []
    for begin, end in zip((0, *cuts), (*cuts, len(text)), strict=True):
        pieces += parser.push(text[begin:end])
    pieces += parser.flush(cut=False)
    found: list[Any] = []
    for piece in pieces:
        if isinstance(piece, ToolCall):
            found.append((piece.name, json.loads(piece.arguments)))
        elif found and isinstance(found[-1], str) and isinstance(piece, str):
            found[-1] += piece
        else:
            found.append(piece)
    return found


def test_calls_are_read_wherever_the_text_is_cut() -> None:
    text = "Look: " + Gemma4Format().write([("weather", ARGUMENTS), ("stop", {})])
    assert text.startswith(
        'Look: <|tool_call>call:weather{city:<|"|>S\u00e3o "Paulo", {x}: [1]<|"|>,days:[1,-2.5,true,null],n:3'
    )
    for cut in range(len(text) + 1):
        begin, *calls = read(text, cut)
        assert (begin.strip(), calls) == ("Look:", [("weather", ARGUMENTS), ("stop", {})]), cut


@pytest.mark.parametrize(
    "text",
    [
        "<|tool_call>call:unknown{}<tool_call|>",
        '<|tool_call>call:weather{a:<|"|>no end',
        "<|tool_call>call:weather{a:b c}<tool_call|>",
        "<|tool_call>call:weather{a:1 b:2}<tool_call|>",
        "<|tool_call>call:weather{a:" + "[" * 100 + "<tool_call|>",
    ],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    assert read(text) == [text]


def test_a_turn_ends_before_the_result_of_a_tool(tmp_path: Path) -> None:
    """Older files list neither this end nor that of the turn."""
    tokenizer = Tokenizer(make_tokenizer("gemma4", tmp_path / "gemma4"))
    ends = tokenizer.end_token_ids("<turn|>\n")
    assert [tokenizer.token_id(mark) for mark in ("<eos>", "<turn|>", "<|tool_response>")] == list(ends)
