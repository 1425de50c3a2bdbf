"""bench serve: metrics of completions of known timing, and the command on the demo model."""

import argparse
import json
import socket
import subprocess
import sys
from collections.abc import Sequence

import pytest
from command import DEMO, SOON_S, await_true, run

from tilerank.launch.bench import embeddings
from tilerank.launch.bench.serve import CompletionTiming, measure, rows_of, same_prefix_share, table


def test_metrics_of_completions_of_known_timing() -> None:
    """Prefill takes 2 ms for each letter that is not cached, decode 10 ms for each token."""
    cached: set[str] = set()

    def complete(texts: Sequence[str], new_tokens: int) -> list[CompletionTiming]:
        completions = []
        for text in texts:
            letters = len(text.split()) - (100 if text[:199] in cached else 0)
            cached.add(text[:199])
            completions.append(CompletionTiming(0.002 * letters, 0.002 * letters + 0.01 * (new_tokens - 1), new_tokens))
        return completions

    args = argparse.Namespace(streams=4, prompt_tokens=10, new_tokens=11, prefix_tokens=100, repeat=3)
    metrics = measure(complete, args)
    assert metrics == pytest.approx(
        {
            "first_token_s": 0.02,
            "one_tokens_per_s": 11 / 0.12,
            "all_tokens_per_s": 4 * 11 / 0.12,
            "new_prefix_s": 0.248,
            "same_prefix_s": 0.048,
        }
    )
    assert same_prefix_share(metrics) == pytest.approx(48 / 248)
    slower = metrics | {"first_token_s": 0.0215, "all_tokens_per_s": 330.0}
    rows = rows_of(metrics, slower)
    assert [row["ratio"] for row in rows] == pytest.approx([1.075, 1, 0.9, 1, 1])
    lines = table(rows)
    assert lines[1].split()[-6:] == ["20.0", "ms", "21.5", "ms", "+1.5", "ms"]
    assert lines[3].split()[-3:] == ["366.7", "330.0", "0.900x"]


def test_the_command() -> None:
    cases = ("--streams", 3, "--prompt-tokens", 20, "--new-tokens", 4, "--prefix-tokens", 64, "--repeat", 1)
    result = run("bench", "serve", DEMO, "--dtype", "float32", "--tp", 2, *cases, "--json")
    assert result.status == 0, result.err
    report = json.loads(result.out)
    assert [row["what"] for row in report["rows"]] == [
        "first_token_s",
        "one_tokens_per_s",
        "all_tokens_per_s",
        "new_prefix_s",
        "same_prefix_s",
    ]
    assert all(row["ratio"] == row["http"] / row["offline"] > 0 for row in report["rows"])
    assert "tokens/s, all streams" in result.err


def test_prompts_beyond_the_context_are_refused_before_ranks_start() -> None:
    result = run("bench", "serve", DEMO, "--tp", 1, "--prefix-tokens", 4096)
    expected = "--prompt-tokens, --new-tokens and --prefix-tokens: expected at most 4096 positions, found 4121"
    assert (result.status, result.errors) == (1, [f"tilerank: error: {expected}"])


def test_the_server_ends_with_the_benchmark() -> None:
    code = (
        "import os, signal, sys\n"
        "from urllib.parse import urlsplit\n"
        "from tilerank.launch.serving.own_server import own_server\n"
        f"with own_server([{str(DEMO)!r}]) as address:\n"
        "    print(urlsplit(address).port, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=SOON_S)

    def is_listening() -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", int(done.stdout))) == 0

    await_true(lambda: not is_listening(), SOON_S, "the server still runs")


def test_vectors_of_texts() -> None:
    """A text takes 1 ms for each letter, and 2 ms in all if it is alone."""

    def embed(texts: Sequence[str]) -> float:
        return 0.001 * sum(len(text.split()) for text in texts) + (0.002 if len(texts) == 1 else 0)

    args = argparse.Namespace(streams=4, prompt_tokens=10, repeat=3)
    assert embeddings.measure(embed, args) == pytest.approx({"one_text_s": 0.012, "texts_tokens_per_s": 1000.0})
    cases = ("--task", "embed", "--dtype", "float32", "--streams", 3, "--prompt-tokens", 20, "--repeat", 1)
    result = run("bench", "serve", DEMO, *cases, "--json")
    assert result.status == 0, result.err
    rows = json.loads(result.out)["rows"]
    assert [row["what"] for row in rows] == ["one_text_s", "texts_tokens_per_s"]
    assert all(row["ratio"] == row["http"] / row["offline"] > 0 for row in rows)
    assert "tokens/s, all texts" in result.err
    assert "no tokens are drafted: the model embeds texts" in result.err
