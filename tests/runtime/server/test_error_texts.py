"""Errors of tokenizers and chat templates name no path of the server, whatever is wrong with them."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.server.scripted import QWEN_3, Server, make_model, run

BACKTRACKS = {"type": "Split", "pattern": {"Regex": "(a|aa)+b"}, "behavior": "Isolated", "invert": False}
TEXT = "a" * 60 + "!"
MESSAGES = [{"role": "developer", "content": TEXT}, {"role": "user", "content": TEXT}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALLED = [
    *MESSAGES,
    {
        "role": "assistant",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": TEXT},
]
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": TEXT}),
    ("/v1/completions", {"prompt": [TEXT, "x"]}),
    ("/v1/completions", {"prompt": [1], "bad_words": [TEXT]}),
    ("/v1/chat/completions", {"messages": MESSAGES}),
    ("/v1/chat/completions", {"messages": MESSAGES, "tools": TOOLS}),
    ("/v1/chat/completions", {"messages": MESSAGES, "reasoning_effort": "high"}),
    ("/v1/chat/completions", {"messages": MESSAGES, "chat_template_kwargs": {"x": 1}}),
    ("/v1/chat/completions", {"messages": CALLED}),
    ("/v1/chat/completions", {"messages": CALLED[:3], "continue_final_message": True, "add_generation_prompt": False}),
    ("/v1/chat/completions", {"messages": MESSAGES, "stream": True}),
    ("/v1/chat/completions/render", {"messages": MESSAGES}),
    ("/v1/messages", {"messages": MESSAGES[1:], "max_tokens": 1}),
    ("/v1/messages/count_tokens", {"messages": MESSAGES[1:]}),
    ("/v1/responses", {"input": TEXT}),
    ("/tokenize", {"prompt": TEXT}),
    ("/tokenize", {"messages": MESSAGES}),
]
TEMPLATES = {
    "none": None,
    "does not compile": "{% break %}",
    "syntax": "{% if %}",
    "refuses": "{{ raise_exception('no') }}",
    "fails": "{{ messages[9].content.x.y }}",
    "prints nothing": "x",
    "Qwen": QWEN_3,
}


def change_pattern(model: Path) -> None:
    file = json.loads((model / "tokenizer.json").read_text())
    (model / "tokenizer.json").write_text(json.dumps(file | {"pre_tokenizer": BACKTRACKS}))


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("backtracks", [False, True], ids=["a good tokenizer", "a tokenizer that fails"])
def test_no_path_is_named(tmp_path: Path, name: str, backtracks: bool) -> None:
    model = make_model(tmp_path / "model")
    if backtracks:
        change_pattern(model)

    async def ask(server: Server) -> int:
        refused = 0
        for path, body in REQUESTS:
            answer = await server.http.post(path, json=body)
            refused += answer.status_code == 400
            assert answer.status_code in (200, 400), (path, answer.text)
            assert str(tmp_path) not in answer.text and "/model" not in answer.text, (path, answer.text)
        return refused

    assert run(model, TEMPLATES[name], ask) > 0
