"""Reasoning is separated from answers, however tokens cut the marks; stop strings and grammars apply to the answer."""

from itertools import combinations
from pathlib import Path

import pytest
from command import DEMO
from hypothesis import given, settings
from hypothesis import strategies as st
from media_files import DEMO_VL

from tilerank.loader.chat.template import THINK, ReasoningStart, thinking_after
from tilerank.loader.tokenizer import Tokenizer
from tilerank.runtime.protocol.grammar import Vocabulary, allowed_tokens
from tilerank.runtime.server.chat.grammars import request_grammar
from tilerank.runtime.server.chat.marked import MarkedFormat
from tilerank.runtime.server.chat.reasoning import ReasoningSplitter, Text
from tilerank.runtime.server.chat.request import ChatCompletion
from tilerank.runtime.server.chat.text import StopStrings, TextStream
from tilerank.runtime.server.chat.tools.objects import HermesFormat

MARKS_ARE_TEXT, MARKS_ARE_TOKENS = Tokenizer(DEMO), Tokenizer(DEMO_VL)


def split(thinking: ReasoningStart, pieces: list[str]) -> Text:
    splitter = ReasoningSplitter(thinking)
    found = Text()
    for piece in pieces:
        found += splitter.push(piece)
    return found + splitter.flush()


CASES = [
    (
        ReasoningStart.OPTIONAL,
        "<think>\nWhy </thin?\n\nSo.\n</think>\n\n  It is",
        Text("Why </thin?\n\nSo.", "  It is"),
    ),
    (ReasoningStart.OPTIONAL, "\n <think>a</think>b", Text("a", "b")),
    (ReasoningStart.OPTIONAL, "<think>\n\n</think>\n\nb", Text("", "b")),
    (ReasoningStart.OPTIONAL, "<thin> is no mark", Text("", "<thin> is no mark")),
    (ReasoningStart.OPTIONAL, "\n\nso <think>b</think>", Text("", "\n\nso <think>b</think>")),
    (ReasoningStart.OPTIONAL, "<think>cut off </th", Text("cut off </th", "")),
    (ReasoningStart.OPTIONAL, "<thi", Text("", "<thi")),
    (ReasoningStart.OPENED, "Why\n</think>\n\nb\n</think>", Text("Why", "b\n</think>")),
    (ReasoningStart.OPENED, "</think>b", Text("", "b")),
    (ReasoningStart.OPENED, "\nno end\n", Text("no end", "")),
    (ReasoningStart.NEVER, "<think>a</think>b", Text("", "<think>a</think>b")),
]


@pytest.mark.parametrize(("thinking", "text", "expected"), CASES)
def test_marks_are_found_wherever_the_text_is_cut(thinking: ReasoningStart, text: str, expected: Text) -> None:
    """All cuts into at most three pieces, and single characters."""
    for i, j in combinations(range(len(text) + 1), 2):
        assert split(thinking, [text[:i], text[i:j], text[j:]]) == expected
    assert split(thinking, list(text)) == expected


@settings(deadline=None)
@given(st.sampled_from(ReasoningStart), st.text("<think>/\n a", max_size=40), st.lists(st.integers(1, 5), min_size=1))
def test_no_text_is_lost(thinking: ReasoningStart, text: str, sizes: list[int]) -> None:
    """Only marks and line breaks are left out, and cuts change nothing."""
    pieces, at = [], 0
    for size in sizes:
        pieces.append(text[at : at + size])
        at += size
    found = split(thinking, [*pieces, text[at:]])
    assert found == split(thinking, [text])

    def bare(text: str) -> str:
        return text.replace("<think>", "", thinking is ReasoningStart.OPTIONAL).replace("</think>", "", 1)

    if thinking is ReasoningStart.NEVER:
        assert found == Text(answer=text)
    elif found.reasoning:
        assert "".join((found.reasoning + found.answer).split()) == "".join(bare(text).split())


