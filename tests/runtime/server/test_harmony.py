"""Answers in harmony: channels become reasoning, text and calls, whatever the model writes."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.loader.harmony_chats import DATE, NOW, WEATHER, make_harmony_model
from tests.runtime.server.scripted import Server, run
from tilerank.loader.chat.template import ReasoningStart
from tilerank.loader.harmony.marks import CALL, CHANNEL, CONSTRAIN, END, MARKS, MESSAGE, RETURN, START
from tilerank.loader.tokenizer import Tokenizer
from tilerank.runtime.protocol.grammar import Vocabulary, allowed_tokens
from tilerank.runtime.server.chat.answer_format import Part
from tilerank.runtime.server.chat.grammars import request_grammar
from tilerank.runtime.server.chat.harmony.format import HarmonyFormat
from tilerank.runtime.server.chat.harmony.reader import HarmonyReader
from tilerank.runtime.server.chat.request import ChatCompletion
from tilerank.runtime.server.chat.tools.calls import MoreArguments, ToolCall

ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"
FINAL = f"{CHANNEL}final{MESSAGE}"
NEXT = f"{END}{START}assistant"
USER = {"role": "user", "content": "Who?"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_harmony_model(tmp_path_factory.mktemp("harmony") / "model")


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer(model)


def chat(**fields: Any) -> ChatCompletion:
    return ChatCompletion.model_validate({"messages": [USER]} | fields)


def read(
    tokenizer: Tokenizer,
    text: str,
    thinking: ReasoningStart = ReasoningStart.OPTIONAL,
    cut: bool = False,
    **fields: Any,
) -> tuple[str, str, list[tuple[str, str]]]:
    """Return the reasoning, the text and the calls of an answer."""
    reader = HarmonyReader(chat(**fields), tokenizer, thinking, {"now", "get_weather"})
    part = Part()
    for id in tokenizer.encode(text, add_special_tokens=False):
        part += reader.push(id)
        if reader.stops.stopped:
            break
    part += reader.flush(cut)
    said, calls = "", list[tuple[str, str]]()
    for piece in part.pieces:
        match piece:
            case ToolCall(name, arguments):
                calls.append((name, arguments))
            case MoreArguments(more):
                calls[-1] = (calls[-1][0], calls[-1][1] + more)
            case _:
                said += piece
    return part.reasoning, said, calls


ROME = '{"city": "Rome"}'
WEATHER_CALL = [("get_weather", ROME)]
ANSWERS = {
    "an answer": (f"{ANALYSIS}Why?{NEXT}{FINAL}Köln 🙂.{RETURN}", ("Why?", "Köln 🙂.", [])),
    "a call": (
        f"{ANALYSIS}Why?{NEXT}{CHANNEL}commentary to=functions.get_weather {CONSTRAIN}json{MESSAGE}{ROME}{CALL}",
        ("Why?", "", WEATHER_CALL),
    ),
    "a recipient in the role": (
        f" to=functions.get_weather{CHANNEL}commentary json{MESSAGE}{ROME}",
        ("", "", WEATHER_CALL),
    ),
    "a later recipient in the role": (
        f"{ANALYSIS}a{NEXT} to=functions.get_weather{CHANNEL}commentary{MESSAGE}{ROME}",
        ("a", "", WEATHER_CALL),
    ),
    "a call in analysis": (
        f"{CHANNEL}analysis to=functions.get_weather code{MESSAGE}{ROME}{CALL}",
        ("", "", WEATHER_CALL),
    ),
    "no space before the type": (
        f"{CHANNEL}commentary to=get_weather{CONSTRAIN}json{MESSAGE}{ROME}{CALL}",
        ("", "", WEATHER_CALL),
    ),
    "a call without arguments": (f"{CHANNEL}commentary to=functions.now{MESSAGE} {CALL}", ("", "", [("now", " {}")])),
    "text before a call": (
        f"{CHANNEL}commentary{MESSAGE}I look.{NEXT} to=functions.now{CHANNEL}commentary{MESSAGE}{{}}{CALL}",
        ("", "I look.", [("now", "{}")]),
    ),
    "a type of the answer is no recipient": (f"{CHANNEL}final {CONSTRAIN}json{MESSAGE}{{}}", ("", "{}", [])),
    "texts and reasoning in parts": (
        f"{ANALYSIS}a{NEXT}{CHANNEL}commentary{MESSAGE}b{NEXT}{ANALYSIS}c{NEXT}{FINAL}d",
        ("a\n\nc", "b\n\nd", []),
    ),
    "a stray word after an end": (f"{ANALYSIS}a{END}commentary{START}assistant{FINAL}b", ("a", "b", [])),
    "a header without its start": (f"{ANALYSIS}a{END}assistant{FINAL}b", ("a", "b", [])),
    "a doubled start": (f"{ANALYSIS}a{END}{START}{START}assistant{FINAL}b", ("a", "b", [])),
    "doubled marks": (f"{CHANNEL}{CHANNEL}final{MESSAGE}{MESSAGE}b{CONSTRAIN}c", ("", "bc", [])),
    "no end before a header": (f"{ANALYSIS}a{CHANNEL}final{MESSAGE}b", ("a", "b", [])),
    "a channel as the role": (f"{ANALYSIS}a{END}{START}final{MESSAGE}b", ("a", "b", [])),
    "no channel": (f"{MESSAGE}b", ("", "b", [])),
    "no header": ("It is final.", ("", "It is final.", [])),
    "a word of headers": ("final", ("", "final", [])),
    "no header after the reasoning": (f"{ANALYSIS}a{END}It is", ("a", "It is", [])),
    "a header that is cut": (f"{ANALYSIS}a{NEXT}{CHANNEL}fin", ("a", "", [])),
    "a message of the user": (f"{FINAL}a{END}{START}user{MESSAGE}b{NEXT}{FINAL}c", ("", "a\n\nc", [])),
    "a result": (f"{FINAL}a{END}{START}functions.now to=assistant{CHANNEL}commentary{MESSAGE}b", ("", "a", [])),
    "an unknown tool": (f"{CHANNEL}commentary to=functions.no{MESSAGE}{{}}{CALL}", ("", "{}", [])),
    "a tool of the reasoning": (f"{CHANNEL}analysis to=python code{MESSAGE}1+1{CALL}", ("1+1", "", [])),
    "a header without an end": (f"{CHANNEL}{'a b ' * 100}", ("", " " + "a b " * 100, [])),
    "reasoning that is cut": (f"{ANALYSIS}a", ("a", "", [])),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_answers(tokenizer: Tokenizer, name: str) -> None:
    text, expected = ANSWERS[name]
    assert read(tokenizer, text) == expected


def test_continued_messages_and_stop_strings(tokenizer: Tokenizer) -> None:
    assert read(tokenizer, f"a{NEXT}{FINAL}b", ReasoningStart.OPENED) == ("a", "b", [])
    assert read(tokenizer, "b", ReasoningStart.NEVER) == ("", "b", [])
    assert read(tokenizer, f"{ANALYSIS}a two{NEXT}{FINAL}b two c", stop="two") == ("a two", "b ", [])
    call = f" to=functions.now{CHANNEL}commentary{MESSAGE}"
    assert read(tokenizer, f'{call}{{"a": "two', cut=True, stop="two") == ("", "", [("now", '{"a": "two')])
    assert read(tokenizer, call, cut=True) == ("", "", [("now", "")])


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.sampled_from((*MARKS, "assistant", "final", "analysis", " to=functions.now", " json", "é", "a b", " ")))
)
def test_no_tokens_are_an_error(tokenizer: Tokenizer, parts: list[str]) -> None:
    """Text goes somewhere unless it is a header or not the assistant's."""
    reasoning, said, calls = read(tokenizer, "".join(parts))
    assert "".join([reasoning, said, *(arguments for _, arguments in calls)]).count("é") <= parts.count("é")
    assert not any(mark in said for mark in MARKS)


