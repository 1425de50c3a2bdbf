"""The small endpoints: what is served, how busy it is, and the reference of the API."""

import re
from pathlib import Path
from random import Random

import pytest

from tests.runtime.server.scripted import BOS, QWEN_3, Server, make_model, run

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("endpoints") / "model")


def test_what_is_served(model: Path) -> None:
    async def ask(server: Server) -> None:
        listed = (await server.client.models.list()).data
        assert [one.id for one in listed] == ["it"] and await server.client.models.retrieve("it") == listed[0]
        other = await server.http.get("/v1/models/org/other")
        assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")
        info = (await server.http.get("/tokenizer_info")).json()
        assert (info["bos_token"], info["chat_template"]) == (BOS, QWEN_3)
        assert info["vocab_size"] == server.tokenizer.num_tokens
        refused = await server.http.post("/v1/embeddings", json={"model": "it", "input": "a"})
        assert refused.status_code == 400
        message = "it generates text; /v1/embeddings needs a model that embeds texts."
        assert refused.json()["error"]["message"] == message
        assert (await server.http.get("/ping")).status_code == 200
        idle = {"server_load": 0, "running": 0, "waiting": 0, "kv_cache_usage": 0.0}
        assert (await server.http.get("/load")).json() == idle

    run(model, QWEN_3, ask)


def test_a_chat_is_rendered_as_it_would_be_asked(model: Path) -> None:
    """A rendered prompt is the one that the engine gets of the same request, which alone reaches it."""
    path = "/v1/chat/completions"
    body = {
        "messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Moses"}] * 2,
        "tools": [{"type": "function", "function": {"name": "now"}}],
        "chat_template_kwargs": {"enable_thinking": False},
        "request_id": "mine",
    }

    async def ask(server: Server) -> None:
        server.answer = "Moses."
        for fields in ({}, {"truncate_prompt_tokens": 9}):
            before = len(server.submits)
            rendered = (await server.http.post(f"{path}/render", json=body | fields)).json()
            assert len(server.submits) == before
            assert (await server.http.post(path, json=body | fields)).status_code == 200
            token_ids = server.submits[-1].prompt.token_ids
            assert rendered == {"request_id": "chatcmpl-mine", "model": "it", "token_ids": list(token_ids)}
        changes: list[dict[str, object]] = [{"messages": []}, {"truncate_prompt_tokens": 0}, {"messages": long}]
        for wrong in changes:
            refused = [await server.http.post(p, json=body | wrong) for p in (path, f"{path}/render")]
            assert [one.status_code for one in refused] == [400, 400] and refused[0].json() == refused[1].json()

    long = [{"role": "user", "content": "Moses " * 5000}]
    run(model, QWEN_3, ask)


def test_the_reference_lists_what_there_is(model: Path) -> None:
    async def ask(server: Server) -> None:
        answer = await server.http.get("/openapi.json")
        found = answer.json()
        assert found["openapi"] == "3.1.0"
        references = re.findall(r'"\$ref":"#/components/schemas/([^"]+)"', answer.text)
        assert set(references) <= found["components"]["schemas"].keys() and "ChatCompletion" in references
        for path, methods in found["paths"].items():
            for method, about in methods.items():
                asked = await server.http.request(
                    method, re.sub("{.*}", "x", path), json={}, headers={"x-api-key": "k"}
                )
                assert asked.status_code != 405 and "Not found" not in asked.text, path
                assert about["summary"].endswith(".") and not about["summary"].startswith(method.upper())
                if "security" in about:
                    asked = await server.http.request(method, re.sub("{.*}", "x", path), json={})
                    assert asked.status_code == 401, path
        chat = found["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        fields = found["components"]["schemas"][chat["$ref"].rpartition("/")[2]]["properties"]
        assert fields["top_logprobs"]["anyOf"][0]["maximum"] == 20
        table = re.findall(r"^\| ([A-Z]+) \| `(.+?)` \|", (ROOT / "docs" / "api.md").read_text(), re.M)
        operations = [(method.upper(), path) for path, methods in found["paths"].items() for method in methods]
        assert sorted(table) == sorted(operations)

    run(model, QWEN_3, ask, api_keys=("k",))


def test_a_server_draws_the_seeds_of_requests_without_one(model: Path) -> None:
    """As Python's generator does, in order; prompts of one request have seeds of their own."""

    async def ask(server: Server) -> None:
        for fields in ({"prompt": ["a", "b"], "n": 2}, {"prompt": "a", "seed": 5, "n": 2}, {"prompt": "a"}):
            answer = await server.http.post("/v1/completions", json={"max_tokens": 4, **fields})
            assert answer.status_code == 200, answer.text
        drawn = Random(7)
        expected = [drawn.getrandbits(63) for _ in range(5)]
        found = [seed for submit in server.submits for seed in submit.seeds]
        assert found == [*expected[:4], 5, 6, expected[4]]

    run(model, QWEN_3, ask, seed=7)
