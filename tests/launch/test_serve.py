"""`tilerank serve` with the official client, under concurrent, interrupted and hostile requests.

The expected text comes from transformers.
"""

import argparse
import asyncio
import http.client
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from command import DEMO, await_true, endless_copy, run
from serving import PROMPTS, Server, greedy, log_likelihoods, serving, tokenizer

from tilerank.launch.commands import plan
from tilerank.launch.host.neighbours import pinned_by_others
from tilerank.launch.host.topology import read_topology


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--tp", 2) as running:
        yield running


def test_a_completion(server: Server) -> None:
    answer = server.client().completions.create(model="demo-lm", prompt=PROMPTS[0], max_tokens=24, temperature=0)
    assert answer.choices[0].text == greedy(PROMPTS[0], 24)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    prompt_tokens = len(tokenizer().encode(PROMPTS[0]))
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt_tokens, 24)
    by_ids = server.client().completions.create(
        model="demo-lm", prompt=tokenizer().encode(PROMPTS[0]), max_tokens=24, temperature=0
    )
    assert by_ids.choices[0].text == answer.choices[0].text


def test_a_stream_is_the_same_text_in_pieces(server: Server) -> None:
    stream = server.client().completions.create(
        model="demo-lm",
        prompt=PROMPTS[0],
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    texts = [chunk.choices[0].text for chunk in chunks if chunk.choices]
    assert "".join(texts) == greedy(PROMPTS[0], 24) and len(texts) > 5
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 24


def test_a_chat(server: Server) -> None:
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who came?"}]
    prompt = tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    arguments: dict[str, Any] = {"model": "demo-lm", "messages": messages, "max_tokens": 20, "temperature": 0}
    whole = server.client().chat.completions.create(**arguments)
    assert whole.choices[0].message.content == greedy(prompt, 20)
    assert whole.choices[0].message.role == "assistant"
    chunks = list(server.client().chat.completions.create(**arguments, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "Who came?"}]}]
    count = server.post("/tokenize", {"messages": parts}).json()["count"]
    alone = tokenizer().apply_chat_template(messages[1:], add_generation_prompt=True)
    assert count == len(alone["input_ids"])


