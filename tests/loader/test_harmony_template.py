"""Conversations in harmony equal those of openai-harmony, and no content becomes a special token."""

from pathlib import Path
from typing import Any

import pytest

from tests.loader.harmony_chats import CHATS, DATE, TEXTS, call, make_harmony_model
from tilerank.loader.chat.jinja import JinjaTemplate
from tilerank.loader.chat.template import ReasoningStart
from tilerank.loader.errors import TokenizerError
from tilerank.loader.harmony.marks import CALL, END, RETURN, START
from tilerank.loader.harmony.template import HarmonyTemplate
from tilerank.loader.tokenizer import Tokenizer


def rendered(messages: list[dict[str, Any]], **variables: Any) -> Any:
    turns = [{"content": "", **message} for message in messages]
    options: dict[str, Any] = {"current_date": DATE, "add_generation_prompt": True} | variables
    return HarmonyTemplate().render(turns, **options)


@pytest.mark.parametrize("name", CHATS)
def test_conversations_equal_openai_harmony(name: str) -> None:
    messages, variables = CHATS[name]
    assert rendered(messages, **variables).text == TEXTS[name]


def test_contents_never_become_special_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer(make_harmony_model(tmp_path / "model"))
    name = "text that looks like marks"
    found = rendered(*CHATS[name][:1], **CHATS[name][1])
    ids = tokenizer.encode_segments(found.segments)
    assert "".join(tokenizer.special_token(id) or tokenizer.decode([id]) for id in ids) == TEXTS[name]
    # By hand: a message of the system and one of the user, and the beginning of the assistant's.
    assert [[tokenizer.special_token(id) for id in ids].count(mark) for mark in (START, END, CALL)] == [3, 2, 0]
    assert tokenizer.token_id(START) in tokenizer.encode(START)  # other texts are as before


def test_the_reasoning_of_finished_turns_is_dropped() -> None:
    """Of these alone: a round of tools goes on with what the model has thought."""
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "thinking": "one", "content": "x"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "reasoning_content": "two", "tool_calls": [call("", "now", "{}")]},
        {"role": "tool", "content": "noon"},
        {"role": "assistant", "reasoning": "three", "content": "y"},
    ]
    text = rendered(turns).text
    assert [word in text for word in ("one", "two", "three")] == [False, True, True]
    text = rendered([*turns, {"role": "user", "content": "c"}]).text
    assert [word in text for word in ("one", "two", "three")] == [False, False, False]


def test_the_last_message_is_continued() -> None:
    options = {"add_generation_prompt": False, "continue_final_message": True}
    turn = {"role": "assistant", "content": "It is", "reasoning": "So."}
    found = rendered([{"role": "user", "content": "a"}, turn], **options)
    assert found.text.endswith("So.<|end|><|start|>assistant<|channel|>final<|message|>It is")
    assert found.thinking is ReasoningStart.NEVER
    found = rendered([{"role": "user", "content": "a"}, turn | {"content": ""}], **options)
    assert found.text.endswith("<|start|>assistant<|channel|>analysis<|message|>So.")
    assert found.thinking is ReasoningStart.OPENED


@pytest.mark.parametrize(
    ("messages", "variables", "sentence"),
    [
        ([{"role": "function"}], {}, "messages.0.role: expected system, developer, user, assistant or tool, found"),
        ([{"role": "tool", "tool_call_id": "x"}], {}, "messages.0.tool_call_id: expected the id of an earlier call"),
        ([{"role": "user"}], {"reasoning_effort": "max"}, "reasoning_effort: expected low, medium, high, found 'max'"),
        ([{"role": "user"}], {"current_date": "June"}, "current_date: expected a date as YYYY-MM-DD, found 'June'"),
        (
            [{"role": "assistant", "tool_calls": [call("a", "now", "")]}],
            {"continue_final_message": True},
            "continue_final_message: expected a last message without calls",
        ),
    ],
)
def test_refusals(messages: list[dict[str, Any]], variables: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TokenizerError) as caught:
        rendered(messages, **variables)
    assert sentence in str(caught.value) and caught.value.__cause__ is not None


def test_a_nested_schema_is_an_error_of_the_template() -> None:
    schema: dict[str, Any] = {}
    for _ in range(5000):
        schema = {"type": "array", "items": schema}
    with pytest.raises(TokenizerError, match="recursion"):
        rendered([{"role": "user"}], tools=[{"function": {"name": "f", "parameters": schema}}])


def test_ends_and_templates_of_directories(tmp_path: Path) -> None:
    """<|call|> ends a turn though the files leave it out, <|end|> ends none. A directory may have another format."""
    model = make_harmony_model(tmp_path / "model")
    tokenizer = Tokenizer(model)
    ends = tokenizer.end_token_ids(tokenizer.chat_template.after_answer)
    assert [tokenizer.special_token(id) for id in ends] == [RETURN, CALL]
    (model / "chat_template.jinja").write_text("{{ '<|channel|>' }}")
    assert isinstance(Tokenizer(model).chat_template, HarmonyTemplate)
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert isinstance(Tokenizer(model).chat_template, JinjaTemplate)
