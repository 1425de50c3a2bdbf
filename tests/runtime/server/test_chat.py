"""Reasoning and tools through the official client, with hand-made answers of a stand-in for the engine.

The chat templates have the form of Qwen3's, Qwen3.5's and DeepSeek-V3.1's.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.runtime.server.scripted import BOS, QWEN_3, QWEN_3_5, Server, make_model, run
from tilerank.runtime.protocol.params import Logprobs

DEEPSEEK = (
    "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ bos_token }}"
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ m['content'] }}"
    "{% elif m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] }}"
    "{% elif m['role'] == 'tool' %}{{ '<｜tool▁output▁begin｜>' + m['content'] + '<｜tool▁output▁end｜>' }}"
    "{% else %}{{ '<｜Assistant｜></think>' }}{% for call in m['tool_calls'] %}"
    "{{ m['content'] + '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + call['function']['name'] }}"
    "{{ '<｜tool▁sep｜>' + call['function']['arguments'] }}"
    "{% endfor %}{% endif %}{% endfor %}"
    "<｜Assistant｜>{% if thinking %}<think>{% else %}</think>{% endif %}"
)
USER: Any = {"role": "user", "content": "Who?"}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("now", "then", "weather")
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("chat") / "model")


@pytest.mark.parametrize(
    ("template", "variables", "answer", "reasoning"),
    [
        (QWEN_3, {}, "<think>\nWhy\nnot?\n</think>\n\nMoses.", "Why\nnot?"),
        (QWEN_3, {}, "Moses.", None),
        (QWEN_3, {"enable_thinking": False}, "Moses.", None),
        (QWEN_3_5, {}, "Why\nnot?\n</think>\n\nMoses.", "Why\nnot?"),
        (QWEN_3_5, {"enable_thinking": False}, "Moses.", None),
        (DEEPSEEK, {"thinking": True}, "Why\nnot?</think>Moses.", "Why\nnot?"),
        (DEEPSEEK, {"enable_thinking": True}, "Why\nnot?</think>Moses.", "Why\nnot?"),
        (DEEPSEEK, {}, "Moses.", None),
    ],
)
def test_reasoning_is_a_field_of_its_own(
    model: Path, template: str, variables: dict[str, bool], answer: str, reasoning: str | None
) -> None:
    async def ask(server: Server) -> None:
        fields = {"extra_body": {"chat_template_kwargs": variables}}
        whole = await server.ask(answer, **fields)
        message = whole.choices[0].message
        assert message.content == "Moses."
        assert getattr(message, "reasoning_content", None) == getattr(message, "reasoning", None) == reasoning
        usage = {"include_usage": True}
        chunks = [chunk async for chunk in await server.ask(answer, stream=True, stream_options=usage, **fields)]
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        assert "".join(delta.content or "" for delta in deltas) == "Moses."
        for name in ("reasoning_content", "reasoning"):
            assert "".join(getattr(delta, name, "") for delta in deltas) == (reasoning or "")
        assert chunks[-1].usage == whole.usage
        if reasoning is not None:
            # By hand: all tokens but those of the answer; line breaks after the mark belong to neither.
            after = server.tokenizer.encode(answer[answer.index("</think>") + 8 :], add_special_tokens=False)
            details = whole.usage.completion_tokens_details
            assert details.reasoning_tokens == whole.usage.completion_tokens - len(after) - 1  # 1 ends the answer
        else:
            assert whole.usage.completion_tokens_details is None

    run(model, template, ask)


def test_a_tool_call_after_reasoning(model: Path) -> None:
    """A call in the reasoning is none."""
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'

    async def ask(server: Server) -> None:
        whole = await server.ask(f"I write {call}\n</think>\n\nSo:\n{call}", tools=TOOLS)
        message = whole.choices[0].message
        assert (message.reasoning_content, message.content) == (f"I write {call}", "So:")
        assert [(one.function.name, one.function.arguments) for one in message.tool_calls] == [("now", "{}")]
        assert whole.choices[0].finish_reason == "tool_calls"

    run(model, QWEN_3_5, ask)


WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": [1, 2]}}\n</tool_call>'


def test_tool_calls_as_a_stream_and_whole(model: Path) -> None:
    """The format of the API, by hand: content first, then numbered calls, then the finish reason."""

    async def ask(server: Server) -> None:
        answer = f"Looking. {WEATHER}{WEATHER}"
        chunks = [chunk async for chunk in await server.ask(answer, tools=TOOLS, stream=True)]
        deltas = [chunk.choices[0].delta for chunk in chunks]
        assert deltas[0].role == "assistant"
        first = next(i for i, delta in enumerate(deltas) if delta.tool_calls)
        assert "".join(delta.content or "" for delta in deltas[:first]) == "Looking. "
        assert not any(delta.content for delta in deltas[first:])
        calls = [call for delta in deltas for call in delta.tool_calls or []]
        found = [(call.index, call.type, call.function.name) for call in calls]
        assert found == [(0, "function", "weather"), (1, "function", "weather")] and calls[0].id != calls[1].id
        reasons = [chunk.choices[0].finish_reason for chunk in chunks]
        assert reasons == [None] * (len(chunks) - 1) + ["tool_calls"]
        message = (await server.ask(answer, tools=TOOLS)).choices[0].message
        assert message.content == "Looking. "
        assert [call.function.arguments for call in message.tool_calls] == ['{"city": "Köln", "days": [1, 2]}'] * 2

    run(model, QWEN_3, ask)


@pytest.mark.parametrize("answer", [f"I look. {WEATHER}", "1 < 2 and <tool", f"{WEATHER}\n{WEATHER}"])
def test_every_token_has_a_log_probability_also_where_calls_are_looked_for(model: Path, answer: str) -> None:
    """Text that may become a call is held back; chunks contain the tokens of the text that they contain."""

    async def ask(server: Server) -> None:
        server.logprobs = lambda id: Logprobs(-float(id), (), 1)
        expected = [-float(id) for id in server.tokenizer.encode(answer, add_special_tokens=False)]
        whole = await server.ask(answer, tools=TOOLS, logprobs=True)
        assert [entry.logprob for entry in whole.choices[0].logprobs.content] == expected
        chunks = [chunk async for chunk in await server.ask(answer, tools=TOOLS, logprobs=True, stream=True)]
        entries = [entry for chunk in chunks for entry in chunk.choices[0].logprobs.content]
        assert [entry.logprob for entry in entries] == expected

    run(model, QWEN_3, ask)


def test_a_stream_of_calls_of_deepseek(model: Path) -> None:
    answer = (
        "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
        '<｜tool▁call▁begin｜>then<｜tool▁sep｜>{"x": "é"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    )

    async def ask(server: Server) -> None:
        chunks = [chunk async for chunk in await server.ask(answer, tools=TOOLS, stream=True)]
        deltas = [chunk.choices[0].delta for chunk in chunks]
        assert "".join(delta.content or "" for delta in deltas) == "I look."
        calls = [call for delta in deltas for call in delta.tool_calls or []]
        found = [(call.index, call.function.name, call.function.arguments) for call in calls]
        assert found == [(0, "now", "{}"), (1, "then", '{"x": "é"}')]
        assert chunks[-1].choices[0].finish_reason == "tool_calls"

    run(model, DEEPSEEK, ask)


def test_tools_reach_a_model_whose_template_leaves_them_out(model: Path) -> None:
    """In the form of DeepSeek's model card, after the system prompt."""
    tool: Any = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
    expected = (
        "\n\n## Tools\nYou have access to the following tools:\n\n### now\nDescription: \n\n"
        'Parameters: {"type": "object"}\n\nIMPORTANT: ALWAYS adhere to this exact format for tool use:\n'
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>tool_call_name<｜tool▁sep｜>tool_call_arguments<｜tool▁call▁end｜>"
        "{{additional_tool_calls}}<｜tool▁calls▁end｜>\n\nWhere:\n\n"
    )

    async def ask(server: Server) -> None:
        await server.ask("a", tools=[tool])
        assert server.prompt.startswith(BOS + expected) and server.prompt.endswith("Who?<｜Assistant｜></think>")
        await server.ask("a", {"role": "system", "content": "Be brief."}, USER, tools=[tool])
        assert server.prompt.startswith(f"{BOS}Be brief.{expected}")
        await server.ask("a", {"role": "system", "content": "Be brief."}, USER)
        assert server.prompt.startswith(f"{BOS}Be brief.<｜User｜>")

    run(model, DEEPSEEK, ask)