def test_seeds_choices_and_log_probabilities(server: Server) -> None:
    client = server.client()

    def texts(seed: int) -> list[str]:
        answer = client.completions.create(model="demo-lm", prompt=PROMPTS[:2], max_tokens=8, n=2, seed=seed)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        return [choice.text for choice in answer.choices]

    assert texts(1) == texts(1) != texts(2)
    assert len(set(texts(1))) == 4
    answer = client.completions.create(model="demo-lm", prompt=PROMPTS[0], max_tokens=4, temperature=0, logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None and logprobs.token_logprobs is not None
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert logprobs.top_logprobs is not None and [len(top) for top in logprobs.top_logprobs] == [3] * 4
    for token, value, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert top[token] == value == max(top.values()) < 0
    chat = client.chat.completions.create(
        model="demo-lm", messages=[{"role": "user", "content": "Hi"}], max_tokens=3, logprobs=True, top_logprobs=2
    )
    content = chat.choices[0].logprobs and chat.choices[0].logprobs.content
    assert content and [len(entry.top_logprobs) for entry in content] == [2] * 3


def test_prompts_are_scored_as_lm_eval_asks_for_it(server: Server) -> None:
    """A choice's log-likelihood is the sum over its tokens; transformers computes the expected values."""
    contexts = [tokenizer().encode(PROMPTS[0]), tokenizer().encode(PROMPTS[3] + " and")]
    prompts = [[*context, *tokenizer().encode(" upon the earth")] for context in contexts]
    expected = log_likelihoods(prompts)
    shape = {"temperature": 0, "logprobs": 1, "seed": 1234, "echo": True}
    for extra in (1, 0):
        body = {"model": "demo-lm", "prompt": prompts, "max_tokens": extra} | shape
        answer = server.post("/v1/completions", body).json()
        for choice, ids, values in zip(answer["choices"], prompts, expected, strict=True):
            logprobs = choice["logprobs"]
            assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
            assert [len(values) for values in logprobs.values()] == [len(ids) + extra] * 4
            assert logprobs["token_logprobs"][1 : len(ids)] == pytest.approx(values, abs=1e-4)
            assert choice["text"].startswith(tokenizer().decode(ids)) and choice["finish_reason"] == "length"
            best = [max(top.values()) for top in logprobs["top_logprobs"][1:]]
            assert all(value <= top for value, top in zip(logprobs["token_logprobs"][1:], best, strict=True))
        assert answer["usage"]["completion_tokens"] == 2 * extra
    body = {"model": "demo-lm", "prompt": PROMPTS[0], "max_tokens": 0, "prompt_logprobs": 2}
    (choice,) = server.post("/v1/completions", body).json()["choices"]
    assert choice["text"] == "" and choice["prompt_logprobs"][0] is None
    for id, value, entry in zip(contexts[0][1:], expected[0], choice["prompt_logprobs"][1:], strict=False):
        assert entry[str(id)]["logprob"] == pytest.approx(value, abs=1e-4)
        assert {1, 2} <= {one["rank"] for one in entry.values()} and len(entry) <= 3
    assert server.gauge("kv_cache_usage_perc") == 0


def test_usage_counts_cached_tokens(server: Server) -> None:
    body = {"prompt": [[7] * 100], "max_tokens": 1}
    used = [server.post("/v1/completions", body).json()["usage"]["prompt_tokens_details"] for _ in range(2)]
    assert used == [{"cached_tokens": 0}, {"cached_tokens": 96}]
    other = server.post("/v1/completions", body | {"cache_salt": "mine"}).json()["usage"]
    assert other["prompt_tokens_details"] == {"cached_tokens": 0}
    assert server.gauge("prefix_cache_hits_total") == 96


def test_metrics_count_what_was_answered(server: Server) -> None:
    """A prompt of 9 tokens with two answers of 5, and a request that names another model."""
    growth = {
        "request_prompt_tokens_sum": 9,
        "request_generation_tokens_sum": 10,
        "request_queue_time_seconds_count": 2,
        "request_time_per_output_token_seconds_count": 2,
        r'request_success_total\{finished_reason="length"\}': 2,
        r'request_errors_total\{code="404"\}': 1,
    }
    found = []
    for _ in range(2):  # a counter with a label is there once it counts
        body = {"prompt": [7] * 9, "max_tokens": 5, "n": 2, "ignore_eos": True}
        assert server.post("/v1/completions", body).status_code == 200
        assert server.post("/v1/completions", body | {"model": "other"}).status_code == 404
        found.append({name: server.gauge(name) for name in growth})
    assert {name: found[1][name] - found[0][name] for name in growth} == growth


def test_a_text_ends_before_a_stop_string_that_tokens_share(server: Server) -> None:
    whole = greedy(PROMPTS[0], 24)
    stop = whole[9:14]
    answer = server.client().completions.create(
        model="demo-lm", prompt=PROMPTS[0], max_tokens=24, temperature=0, stop=[stop, "never said"]
    )
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_many_streams_of_mixed_length(server: Server) -> None:
    """Each gets the same text as alone, and no page stays in use."""

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="any", timeout=300, max_retries=0) as client:

            async def one(i: int) -> str:
                text = ""
                async for chunk in await client.completions.create(
                    model="demo-lm", prompt=PROMPTS[i % 6], max_tokens=4 + i % 20, temperature=0, stream=True
                ):
                    text += chunk.choices[0].text
                return text

            return await asyncio.gather(*(one(i) for i in range(48)))

    found = asyncio.run(all_of_them())
    for i, text in enumerate(found):
        whole = greedy(PROMPTS[i % 6], 24)
        assert text and (whole.startswith(text) or whole == text)
        assert len(tokenizer().encode(text)) >= (4 + i % 20) // 2
    await_true(lambda: server.gauge("kv_cache_usage_perc") == 0, 60, "pages are still in use")
    assert server.gauge("num_requests_running") == 0


