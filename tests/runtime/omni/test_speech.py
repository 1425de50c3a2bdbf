"""The talker and the code predictor of Qwen3-Omni against transformers: logits of first codes, and all codes."""

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from rungs import COMPILED, RUNGS

START, END = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
CASES: dict[str, list[Any]] = {
    "text": [["text", f"{START}Say hello.{END}"]],
    "media": [
        ["text", f"<|im_start|>system\nBe kind.<|im_end|>\n{START}"],
        ["image", 90, 60],
        ["audio", 9000],
        ["text", f"Do they fit?{END}"],
    ],
    "turns": [["text", f"{START}One?{END}Yes.<|im_end|>\n{START}Two, and three?{END}"]],
}
"""A prompt of one turn; media after a system prompt, which the talker does not read; two turns of the user."""
DIMS = {"heads": 6, "kv_heads": 3, "hidden": 112, "vocab": 2000, "experts": 7, "moe_inter": 80}
NEW_TOKENS, FRAMES, SAMPLINGS = 6, 9, 5
"""The talker speaks three tokens and the end of the text, and then goes on."""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of a checkpoint and of what transformers says with it (reference_speech.py)."""
    out = tmp_path_factory.mktemp("speech")
    job = out / "job.json"
    counts = {"new_tokens": NEW_TOKENS, "frames": FRAMES, "samplings": SAMPLINGS}
    job.write_text(json.dumps({"out": str(out), "seed": 5, "dims": DIMS, "cases": CASES, **counts}))
    script = Path(__file__).parents[2] / "support" / "tools" / "reference_speech.py"
    subprocess.run([sys.executable, str(script), str(job)], check=True, stdout=subprocess.DEVNULL, timeout=300)
    return out


Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def run(reference: Path) -> Run:
    """What each of so many ranks found, by rung."""

    @cache
    def run(tp: int, rungs: tuple[str, ...], eager: bool = False) -> list[dict[str, Any]]:
        job = {"out": str(reference), "cases": CASES, "new_tokens": NEW_TOKENS, "frames": FRAMES}
        job |= {"rungs": list(rungs), "eager": eager}
        return run_ranks(tp, "tests.runtime.omni.speech_ranks:run", kwargs=job, timeout=200)

    return run


def check(found: dict[str, Any]) -> None:
    assert set(found["logits"]) == set(CASES)
    assert max(found["logits"].values()) <= 1e-4, found
    assert found["wrong"] == []
    assert found["sampled"]


@pytest.mark.parametrize("rung", RUNGS)
def test_speech_equals_transformers_on_every_rung(run: Run, rung: str) -> None:
    """Greedy frames of prompts of text and media, and a frame whose codes are sampled from given numbers.

    On compiled rungs, a case has the same bits alone and in a batch.
    """
    found = run(1, (rung,) if rung == "reference" else tuple(COMPILED))[0][rung]
    check(found)
    assert found["same_bits"] or rung == "reference"


@pytest.mark.parametrize("tp", [2, 3, 6])
def test_speech_equals_transformers_cut_over_ranks(run: Run, tp: int) -> None:
    """On every rank, with the same bits."""
    ranks = [rank[COMPILED[0]] for rank in run(tp, (COMPILED[0],))]
    for found in ranks:
        check(found)
        assert found["same_bits"]
    assert len({found["digest"] for found in ranks}) == 1


def test_recorded_frames_have_the_bits_of_eager_ones(run: Run) -> None:
    eager, recorded = (run(2, (COMPILED[0],), eager)[0][COMPILED[0]] for eager in (True, False))
    assert eager["digest"] == recorded["digest"]
