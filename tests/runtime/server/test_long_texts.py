"""Tokenising takes hundreds of bytes of memory for each character: what cannot fit is refused first."""

from pathlib import Path
from typing import Any

import pytest

from tests.runtime.server.scripted import BOS, QWEN_3, Server, make_model, run
from tilerank.loader.tokenizer import Tokenizer
from tilerank.runtime.server.chat import prompts


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("long") / "model")


def requests_of(text: str) -> dict[str, dict[str, Any]]:
    """Return a request of each API whose prompt has a text."""
    messages = [{"role": "user", "content": text}]
    return {
        "/v1/completions": {"prompt": text},
        "/v1/chat/completions": {"messages": messages},
        "/v1/chat/completions/render": {"messages": messages},
        "/v1/messages": {"messages": messages, "max_tokens": 1},
        "/v1/responses": {"input": text},
        "/tokenize": {"prompt": text},
    }


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The context has 4,096 tokens, and BOS is the longest one of the vocabulary."""
    assert Tokenizer(model).longest_token == len(BOS)
    text = "a" * (4096 * len(BOS) + 1)

    async def ask(server: Server) -> None:
        encoded: list[int] = []
        encode = server.tokenizer.encode

        def counted(text: str, add_special_tokens: bool = True) -> list[int]:
            encoded.append(len(text))
            return encode(text, add_special_tokens)

        monkeypatch.setattr(server.tokenizer, "encode", counted)
        for path, body in (*requests_of(text).items(), ("/v1/completions", {"prompt": ["a", text]})):
            answer = await server.http.post(path, json={"model": "it"} | body)
            assert answer.status_code == 400, path
            assert f"expected at most {4096 * 21} characters" in answer.text, path
        assert max(encoded, default=0) < len(text) and not server.submits

    run(model, QWEN_3, ask)


def test_texts_of_a_request_are_bounded_together(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the context."""
    monkeypatch.setattr(prompts, "MAX_TEXT", 64)

    async def ask(server: Server) -> None:
        found = [await server.http.post("/v1/completions", json={"prompt": ["a" * 16] * n}) for n in (4, 5)]
        assert [answer.status_code for answer in found] == [200, 400]
        assert "prompt: expected at most 64 characters together, found 80" in found[1].text

    run(model, QWEN_3, ask)