def test_a_disconnected_request_is_cancelled(server: Server) -> None:
    before = server.gauge("generation_tokens_total")
    for stream in (True, False):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
        body = {"prompt": PROMPTS[0], "max_tokens": 3500, "ignore_eos": True, "stream": stream}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        if stream:
            assert connection.getresponse().readline().startswith(b"data: ")
        else:
            await_true(lambda: server.gauge("num_requests_running") == 1, 120, "it does not run")
        connection.sock.close() if connection.sock else connection.close()
        connection.close()
        await_true(lambda: server.gauge("num_requests_running") == 0, 120, "the request is still running")
    assert server.gauge("kv_cache_usage_perc") == 0
    assert server.gauge("generation_tokens_total") - before < 2 * 3500


def test_a_disconnected_waiting_request_is_cancelled(tmp_path: Path) -> None:
    """Another request fills the cache, so that the prompt of this one is never computed."""
    model = endless_copy(tmp_path / "model")
    with serving("--tp", 1, "--max-total-tokens", 1 << 16, "--model-path", model) as server:

        def ask(**body: Any) -> http.client.HTTPConnection:
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            return connection

        first = ask(prompt=[5] * 2000, max_tokens=60000, ignore_eos=True)
        await_true(lambda: server.gauge("num_requests_running") == 1, 120, "it does not run")
        for stream in (True, False):
            second = ask(prompt=[6] * 64000, max_tokens=1000, stream=stream)
            await_true(lambda: server.gauge("num_requests_waiting") == 1, 120, "it is not in line")
            second.close()
            await_true(lambda: server.gauge("num_requests_waiting") == 0, 30, "it stays in line")
            assert server.gauge("num_requests_running") == 1
            assert server.gauge("prompt_tokens_total") == 2000
        first.close()


HOSTILE: list[tuple[str, Any, int, str]] = [
    ("/v1/completions", b"", 400, "JSON"),
    ("/v1/completions", b"\xff\xfe", 400, "JSON"),
    ("/v1/completions", b"[" * 50000, 400, "recursion|JSON"),
    ("/v1/completions", b"[" * 100000, 413, "at most 65,536 strings, objects and lists"),
    ("/v1/completions", b'{"prompt": "x", "temperature": NaN}', 400, "temperature"),
    ("/v1/completions", b'{"prompt": "x", "top_p": 1e999}', 400, "top_p"),
    ("/v1/completions", {"prompt": "x", "n": 1 << 40}, 400, "n: "),
    ("/v1/completions", {"prompt": ["x"] * 64, "n": 16}, 400, "128 choices"),
    ("/v1/completions", {"prompt": "x", "max_tokens": -1}, 400, "max_tokens"),
    ("/v1/completions", {"prompt": "x", "logprobs": 10**6}, 400, "logprobs"),
    ("/v1/completions", {"prompt": "x", "logit_bias": {"999999": 1}}, 400, "logit_bias: expected token ids"),
    ("/v1/completions", {"prompt": "x", "stop": [""]}, 400, "stop"),
    ("/v1/completions", {"prompt": "x", "stop": ["a"] * 1000}, 400, "stop"),
    ("/v1/completions", {"prompt": "x", "seed": 1 << 70}, 400, "seed"),
    ("/v1/completions", {"prompt": [4096]}, 400, "expected token ids from 0 to 4095, found 4096"),
    ("/v1/completions", {"prompt": [-1]}, 400, "prompt"),
    ("/v1/completions", {"prompt": []}, 400, "prompt"),
    ("/v1/completions", {"prompt": [5] * 5000}, 400, "5000 tokens, but the context length is 4096"),
    ("/v1/completions", {"prompt": "x", "model": "other"}, 404, "no model 'other'"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "echo": True}, 400, "echo"),
    ("/v1/completions", {"prompt": "x", "stream_options": {"include_usage": True}}, 400, "stream_options"),
    ("/v1/chat/completions", {"messages": []}, 400, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "user"}] * 5000}, 400, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2}, 400, "logprobs"),
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}
            ]
        },
        400,
        "content",
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_schema"}},
        400,
        "response_format",
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"messages": "y"}},
        400,
        "chat_template_kwargs: messages cannot be set",
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": {"name": "a b"}}]},
        400,
        "tools.0.function.name",
    ),
    ("/tokenize", {}, 400, "either prompt or messages"),
    ("/detokenize", {"tokens": [1 << 30]}, 400, "expected token ids below"),
    ("/nothing", {}, 404, "Not found: POST /nothing\\.$"),
    ("/health", {}, 405, "Method not allowed: POST /health\\.$"),
]