def test_earlier_turns_reach_the_template(model: Path) -> None:
    """An answer of the client, given back as it came: with reasoning, with calls, and without content."""

    async def qwen(server: Server) -> None:
        first = await server.ask("<think>\nWhy\n</think>\n\nMoses.")
        turns = [USER, first.choices[0].message, {"role": "user", "content": "And?"}]
        await server.ask("a", *turns, extra_body={"chat_template_kwargs": {"preserve_thinking": True}})
        assert "assistant\n<think>\nWhy\n</think>\n\nMoses.<|im_end|>" in server.prompt
        await server.ask("a", *turns)
        assert "<think>" not in server.prompt
        other = {"role": "assistant", "content": "Moses.", "reasoning": "So"}
        await server.ask("a", USER, other)
        assert "<think>\nSo\n</think>\n\nMoses." in server.prompt

    async def deepseek(server: Server) -> None:
        call = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        first = await server.ask(call, tools=TOOLS)
        message = first.choices[0].message
        assert message.content is None
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "noon"}
        await server.ask("a", USER, message, result)
        assert "</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}" in server.prompt

    run(model, QWEN_3, qwen)
    run(model, DEEPSEEK, deepseek)


def test_a_template_that_prints_the_beginning_of_text(model: Path) -> None:
    """The tokenizer would add a second one."""

    async def ask(server: Server) -> None:
        await server.ask("a")
        assert server.prompt.count(BOS) == 1 and server.prompt.startswith(BOS)
        body = {"messages": [USER], "chat_template_kwargs": {"thinking": True}}
        answer: Any = await server.client.post("http://server/tokenize", body=body, cast_to=object)
        assert answer["tokens"].count(server.submits[-1].prompt.token_ids[0]) == 1
        assert answer["tokens"][-1] == server.tokenizer.encode("<think>", add_special_tokens=False)[0]

    run(model, DEEPSEEK, ask)


