"""bench serve: figures from answers of known times, and the command on the demo model."""

import argparse
import json
import socket
import subprocess
import sys
from collections.abc import Sequence

import pytest
from command import DEMO, SOON_S, await_true, run

from tilerank.launch.bench_serve import Answer, measure, rows_of, same_prefix_share, table


def test_figures_from_answers_of_known_times() -> None:
    """A first token takes 2 ms a letter that it has not read before; a token, 10 ms."""
    seen: set[str] = set()

    def ask(texts: Sequence[str], new_tokens: int) -> list[Answer]:
        answers = []
        for text in texts:
            new = len(text.split()) - (100 if text[:199] in seen else 0)
            seen.add(text[:199])
            answers.append(Answer(0.002 * new, 0.002 * new + 0.01 * (new_tokens - 1), new_tokens))
        return answers

    args = argparse.Namespace(streams=4, prompt_tokens=10, new_tokens=11, prefix_tokens=100, repeat=3)
    figures = measure(ask, args)
    assert figures == pytest.approx(
        {
            "first_token_s": 0.02,
            "one_tokens_per_s": 11 / 0.12,
            "all_tokens_per_s": 4 * 11 / 0.12,
            "new_prefix_s": 0.248,
            "same_prefix_s": 0.048,
        }
    )
    assert same_prefix_share(figures) == pytest.approx(48 / 248)
    slower = figures | {"first_token_s": 0.0215, "all_tokens_per_s": 330.0}
    rows = rows_of(figures, slower)
    assert [row["ratio"] for row in rows] == pytest.approx([1.075, 1, 0.9, 1, 1])
    lines = table(rows)
    assert lines[1].split()[-6:] == ["20.0", "ms", "21.5", "ms", "+1.5", "ms"]
    assert lines[3].split()[-5:] == ["366.7", "330.0", "0.900", "of", "it"]


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


def test_what_does_not_fit_is_refused_before_anything_starts() -> None:
    result = run("bench", "serve", DEMO, "--tp", 1, "--prefix-tokens", 4096)
    expected = "--prompt-tokens, --new-tokens and --prefix-tokens: expected at most 4096 positions, found 4121"
    assert (result.status, result.errors) == (1, [f"tilerank: error: {expected}"])


def test_the_server_ends_with_the_benchmark() -> None:
    code = (
        "import os, signal, sys\n"
        "from tilerank.launch.bench_serve import _server\n"
        f"with _server([{str(DEMO)!r}]) as port:\n"
        "    print(port, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=SOON_S)

    def is_served() -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", int(done.stdout))) == 0

    await_true(lambda: not is_served(), SOON_S, "the server goes on")