@pytest.mark.parametrize(("path", "body", "status", "says"), HOSTILE)
def test_bad_requests_are_refused_without_side_effects(
    server: Server, path: str, body: Any, status: int, says: str
) -> None:
    answer = server.post(path, body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert re.search(says, error["message"]), error
    assert error["type"] in ("invalid_request_error", "not_found_error")
    assert "/work" not in error["message"] and "Traceback" not in answer.text
    assert server.get("/health_generate").status_code == 200


def test_too_large_a_body_is_not_read_to_its_end(server: Server) -> None:
    assert server.post("/v1/completions", b" " * (33 << 20)).status_code == 413
    assert server.get("/health").status_code == 200


def test_lone_surrogates_and_control_characters(server: Server) -> None:
    answer = server.post("/v1/completions", b'{"prompt": "a\\ud800b\\u0000c", "max_tokens": 1}')
    assert answer.status_code in (200, 400)
    assert server.get("/health_generate").status_code == 200


def test_tokenize_and_back(server: Server) -> None:
    answer = server.post("/tokenize", {"prompt": PROMPTS[0]}).json()
    assert answer == {"tokens": tokenizer().encode(PROMPTS[0]), "count": len(answer["tokens"]), "max_model_len": 4096}
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": PROMPTS[0]}


def test_models_and_version(server: Server) -> None:
    models = server.client().models.list()
    assert [model.id for model in models] == ["demo-lm"]
    assert set(server.get("/version").json()) == {"version"}


def test_a_key_is_required() -> None:
    with serving("--tp", 1, "--served-model-name", "tiny", env={"TILERANK_API_KEY": "secret"}) as server:
        assert server.get("/v1/models").status_code == 401
        assert server.get("/metrics", headers={"Authorization": "Bearer wrong"}).status_code == 401
        models = server.get("/v1/models", headers={"Authorization": "Bearer secret"}).json()
        assert [model["id"] for model in models["data"]] == ["tiny"]
        assert server.get("/health").status_code == 200


def test_a_port_that_is_taken(server: Server) -> None:
    result = run("serve", DEMO, "--port", server.port)
    assert result.status == 1
    assert result.errors == [
        f"tilerank: error: --host 127.0.0.1 --port {server.port} cannot be listened on: Address already in use"
    ]


@pytest.mark.skipif(len(read_topology().usable_cores()) < 2, reason="ranks that share a core are not pinned")
def test_another_server_would_share_its_cores(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    pids = [server.running.rank_pid(rank) for rank in range(2)]
    pinned = pinned_by_others()
    for pid in pids:
        assert pid is not None
        assert os.sched_getaffinity(pid) <= pinned[pid], "the main thread is the first worker"
    parser = argparse.ArgumentParser()
    plan.add_arguments(parser)
    assert plan.run(parser.parse_args([str(DEMO), "--tp", "2", "--max-total-tokens", "64"])) == 0
    named = re.search(r"Note: threads of another tilerank \(processes ([\d, ]+)\) are pinned", capsys.readouterr().out)
    assert named is not None
    assert set(map(str, pids)) <= set(named[1].split(", "))
