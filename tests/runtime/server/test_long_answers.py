"""Whole answers are kept in little memory until they are complete, and their memory is bounded."""

from pathlib import Path
from typing import Any

import pytest

from tests.runtime.server.scripted import QWEN_3, Server, make_model, run
from tilerank.runtime.protocol.params import Logprobs
from tilerank.runtime.server.apis.completions.answer import MAX_CHUNKS
from tilerank.runtime.server.http import memory

WORDS = "one two three four five six seven " * 120
LOGPROBS = [Logprobs(-0.5, ((11, -0.25), (12, -1.0)), 1), Logprobs(-1.5, ((13, -0.125), (14, -3.0)), 2)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("answers") / "model")


@pytest.mark.parametrize("plain", [False, True])
def test_a_long_answer_is_that_of_its_stream(model: Path, plain: bool) -> None:
    """With more tokens than chunks are kept: text, log-probabilities and token ids."""
    fields: dict[str, Any] = {"extra_body": {"return_token_ids": True}, "model": "it"}

    async def ask(server: Server) -> None:
        assert server.count(WORDS) > 3 * MAX_CHUNKS
        server.answer = WORDS
        server.logprobs = lambda id: LOGPROBS[id % 2]
        create: Any
        if plain:
            create, asked = server.client.completions.create, fields | {"prompt": "Who?", "logprobs": 2}
        else:
            create = server.client.chat.completions.create
            messages = [{"role": "user", "content": "Who?"}]
            asked = fields | {"messages": messages, "logprobs": True, "top_logprobs": 2}
        (whole,) = (await create(**asked)).choices
        chunks = [chunk.choices[0] async for chunk in await create(**asked, stream=True)]
        assert whole.token_ids == [id for chunk in chunks for id in chunk.token_ids]
        assert whole.finish_reason == chunks[-1].finish_reason == "stop"
        given = [chunk.logprobs for chunk in chunks if chunk.logprobs is not None]
        if plain:
            assert whole.text == "".join(chunk.text for chunk in chunks)
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                assert getattr(whole.logprobs, name) == [one for part in given for one in getattr(part, name)], name
        else:
            assert whole.message.content == "".join(chunk.delta.content or "" for chunk in chunks)
            assert whole.logprobs.content == [one for part in given for one in part.content]
            assert len(whole.logprobs.content) == server.count(WORDS)

    run(model, QWEN_3, ask)


def test_a_long_text_in_front_of_its_answer_is_scored_in_a_thread(model: Path) -> None:
    """An echo with log-probabilities."""

    async def ask(server: Server) -> None:
        server.answer = "Moses"
        server.logprobs = lambda id: LOGPROBS[id % 2]
        asked: Any = {"model": "it", "prompt": WORDS, "echo": True, "logprobs": 2}
        (whole,) = (await server.client.completions.create(**asked)).choices
        chunks = [chunk.choices[0] async for chunk in await server.client.completions.create(**asked, stream=True)]
        assert whole.text == "".join(chunk.text for chunk in chunks) == WORDS + "Moses"
        assert whole.logprobs.tokens == [one for chunk in chunks for one in chunk.logprobs.tokens]

    run(model, QWEN_3, ask)


def test_whole_answers_are_bounded_together(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer for which there is no memory fails, and its memory is free afterwards."""
    monkeypatch.setattr(memory, "MAX_ANSWERS", 10_000)
    user = {"role": "user", "content": "Who?"}

    async def ask(server: Server) -> None:
        answers = server.app.state.memory.answers  # type: ignore[attr-defined]
        server.answer = WORDS
        server.logprobs = lambda id: LOGPROBS[id % 2]
        assert (await server.chat(user)).status_code == 200
        refused = await server.chat(user, logprobs=True, top_logprobs=2)
        assert refused.status_code == 503 and refused.headers["Retry-After"]
        assert refused.json()["error"]["message"] == "The server holds too many large requests or answers."
        assert answers._held == 0
        assert (await server.chat(user, logprobs=True, top_logprobs=2, stream=True)).status_code == 200

    run(model, QWEN_3, ask)


def test_as_many_tokens_are_decoded_as_a_context_has(model: Path) -> None:
    async def ask(server: Server) -> None:
        assert (await server.http.post("/detokenize", json={"tokens": [5] * 4096})).status_code == 200
        refused = await server.http.post("/detokenize", json={"tokens": [5] * 4097})
        assert refused.status_code == 400
        expected = "tokens: expected at most 4096 token ids, the context length, found 4097"
        assert refused.json()["error"]["message"] == expected

    run(model, QWEN_3, ask)