@pytest.mark.parametrize(
    ("template", "effort", "variables", "end"),
    [
        (QWEN_3_5, "low", {}, "assistant\nlow<think>\n"),
        (QWEN_3_5, "none", {}, "assistant\n<think>\n\n</think>\n\n"),
        (QWEN_3_5, "high", {"reasoning_effort": "high"}, "assistant\nhigh<think>\n"),
        (DEEPSEEK, "none", {}, "<｜Assistant｜></think>"),
        ("{{ messages[0].content }}!", "high", {}, "Who?!"),  # a hint
    ],
)
def test_effort_of_reasoning(model: Path, template: str, effort: Any, variables: dict[str, Any], end: str) -> None:
    async def ask(server: Server) -> None:
        await server.ask("a", reasoning_effort=effort, extra_body={"chat_template_kwargs": variables})
        assert server.prompt.endswith(end)

    run(model, template, ask)


@pytest.mark.parametrize(
    ("template", "fields", "sentence"),
    [
        (
            DEEPSEEK,
            {"reasoning_effort": "high"},
            "reasoning_effort: the chat template of it takes no effort of reasoning; it can only turn it off: expected "
            "'none', found 'high'",
        ),
        ("a", {"reasoning_effort": "low"}, "reasoning_effort: the chat template of it takes no effort of reasoning"),
        (
            QWEN_3_5,
            {"reasoning_effort": "low", "extra_body": {"chat_template_kwargs": {"reasoning_effort": "high"}}},
            "reasoning_effort: 'low' contradicts reasoning_effort 'high' of chat_template_kwargs",
        ),
        (
            QWEN_3_5,
            {"reasoning_effort": "none", "extra_body": {"chat_template_kwargs": {"enable_thinking": True}}},
            "reasoning_effort: 'none' contradicts enable_thinking True of chat_template_kwargs",
        ),
    ],
)
def test_an_effort_that_cannot_be_made_is_refused(
    model: Path, template: str, fields: dict[str, Any], sentence: str
) -> None:
    async def ask(server: Server) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            await server.ask("a", **fields)
        body: Any = caught.value.body
        assert body["message"] == sentence
        assert caught.value.param == "reasoning_effort"

    run(model, template, ask, strict=True)