def test_reasoning_is_shown_as_soon_as_it_is_certain() -> None:
    splitter = ReasoningSplitter(ReasoningStart.OPTIONAL)
    pushed = [splitter.push(text) for text in ("<think>", "\nWhy", " </t", "his\n", "not", "</", "think>", "\n", "\nb")]
    assert pushed == [
        Text(),
        Text("Why"),
        Text(" "),
        Text("</this"),
        Text("\nnot"),
        Text(),
        Text(),
        Text(),
        Text("", "b"),
    ]


@pytest.mark.parametrize(
    ("prompt", "of_tokens", "of_text"),
    [
        ("<|im_start|>assistant\n", ReasoningStart.OPTIONAL, ReasoningStart.NEVER),
        ("<|im_start|>assistant\n<think>\n", ReasoningStart.OPENED, ReasoningStart.OPENED),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", ReasoningStart.NEVER, ReasoningStart.NEVER),
        ("<｜Assistant｜><think>", ReasoningStart.OPENED, ReasoningStart.OPENED),
        ("<｜Assistant｜></think>", ReasoningStart.NEVER, ReasoningStart.NEVER),
        ("What does <think> mean?<|im_end|>\n", ReasoningStart.OPTIONAL, ReasoningStart.NEVER),
    ],
)
def test_the_end_of_the_prompt_decides(prompt: str, of_tokens: ReasoningStart, of_text: ReasoningStart) -> None:
    assert thinking_after(prompt, THINK) == of_tokens
    assert thinking_after(prompt, None) == of_text


@pytest.mark.parametrize("tokenizer", [MARKS_ARE_TEXT, MARKS_ARE_TOKENS], ids=["marks are text", "marks are tokens"])
def test_a_stop_string_ends_the_answer_only(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<think>\none two\n</think>\n\none two three", add_special_tokens=False)
    inside = tokenizer.encode("<think>\none two\n</think>", add_special_tokens=False)
    stops = StopStrings(["two"])
    stream, found = TextStream(tokenizer.stream(), stops, ReasoningStart.OPTIONAL), Text()
    for id in ids:
        found += stream.push(id)
        if stops.stopped:
            break
    assert stops.stopped and found == Text("one two", "one ")
    # The marks are tokens, or the first one is known with its last token.
    first = len(tokenizer.encode("<think>", add_special_tokens=False))
    assert stream.reasoning_tokens == len(inside) - first + 1


FORMATS = [
    ({"guided_regex": "yes|no"}, "yes", "maybe"),
    ({"response_format": {"type": "json_object"}}, '{"a": 1}', "a"),
    (
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"},
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
        "yes",
    ),
]


@pytest.mark.parametrize(
    ("model", "thinking", "reasoning"),
    [
        (DEMO_VL, ReasoningStart.OPTIONAL, "<think>\nWhy {not}?\n\n</think>\n\n"),
        (DEMO_VL, ReasoningStart.OPTIONAL, ""),
        (DEMO_VL, ReasoningStart.OPENED, "\nWhy\n</think>"),
        (DEMO_VL, ReasoningStart.OPENED, "</think>\n\n"),
        (DEMO, ReasoningStart.OPENED, "Why </thin\n</think>\n"),
        (DEMO, ReasoningStart.NEVER, ""),
    ],
)
@pytest.mark.parametrize(("fields", "good", "bad"), FORMATS)
def test_a_grammar_begins_after_the_reasoning(
    model: Path, thinking: ReasoningStart, reasoning: str, fields: dict[str, object], good: str, bad: str
) -> None:
    tokenizer = Tokenizer(model)
    body = ChatCompletion.model_validate({"messages": [{"role": "user", "content": "a"}]} | fields)
    grammar = request_grammar(body, tokenizer, MarkedFormat(HermesFormat()), thinking)
    assert grammar is not None

    def follows(text: str) -> bool:
        matcher = Vocabulary(model).matcher(grammar)
        for id in tokenizer.encode(text, add_special_tokens=False):
            if matcher.is_stopped() or not allowed_tokens(matcher)[id // 8] >> id % 8 & 1:
                return False
            matcher.consume_token(id)
        return bool(matcher.is_accepting())

    assert follows(reasoning + good)
    assert not follows(reasoning + bad)
    if thinking is ReasoningStart.OPENED:
        assert not follows(good)  # the reasoning must end first
