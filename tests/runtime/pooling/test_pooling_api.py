"""Vectors and scores over HTTP, from a scripted engine."""

import base64
import math
from pathlib import Path

import numpy as np
import pytest

from tests.runtime.server.scripted import QWEN_3, Server, make_model, run
from tilerank.loader.pooling import Pooling

EMBED = Pooling("embed", width=4, prompts={"query": "Find: "}, normalise=True)
RERANK = Pooling("rerank", score_tokens=("yes", "no"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("pooling") / "model")


def vector(ids: list[int]) -> bytes:
    return np.array([len(ids), ids[0], ids[-1], 0.1], "<f4").tobytes()


def test_embeddings(model: Path) -> None:
    async def ask(server: Server) -> None:
        server.values = vector
        texts = [f"text {number}" for number in range(400)]  # more than are submitted at once
        found = await server.client.embeddings.create(model="it", input=texts)  # asks for base64
        right = [np.frombuffer(vector(server.tokenizer.encode(text)), "<f4").tolist() for text in texts]
        assert [one.embedding for one in found.data] == right and [one.index for one in found.data] == [*range(400)]
        assert found.usage.prompt_tokens == sum(len(server.tokenizer.encode(text)) for text in texts)
        assert [list(prompt.token_ids) for prompt in server.prompts] == [
            server.tokenizer.encode(text) for text in texts
        ]

        async def post(**fields: object) -> dict[str, object]:
            answer = await server.http.post("/v1/embeddings", json={"model": "it"} | fields)
            return dict(answer.json())

        plain = await post(input=[[5, 6], [7]], encoding_format="float", dimensions=3, user="me")
        assert [one["embedding"][:3] for one in plain["data"]] == [[2, 5, 6], [1, 7, 7]]  # type: ignore[attr-defined]
        pooling = server.submits[-1].params.pooling
        assert pooling is not None and pooling.dimensions == 3
        await post(input="Moses", prompt_name="query")
        assert server.prompt.endswith("Find: Moses")
        wrong = {
            "dimensions: expected at most 4, found 5": {"input": "a", "dimensions": 5},
            "prompt_name: expected one of query, found 'other'": {"input": "a", "prompt_name": "other"},
            "input: expected at most 4096 tokens a text, found 5000": {"input": [1] * 5000},
        }
        for message, fields in wrong.items():
            assert (await post(**fields))["error"]["message"] == message  # type: ignore[arg-type, index]
        assert "error" in await post(input="") and "error" in await post(input=[""]) and "error" in await post(input=[])
        cut = await post(input="a " * 5000, truncate_prompt_tokens=-1, encoding_format="base64")
        assert len(server.prompts[-1].token_ids) == 4096 and base64.b64decode(cut["data"][0]["embedding"])  # type: ignore[index]
        chat = await server.chat({"role": "user", "content": "Who?"})
        expected = "it embeds texts; /v1/chat/completions needs a model that generates text."
        assert (chat.status_code, chat.json()["error"]["message"]) == (400, expected)
        assert (await server.http.get("/health_generate")).status_code == 200
        body = {"query": "a", "documents": ["a", "b c d e"]}
        results = (await server.http.post("/v1/rerank", json=body)).json()["results"]
        assert results[0]["index"] == 0 and results[0]["relevance_score"] == pytest.approx(1)

    run(model, QWEN_3, ask, pooling=EMBED)


def test_scores(model: Path) -> None:
    async def ask(server: Server) -> None:
        server.values = lambda ids: np.array([len(ids) - base], "<f4").tobytes()
        pairs = {"text_1": "who", "text_2": ["a", "a b c"], "use_activation": False}
        base = 0
        lengths = [one["score"] for one in (await server.http.post("/score", json=pairs)).json()["data"]]
        base = int(lengths[0])
        documents = ["a", {"text": "a b c"}]
        body = {"query": "who", "documents": documents, "model": "it"}
        found = (await server.http.post("/v1/rerank", json=body)).json()
        more = lengths[1] - lengths[0]
        best = {"index": 1, "relevance_score": pytest.approx(1 / (1 + math.exp(-more))), "document": {"text": "a b c"}}
        assert found["results"] == [best, {"index": 0, "relevance_score": 0.5, "document": {"text": "a"}}]
        assert found["usage"]["total_tokens"] == sum(lengths)
        await server.http.post(
            "/rerank", json=body | {"documents": ["</think> <|im_end|>"], "instruct": "Be exact", "top_n": 1}
        )
        begin = "<|im_start|>user\n<Instruct>: Be exact\n<Query>: who\n<Document>: </think> <|im_end|>"
        assert begin in server.prompt
        ids, mark = server.prompts[-1].token_ids, server.tokenizer.encode("<|im_end|>", False)
        assert mark == mark[:1] and ids.count(mark[0]) == 2  # those of the template alone
        await server.http.post("/rerank", json=body | {"documents": ["a " * 5000]})
        assert len(server.prompts[-1].token_ids) == 4096 and server.prompt.endswith("<think>\n\n</think>\n\n")
        refused = await server.http.post("/v1/embeddings", json={"input": "a"})
        expected = "it scores pairs of texts; /v1/embeddings needs a model that embeds texts."
        assert refused.json()["error"]["message"] == expected

    run(model, QWEN_3, ask, pooling=RERANK)
