"""What clients send that this server does not do: the requests of coding agents and chat programs, written by hand.

tests/clients/test_agents.py has the agents themselves.
"""

import logging
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.runtime.server.scripted import QWEN_3, Server, make_model, run
from tilerank.runtime.server.chat.ignored_fields import IgnoredFields
from tilerank.runtime.server.chat.request import ChatCompletion

HEADER = "x-ignored-fields"
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
USER: Any = {"role": "user", "content": "Who?"}
OBJECT: Any = {"type": "object", "properties": {"path": {"type": "string"}}}
AIDER: Any = {
    "messages": [
        {"role": "system", "content": "Act as an expert."},
        USER,
        {"role": "assistant", "content": "Ok."},
        USER,
    ],
    "temperature": 0,
    "stream": True,
    "stream_options": {"include_usage": True},
}
CONTINUE: Any = {
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Who?"}]}],
    "max_tokens": 4096,
    "stream": True,
    "tools": [
        {
            "type": "function",
            "function": {"name": "read_file", "description": "Reads", "parameters": OBJECT, "strict": False},
        }
    ],
    "parallel_tool_calls": False,
}
CLINE: Any = {
    "messages": [
        {"role": "system", "content": "You are Cline."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Who?"}, {"type": "text", "text": "<environment>"}],
        },
    ],
    "temperature": 0,
    "stream": True,
    "stream_options": {"include_usage": True},
    "reasoning_effort": "medium",
    "tool_choice": "auto",
    "tools": [{"type": "function", "function": {"name": "execute_command", "strict": False, "parameters": OBJECT}}],
}
OPEN_WEBUI: Any = {
    "messages": [USER],
    "stream": True,
    "stream_options": {"include_usage": True},
    "features": {"web_search": False},
    "session_id": "abc",
    "chat_id": "def",
    "background_tasks": {"title_generation": True},
    "model_item": {"id": "it"},
}
CODEX: Any = {
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Who?"}]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
    ],
    "tools": [
        {
            "type": "function",
            "name": "shell",
            "description": "",
            "strict": False,
            "parameters": OBJECT,
            "defer_loading": True,
        },
        {
            "type": "namespace",
            "name": "agents",
            "description": "",
            "tools": [{"type": "function", "name": "now", "strict": False}],
        },
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "abc",
    "text": {"verbosity": "low"},
    "client_metadata": {"x-codex-installation-id": "abc"},
}
CLAUDE_CODE: Any = {
    "max_tokens": 32000,
    "system": [{"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {
            "role": "user",
            "content": [{"type": "text", "text": "<reminder>", "cache_control": {"type": "ephemeral"}}],
        },
        {"role": "system", "content": "Available agents"},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "Hm."}]},
        USER,
    ],
    "tools": [
        {"name": "Read", "input_schema": OBJECT, "defer_loading": True, "eager_input_streaming": True},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "metadata": {"user_id": "abc"},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "stream": True,
}

NESTED: Any = {
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Who?", "note": 1, "cache_control": {}}]}],
    "tools": [{"type": "function", "mode": 1, "function": {"name": "now", "kind": "clock", "strict": True}}],
    "tool_choice": {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "now"}}]},
    },
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("ignored") / "model")


async def post(server: Server, path: str, body: dict[str, Any]) -> httpx.Response:
    server.answer = "M"
    return await server.http.post(path, json={"model": "it"} | body)


@pytest.mark.parametrize(
    ("path", "body", "ignored", "strictly"),
    [
        (CHAT, AIDER, "", ""),
        (CHAT, CONTINUE, "", ""),
        (CHAT, CLINE, "", "reasoning_effort"),
        (CHAT, OPEN_WEBUI, "background_tasks, chat_id, features, model_item, session_id", "'background_tasks'"),
        (CHAT, NESTED, "note, mode, kind", "no field 'note'"),
        (RESPONSES, CODEX, "tools.web_search", "tool of type 'web_search'"),
        (MESSAGES, CLAUDE_CODE, "tools.web_search_20250305", "tool of type 'web_search_20250305'"),
    ],
    ids=["Aider", "Continue", "Cline", "Open WebUI", "nested fields", "Codex", "Claude Code"],
)
def test_clients_get_their_answer(model: Path, path: str, body: dict[str, Any], ignored: str, strictly: str) -> None:
    async def ask(server: Server) -> None:
        answer = await post(server, path, body)
        assert answer.status_code == 200 and '"M"' in answer.text, answer.text
        assert answer.headers.get(HEADER, "") == ignored

    async def ask_strictly(server: Server) -> None:
        answer = await post(server, path, body)
        assert answer.status_code == (400 if strictly else 200) and strictly in answer.text

    run(model, QWEN_3, ask, context_length=1 << 16)
    run(model, QWEN_3, ask_strictly, context_length=1 << 16, strict=True)


