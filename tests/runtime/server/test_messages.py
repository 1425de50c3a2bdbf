"""/v1/messages with scripted answers. Events and fields are Anthropic's, by hand; tests/clients has their client."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.runtime.server.scripted import QWEN_3, QWEN_3_5, Server, make_model, run

TOOL: Any = {"name": "now", "description": "The time", "input_schema": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "Köln"}}\n</tool_call>'
USER: Any = {"role": "user", "content": "Who?"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("messages") / "model")


async def post(server: Server, answer: str, *messages: Any, **fields: Any) -> httpx.Response:
    server.answer = answer
    body = {"model": "it", "max_tokens": 100, "messages": messages or [USER]} | fields
    return await server.http.post("/v1/messages", json=body)


async def create(server: Server, answer: str, *messages: Any, **fields: Any) -> Any:
    found = await post(server, answer, *messages, **fields)
    assert found.status_code == 200, found.text
    return found.json()


async def events(server: Server, answer: str, **fields: Any) -> list[Any]:
    text = (await post(server, answer, stream=True, **fields)).text
    pairs = [event.split("\n") for event in text.removesuffix("\n\n").split("\n\n")]
    found = [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in pairs]
    assert all(name == data["type"] for name, data in found)
    return [data for _, data in found]


def test_a_message_in_one_piece(model: Path) -> None:
    async def ask(server: Server) -> None:
        system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
        found = await create(server, "Moses.", system=system, temperature=0.5, top_k=3)
        assert server.prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWho?<|im_end|>")
        params = server.submits[-1].params
        assert (params.temperature, params.top_k, params.max_new_tokens) == (0.5, 3, 100)
        assert found.pop("id").startswith("msg_")
        assert found == {
            "type": "message",
            "role": "assistant",
            "model": "it",
            "content": [{"type": "text", "text": "Moses."}],
            "stop_reason": "end_turn",
            "stop_sequence": None,
            "usage": {
                "input_tokens": len(server.submits[-1].prompt.token_ids),
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
                "output_tokens": server.count("Moses.") + 1,  # 1 ends the answer
            },
        }
        stopped = await create(server, "Moses and Aaron.", stop_sequences=["Miriam", " and"])
        assert stopped["content"] == [{"type": "text", "text": "Moses"}]
        assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", " and")
        server.finish_reason = "length"
        assert (await create(server, "Moses"))["stop_reason"] == "max_tokens"

    run(model, QWEN_3, ask)


def test_events_of_thinking_text_and_a_call(model: Path) -> None:
    async def ask(server: Server) -> None:
        found = await events(server, f"Why not?\n</think>\n\nSo: {CALL}", tools=[TOOL])
        assert found[0]["type"] == "message_start" and found[-1] == {"type": "message_stop"}
        assert found[0]["message"]["usage"]["input_tokens"] == len(server.submits[-1].prompt.token_ids)
        assert found[0]["message"]["content"] == [] and found[0]["message"]["stop_reason"] is None
        assert found[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
        assert found[-2]["usage"]["output_tokens"] == server.count(f"Why not?\n</think>\n\nSo: {CALL}") + 1
        blocks: dict[int, list[Any]] = {}
        for event in found[1:-2]:
            blocks.setdefault(event["index"], []).append(event)
        assert list(blocks) == [0, 1, 2] and found[1:-2] == [*blocks[0], *blocks[1], *blocks[2]]
        for block in blocks.values():
            assert block[0]["type"] == "content_block_start" and block[-1]["type"] == "content_block_stop"
            assert all(event["type"] == "content_block_delta" for event in block[1:-1])
        deltas = [[event["delta"] for event in block[1:-1]] for block in blocks.values()]
        assert blocks[0][0]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
        assert "".join(delta.get("thinking", "") for delta in deltas[0]) == "Why not?"
        assert deltas[0][-1]["type"] == "signature_delta"
        assert blocks[1][0]["content_block"] == {"type": "text", "text": ""}
        assert "".join(delta["text"] for delta in deltas[1]) == "So: "
        assert blocks[2][0]["content_block"].items() >= {"type": "tool_use", "name": "now", "input": {}}.items()
        assert deltas[2] == [{"type": "input_json_delta", "partial_json": '{"zone": "Köln"}'}]
        whole = await create(server, f"Why not?\n</think>\n\nSo: {CALL}", tools=[TOOL])
        assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use"]
        assert whole["content"][2]["input"] == {"zone": "Köln"} and whole["stop_reason"] == "tool_use"

    run(model, QWEN_3_5, ask)


def test_earlier_turns_reach_the_template(model: Path) -> None:
    async def ask(server: Server) -> None:
        first = await create(server, f"<think>\nWhy\n</think>\n\nI look.{CALL}", tools=[TOOL])
        call = first["content"][-1]
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "noon"}]}
        failed = {"type": "tool_result", "tool_use_id": call["id"], "content": "no clock", "is_error": True}
        answer = {"role": "assistant", "content": first["content"]}
        more = {"role": "user", "content": [result, failed, {"type": "text", "text": "Quick!"}]}
        keep = {"chat_template_kwargs": {"preserve_thinking": True}}
        await create(server, "Noon.", USER, answer, more, tools=[TOOL], **keep)
        assert server.prompt.endswith(
            '<|im_start|>assistant\n<think>\nWhy\n</think>\n\nI look.{"zone": "Köln"}<|im_end|>\n'
            "<|im_start|>tool\nnoon<|im_end|>\n<|im_start|>tool\nError: no clock<|im_end|>\n"
            "<|im_start|>user\nQuick!<|im_end|>\n<|im_start|>assistant\n"
        )
        await create(server, "a", thinking={"type": "disabled"})
        assert server.prompt.endswith("<think>\n\n</think>\n\n")
        await create(server, "es.", USER, {"role": "assistant", "content": "Mos"})
        assert server.prompt.endswith("<|im_start|>assistant\nMos")

    run(model, QWEN_3, ask)


def test_tools_are_forced_and_tokens_are_counted(model: Path) -> None:
    async def ask(server: Server) -> None:
        for choice in ({"type": "any"}, {"type": "tool", "name": "now"}):
            await create(server, CALL, tools=[TOOL, TOOL | {"name": "then"}], tool_choice=choice)
            grammar = server.submits[-1].params.grammar
            assert grammar is not None and ("then" in grammar) == (choice["type"] == "any")
        await create(server, "a", tools=[TOOL], tool_choice={"type": "none"})
        assert "now" not in server.prompt
        schema = {"type": "object", "properties": {"name": {"type": "string"}}}
        output = {"format": {"type": "json_schema", "schema": schema}}
        await create(server, "{}", output_config=output)
        assert '"name"' in (server.submits[-1].params.grammar or "")
        fields = {"system": "Be brief.", "tools": [TOOL]}
        await create(server, "a", **fields)
        expected = len(server.submits[-1].prompt.token_ids)
        found = await server.http.post("/v1/messages/count_tokens", json={"messages": [USER], "model": "it"} | fields)
        assert found.json() == {"input_tokens": expected}

    run(model, QWEN_3, ask)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"max_tokens": None}, "max_tokens: Field required"),
        ({"container": "c"}, "'container' is not supported: this server has no such feature."),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type: Input should be 'custom'"),
        ({"tool_choice": {"type": "tool"}}, "name is required for type tool, and not allowed for other types"),
        (
            {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
            "messages.0.content.0: expected a block of type text, image, tool_use, tool_result, thinking, redacted_",
        ),
        ({"reasoning_effort": "low"}, "this server has no field 'reasoning_effort' here."),
        ({"tool_choice": {"type": "any"}}, "'tool_choice' is only allowed when 'tools' are specified."),
        ({"chat_template_kwargs": 3}, "chat_template_kwargs: Input should be"),
        ({"model": "other"}, "There is no model 'other'; this server serves 'it'."),
    ],
)
def test_what_the_server_does_not_do_is_refused_by_name(model: Path, fields: dict[str, Any], sentence: str) -> None:
    async def ask(server: Server) -> None:
        refused = await post(server, "a", **fields)
        kind = "not_found_error" if "model" in fields else "invalid_request_error"
        assert refused.status_code == (404 if "model" in fields else 400)
        assert refused.json().keys() == {"type", "error"} and refused.json()["type"] == "error"
        assert refused.json()["error"]["type"] == kind and sentence in refused.json()["error"]["message"]
        assert not server.submits

    run(model, QWEN_3, ask)


def test_the_key_may_be_in_either_header(model: Path) -> None:
    async def ask(server: Server) -> None:
        body = {"model": "it", "max_tokens": 3, "messages": [USER]}
        for headers, status in (
            ({"x-api-key": "secret"}, 200),
            ({"authorization": "Bearer secret"}, 200),
            ({"x-api-key": "other"}, 401),
            ({}, 401),
        ):
            server.answer = "a"
            found = await server.http.post("/v1/messages", json=body, headers=headers)
            assert found.status_code == status
            if status == 401:
                assert found.json()["error"]["type"] == "authentication_error"
                assert found.headers["www-authenticate"] == "Bearer"
        assert (await server.http.get("/v1/messages")).headers["allow"] == "POST"

    run(model, QWEN_3, ask, api_keys=("secret",))


def test_a_stream_that_fails(model: Path) -> None:
    async def ask(server: Server) -> None:
        server.limit, server.cut = 2, True
        server.more.set()
        found = await events(server, "one two three four five")
        assert found[-1]["type"] == "error" and found[-1]["error"]["type"] == "overloaded_error"

    run(model, QWEN_3, ask)