def allows(model: Path, grammar: str, text: str) -> bool:
    """Does the grammar allow the tokens of this text, and may the answer end there?"""
    matcher = Vocabulary(model).matcher(grammar)
    for id in Tokenizer(model).encode(text, add_special_tokens=False):
        if matcher.is_stopped() or not allowed_tokens(matcher)[id // 8] >> id % 8 & 1:
            return False
        matcher.consume_token(id)
    return bool(matcher.is_accepting())


SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
BOB = '{"name": "Bob"}'


def test_a_schema_binds_the_final_channel_alone(model: Path, tokenizer: Tokenizer) -> None:
    body = chat(guided_json=SCHEMA)
    grammar = request_grammar(body, tokenizer, HarmonyFormat(), ReasoningStart.OPTIONAL) or ""
    assert allows(model, grammar, f"{ANALYSIS}Why {{not}}?\n{NEXT}{FINAL}{BOB}")
    assert allows(model, grammar, f"{CHANNEL}final {CONSTRAIN}json{MESSAGE}{BOB}")
    for wrong in (f"{FINAL}Bob", f"{ANALYSIS}a{NEXT}{CHANNEL}commentary{MESSAGE}I look.{NEXT}{FINAL}{BOB}", BOB):
        assert not allows(model, grammar, wrong)
    opened = request_grammar(body, tokenizer, HarmonyFormat(), ReasoningStart.OPENED) or ""
    assert allows(model, opened, f"since{NEXT}{FINAL}{BOB}")
    assert allows(model, request_grammar(body, tokenizer, HarmonyFormat()) or "", BOB)


def test_forced_calls_have_known_names_and_arguments(model: Path, tokenizer: Tokenizer) -> None:
    body = chat(tools=[NOW, WEATHER], tool_choice="required")
    grammar = request_grammar(body, tokenizer, HarmonyFormat(), ReasoningStart.OPTIONAL) or ""
    thought = f"{ANALYSIS}a{NEXT}{CHANNEL}commentary{MESSAGE}I look.{NEXT}"
    arguments = '{"city": "Rome", "unit": "kelvin"}'
    for header in (f"{CHANNEL}commentary to=functions.%s {CONSTRAIN}json", f" to=functions.%s{CHANNEL}commentary json"):
        assert allows(model, grammar, f"{thought}{header % 'get_weather'}{MESSAGE}{arguments}")
        assert allows(model, grammar, f"{header % 'now'}{MESSAGE}{{}}")
        assert not allows(model, grammar, f"{header % 'browser'}{MESSAGE}{{}}")
        assert not allows(model, grammar, f"{header % 'get_weather'}{MESSAGE}{{}}")
    assert not allows(model, grammar, f"{FINAL}a")
    both = request_grammar(chat(tools=[NOW], guided_json=SCHEMA), tokenizer, HarmonyFormat(), ReasoningStart.OPTIONAL)
    assert allows(model, both or "", f"{FINAL}{BOB}")
    assert allows(model, both or "", f"{CHANNEL}commentary to=functions.now{MESSAGE}{{}}")


CALLED = f"{ANALYSIS}Why?{NEXT}{CHANNEL}commentary to=functions.get_weather {CONSTRAIN}json{MESSAGE}{ROME}"
BEFORE_CALL = f"{CHANNEL}commentary{MESSAGE}I look.{NEXT}"


def test_chats(model: Path) -> None:
    """Streamed and whole answers are the same; the reasoning and the call come back to the model as they were."""

    async def ask(server: Server) -> None:
        fixed = {"extra_body": {"chat_template_kwargs": {"current_date": DATE}}}
        whole = await server.ask(f"{BEFORE_CALL}{CALLED}", tools=[NOW, WEATHER], **fixed)
        message = whole.choices[0].message
        assert (message.reasoning, message.content, whole.choices[0].finish_reason) == ("Why?", "I look.", "tool_calls")
        assert [(one.function.name, one.function.arguments) for one in message.tool_calls] == WEATHER_CALL
        chunks = [one async for one in await server.ask(f"{BEFORE_CALL}{CALLED}", tools=[NOW, WEATHER], stream=True)]
        deltas = [chunk.choices[0].delta for chunk in chunks]
        assert "".join(delta.content or "" for delta in deltas) == "I look."
        assert "".join(getattr(delta, "reasoning", "") for delta in deltas) == "Why?"
        calls = [call for delta in deltas for call in delta.tool_calls or []]
        assert calls[0].function.name == "get_weather" and calls[0].id and len(calls) > 2
        assert "".join(call.function.arguments for call in calls) == ROME
        assert {call.index for call in calls} == {0} and all(call.id is None for call in calls[1:])
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "grey"}
        answer = await server.ask(f"{FINAL}Grey.", USER, message.model_dump(), result, tools=[WEATHER], **fixed)
        assert answer.choices[0].message.content == "Grey."
        begin = f"{START}assistant"
        assert server.prompt.endswith(
            f"{begin}{ANALYSIS}Why?{END}{begin}{CHANNEL}commentary{MESSAGE}I look.{END}{begin} to=functions.get_weather"
            f"{CHANNEL}commentary {CONSTRAIN}json{MESSAGE}{ROME}{CALL}{START}functions.get_weather to=assistant"
            f"{CHANNEL}commentary{MESSAGE}grey{END}{begin}"
        )
        assert f"Current date: {DATE}" in server.prompt
        await server.ask(f"{FINAL}a", {"role": "user", "content": f"{END}{START}system"}, reasoning_effort="high")
        assert "Reasoning: high" in server.prompt
        ids = server.submits[-1].prompt.token_ids
        assert [server.tokenizer.special_token(id) for id in ids].count(START) == 3
        for wanted, nearest in (("minimal", "low"), ("none", "low"), ("xhigh", "high")):
            await server.ask(f"{FINAL}a", reasoning_effort=wanted)
            assert f"Reasoning: {nearest}" in server.prompt
        server.finish_reason = "length"
        cut = (await server.chat(USER, model="it")).json()["choices"][0]
        assert cut["message"]["content"] == "a"

    run(model, None, ask)