def test_an_unknown_field_is_logged_once_and_named(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def ask(server: Server) -> None:
        body = {"messages": [USER], "stream_options": {"new": 1}, "stream": True, "bad\r\nname": 1}
        for _ in range(2):
            assert (await post(server, CHAT, body)).headers[HEADER] == "bad??name, new"
        many = {f"x{i}": 1 for i in range(100)}
        assert (await post(server, CHAT, many | {"messages": [USER]})).headers[HEADER].count(",") == 31
        refused = await post(server, CHAT, {"messages": [USER], "dry_multiplier": 0.8, "new": 1})
        assert refused.status_code == 400 and "'dry_multiplier' is not supported" in refused.text

    with caplog.at_level(logging.WARNING):
        run(model, QWEN_3, ask)
    assert sum("'new' is ignored" in record.message for record in caplog.records) == 1


def test_unknown_fields_of_media_are_named() -> None:
    video = {"type": "video_url", "video_url": {"url": "data:,"}, "fps": 2, "uuid": "a"}
    ignored = IgnoredFields(strict=False)
    body = {"messages": [{"role": "user", "content": [video]}]}
    ChatCompletion.model_validate(body, context=ignored)
    assert ignored.names == ["fps"]


def test_what_agents_send_reaches_the_prompt(model: Path) -> None:
    async def ask(server: Server) -> None:
        await post(server, MESSAGES, CLAUDE_CODE)
        assert server.prompt.endswith(
            "<|im_start|>system\nYou are Claude Code.<|im_end|>\n"
            "<|im_start|>user\n<reminder>\nAvailable agents<|im_end|>\n"
            "<|im_start|>assistant\nHm.<|im_end|>\n<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
        )
        await post(server, RESPONSES, CODEX)
        assert '"agents.now"' in server.prompt and "web_search" not in server.prompt

    run(model, QWEN_3, ask)


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_refusals_of_earlier_answers_are_text(model: Path, path: str) -> None:
    async def ask(server: Server) -> None:
        turns = [USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "I will not."}]}, USER]
        answer = await post(server, path, {"messages" if path == CHAT else "input": turns})
        assert answer.status_code == 200 and "<|im_start|>assistant\nI will not.<|im_end|>" in server.prompt

    run(model, QWEN_3, ask)


def test_a_role_that_no_template_has_is_refused(model: Path) -> None:
    async def ask(server: Server) -> None:
        answer = await post(server, CHAT, {"messages": [USER, {"role": "users", "content": "Who?"}]})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages.1.role"
        assert "expected system, developer, user, assistant, tool, or another one" in answer.text

    run(model, QWEN_3, ask)


def test_reasoning_is_omitted_and_found_tools_are_named(model: Path) -> None:
    async def ask(server: Server) -> None:
        server.answer = "<think>\nWhy\n</think>\n\nMoses."
        thinking = {"type": "enabled", "budget_tokens": 2000, "display": "omitted"}
        body = {"model": "it", "max_tokens": 9, "messages": [USER], "thinking": thinking}
        answer = await server.http.post(MESSAGES, json=body)
        assert answer.json()["content"] == [{"type": "text", "text": "Moses."}]
        call = {"type": "tool_use", "id": "1", "name": "ToolSearch", "input": {}}
        found = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "tool_reference", "tool_name": "now"}]}
        turns = [USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [found]}]
        assert (await post(server, MESSAGES, {"max_tokens": 9, "messages": turns})).status_code == 200
        assert "tool\nThe tool now is available.<|im_end|>" in server.prompt

    run(model, QWEN_3, ask)
