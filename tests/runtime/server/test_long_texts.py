"""Tokenising takes hundreds of bytes of memory for each character: what cannot fit is refused first, the rest waits."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.server.scripted import BOS, QWEN_3, Server, make_model, run
from tilerank.loader.tokenizer import Tokenizer
from tilerank.runtime.server.chat.prompts import LONG_TEXT, LONG_TEXTS


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


def test_few_long_texts_are_tokenised_at_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(server: Server) -> None:
        now, most, lock, encode = 0, 0, threading.Lock(), server.tokenizer.encode
        pair = threading.Barrier(LONG_TEXTS)

        def watched(text: str, add_special_tokens: bool = True) -> list[int]:
            nonlocal now, most
            with lock:
                now, most = now + 1, max(most, now + 1)
            pair.wait(30)  # as many as may be are here at once
            with lock:
                now -= 1
            return encode(text, add_special_tokens)

        monkeypatch.setattr(server.tokenizer, "encode", watched)
        body = {"prompt": "a" * LONG_TEXT}
        answers = await asyncio.gather(*(server.http.post("/tokenize", json=body) for _ in range(4 * LONG_TEXTS)))
        assert [answer.status_code for answer in answers] == [200] * (4 * LONG_TEXTS)
        assert most == LONG_TEXTS

    run(model, QWEN_3, ask)
