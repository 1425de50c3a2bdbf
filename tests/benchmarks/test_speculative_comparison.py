"""The comparison of drafts: rates of known answers, the loop of llama.cpp's program, the script on the demo model."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
from command import DEMO, Result

from benchmarks.compare_speculative import decoding
from benchmarks.peers import run_llama_cpp
from tests.benchmarks.test_comparisons import script
from tilerank.launch.errors import LaunchError
from tilerank.loader.tokenizer import Tokenizer

PEER = """
import json, sys, time
workload = json.load(open(sys.argv[1]))
each = 2 if workload["drafts"] else 1  # tokens in each of its steps, which take half a second
events = [
    [[i, 1.0 + 0.5 * -(-n // each)] for n in range(case["new_tokens"] + 1) for i, _ in enumerate(case["prompts"])]
    for case in workload["cases"]
]
result = {"version": "1", "load_s": 0, "ready_at": time.monotonic(), "events": events}
json.dump(result, open(sys.argv[2], "w"))
"""


def test_rates_count_after_the_first_tokens() -> None:
    """The second answer begins at 1.5 s. Two steps then yield five tokens of both, a third one two of the first."""
    events = [(0, 1.0), (0, 1.5), (1, 1.5), (0, 2.0), (0, 2.0), (1, 2.0), (0, 2.75), (1, 2.75), (0, 3.0), (0, 3.0)]
    assert decoding("x", "free", events) == {"tokens_per_s": 7 / 1.5, "tokens_per_step": 7 / (2 + 2 + 1)}
    with pytest.raises(LaunchError, match="x: task free: expected answers of two tokens or more, found one"):
        decoding("x", "free", [(0, 1.0), (1, 1.0)])


class Context:
    """Stands in for that of llama.cpp: the next token depends on all that is cached of a sequence."""

    def __init__(self) -> None:
        self.cached: dict[int, list[int]] = {}
        self.steps = 0

    def decode(self, rows: list[run_llama_cpp.Row]) -> list[int]:
        self.steps += 1
        chosen = []
        for sequence, position, token, needs_logits in rows:
            cached = self.cached.setdefault(sequence, [])
            assert position == len(cached), "no token is missing, and none is left of a wrong draft"
            cached.append(token)
            if needs_logits:
                chosen.append(next_token(cached))
        return chosen

    def cut(self, sequence: int, tokens: int) -> None:
        del self.cached[sequence][tokens:]


def next_token(text: list[int]) -> int:
    return (sum(text) + len(text) ** 2) % 7


def plain(prompt: list[int], new_tokens: int, end: int) -> list[int]:
    text = list(prompt)
    while len(text) < len(prompt) + 1 + new_tokens and text[len(prompt) :][-1:] != [end]:
        text.append(next_token(text))
    return text


@pytest.mark.parametrize("right", [None, 0, 1, 2], ids=["plain", "wrong", "half right", "right"])
def test_the_answers_of_llama_cpp_are_those_of_plain_decoding(right: int | None) -> None:
    """right: how many of two drafts are those that come next; None for no drafts."""
    prompts, end = [[3, 1, 4], [1, 5], [2, 6, 5, 3]], 6

    def lookup(text: Any) -> Any:
        given = text.tolist()
        future = plain(given, 2, -1)[len(given) :][:2]
        drafts = [token if i < (right or 0) else token + 1 for i, token in enumerate(future)]
        return numpy.array(drafts)

    context: Any = Context()
    events = run_llama_cpp.answer(context, prompts, 20, [end], None if right is None else lookup)
    for sequence, prompt in enumerate(prompts):
        wanted = plain(prompt, 20, end)
        assert sum(one == sequence for one, _ in events) == len(wanted) - len(prompt)
        assert context.cached[sequence][: len(wanted) - 1] == wanted[:-1]
    longest = max(len(plain(prompt, 20, end)) - len(prompt) for prompt in prompts)
    assert context.steps == 1 + -(-(longest - 1) // (1 + (right or 0)))


def test_the_script(tmp_path: Path) -> None:
    """A peer whose plain steps take half a second, and yield two tokens with drafts; llama.cpp gives it its name."""
    program, interpreter, file = tmp_path / "peer.py", tmp_path / "python", tmp_path / "rows.json"
    program.write_text(PEER)
    interpreter.write_text(f'#!/bin/sh\n[ "$2" = -c ] || exec {sys.executable} {program} "$3" "$4"\n')
    interpreter.chmod(0o755)
    options = ("--requests", 1, "--new-tokens", 5, "--repeat", 1, "--tp", 1, "--scratch", tmp_path, "--json", file)
    done: Result = script("compare_speculative", DEMO, "--with", f"llama.cpp={interpreter},vllm", *options)
    assert (done.status, done.errors) == (0, []), done.err
    assert "vllm: skipped, not installed" in done.out
    rows = json.loads(file.read_text())
    tasks = ("edit", "quote", "json", "free")
    assert [(row["task"], row["system"]) for row in rows] == [(t, s) for t in tasks for s in ("tilerank", "llama.cpp")]
    for ours, theirs in zip(rows[::2], rows[1::2], strict=True):
        assert (theirs["plain_tokens_per_s"], theirs["drafted_tokens_per_s"], theirs["ratio"]) == (2, 4, 2)
        assert (theirs["tokens"], theirs["tokens_per_step"], theirs["requests"]) == (5, 2, 1)
        assert theirs["plain_speedup"] == ours["plain_tokens_per_s"] / 2
        assert theirs["drafted_speedup"] == ours["drafted_tokens_per_s"] / 4
        assert ours["drafted_speedup"] == ours["plain_speedup"] == 1
        assert ours["plain_limit_share"] > 0 and ours["limit_share"] > 0
    workload = json.loads((tmp_path / "llama.cpp" / "workload.json").read_text())
    assert workload["drafts"] and [case["new_tokens"] for case in workload["cases"]] == [4] * 8
    tokenizer = Tokenizer(DEMO)
    for case in workload["cases"]:
        assert case["end_token_ids"] == [4095]
        (prompt,) = case["prompts"]
        assert "Aldbrook" in tokenizer.decode(prompt)