@pytest.mark.parametrize("arguments", ["", " \n", "null", None, "left out"])
@pytest.mark.parametrize("printed", ["arguments | tojson", "arguments | items | list", "arguments"])
def test_a_call_without_arguments_in_the_history(model: Path, printed: str, arguments: str | None) -> None:
    async def ask(server: Server) -> None:
        prompts = []
        for given in ({"arguments": "{}"}, {} if arguments == "left out" else {"arguments": arguments}):
            call = {"id": "c", "type": "function", "function": {"name": "now"} | given}
            turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
            result = {"role": "tool", "tool_call_id": "c", "content": "noon"}
            body = {"messages": [*turns, result], "tools": TOOLS}
            prompts.append((await server.http.post("/v1/chat/completions/render", json=body)).json()["token_ids"])
        assert prompts[0] == prompts[1]

    run(model, QWEN_3.replace("arguments | tojson", printed), ask)


KIMI = (
    "{% for m in messages %}{{ m.role }}:{% if m.role == 'tool' %}Return of {{ m.tool_call_id }} {% endif %}"
    "{{ m.content }}{% for call in m.tool_calls %}<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>"
    "{{ call.function.arguments | tojson }}<|tool_call_end|>{% endfor %};{% endfor %}{{ tools | tojson }}"
)


@pytest.mark.parametrize(
    "ids", [["a", "b", "c"], ["a", "a", "a"], ["", "", ""], ["functions.now:0", "functions.now:1", "functions.f:0"]]
)
def test_kimi_gets_the_ids_of_earlier_calls_that_it_has_been_trained_on(model: Path, ids: Sequence[str]) -> None:
    """They count all calls of the conversation, whatever ids the client has chosen."""

    async def ask(server: Server) -> None:
        calls = [
            {"id": id, "type": "function", "function": {"name": name, "arguments": "{}"}}
            for id, name in zip(ids, ("now", "now", "f"), strict=True)
        ]
        results = [{"role": "tool", "tool_call_id": id, "content": str(i)} for i, id in enumerate(ids)]
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": calls[:2]}]
        turns += [*results[:2], {"role": "assistant", "content": "and", "tool_calls": calls[2:]}, results[2]]
        turns += [{"role": "tool", "tool_call_id": "other", "content": "unknown"}]
        await server.ask("Hello", *turns, tools=TOOLS)
        for i, name in enumerate(("now", "now", "f")):
            assert server.prompt.count(f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{{}}") == 1
            assert f"Return of functions.{name}:{i} {i};" in server.prompt
        assert "Return of other unknown" in server.prompt

    run(model, KIMI, ask)


PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def test_tools_are_described_to_a_template_without_tools(model: Path) -> None:
    async def ask(server: Server) -> None:
        function = {"name": "weather", "description": "of a city", "parameters": {"type": "object"}}
        tools = [{"type": "function", "function": function}]
        for turns in ([], [{"role": "system", "content": "Be brief."}]):
            await server.ask("Hello", *turns, {"role": "user", "content": "Who?"}, tools=tools)
            system, _, user = server.prompt.rpartition("user:")
            assert system.startswith(f"system: {'Be brief.' if turns else ''}") and user.startswith(" Who?")
            assert json.dumps(function) in system and '<tool_call>\n{"name": "NAME", "arguments": ' in system
        await server.ask("Hello", tools=tools, tool_choice="none")
        assert "weather" not in server.prompt

    run(model, PLAIN, ask)


def test_tools_are_refused_where_a_template_prints_neither_them_nor_a_system_prompt(model: Path) -> None:
    async def ask(server: Server) -> None:
        for fields in ({}, {"tool_choice": "required"}):
            answer = await server.chat({"role": "user", "content": "Who?"}, tools=TOOLS, **fields)
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools"
            assert "prints neither tools nor a system prompt" in answer.json()["error"]["message"]

    run(model, PLAIN.replace("messages", "messages if m.role == 'user'"), ask)


def test_usage_counts_drafts(model: Path) -> None:
    async def ask(server: Server) -> None:
        assert (await server.ask("four five")).usage.completion_tokens_details is None
        server.drafted = (True, 2)
        details = (await server.ask("four five")).usage.completion_tokens_details
        tokens = server.count("four five")
        assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (tokens, 2 * tokens)

    run(model, QWEN_3, ask)