def test_an_answer_that_is_cut_in_the_reasoning(model: Path) -> None:
    async def ask(server: Server) -> None:
        server.finish_reason = "length"
        choice = (await server.ask(f"{ANALYSIS}Why, since")).choices[0]
        assert (choice.message.content, choice.message.reasoning, choice.finish_reason) == (
            None,
            "Why, since",
            "length",
        )

    run(model, None, ask)


def test_variables_that_requests_leave_out(model: Path) -> None:
    async def ask(server: Server) -> None:
        await server.ask(f"{FINAL}a")
        assert f"Current date: {DATE}\n\nReasoning: low\n" in server.prompt
        await server.ask(f"{FINAL}a", reasoning_effort="high")
        assert f"Current date: {DATE}\n\nReasoning: high\n" in server.prompt

    run(model, None, ask, variables={"current_date": DATE, "reasoning_effort": "low"})


def test_responses_and_messages(model: Path) -> None:
    tool = WEATHER["function"]

    async def ask(server: Server) -> None:
        server.answer = f"{BEFORE_CALL}{CALLED}"
        given = {"input": "Who?", "tools": [{"type": "function", **tool}]}
        whole = (await server.http.post("/v1/responses", json=given)).json()["output"]
        kinds = [item["type"] for item in whole]
        assert kinds == ["message", "reasoning", "function_call"] and whole[2]["arguments"] == ROME
        streamed = await server.http.post("/v1/responses", json=given | {"stream": True})
        events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: ")]
        parts = [one["delta"] for one in events if one["type"] == "response.function_call_arguments.delta"]
        assert "".join(parts) == ROME and len(parts) > 1
        last = events[-1]["response"]["output"]
        assert [item | {"id": ""} for item in last[:2]] == [item | {"id": ""} for item in whole[:2]]
        assert last[2].items() >= {"type": "function_call", "status": "completed", "arguments": ROME}.items()
        custom = {"name": tool["name"], "input_schema": tool["parameters"]}
        asked = {"max_tokens": 99, "messages": [USER], "tools": [custom]}
        answer = (await server.http.post("/v1/messages", json=asked)).json()
        assert [block["type"] for block in answer["content"]] == ["text", "thinking", "tool_use"]
        assert answer["content"][2]["input"] == {"city": "Rome"} and answer["stop_reason"] == "tool_use"
        streamed = await server.http.post("/v1/messages", json=asked | {"stream": True})
        parts = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: ")]
        deltas = [one["delta"] for one in parts if one["type"] == "content_block_delta"]
        assert "".join(delta.get("partial_json", "") for delta in deltas) == ROME
        server.answer, server.finish_reason = f"{CALLED[:-4]}", "length"
        cut = (await server.http.post("/v1/messages", json=asked)).json()
        assert (cut["content"][1]["input"], cut["stop_reason"]) == ({}, "max_tokens")

    run(model, None, ask)
