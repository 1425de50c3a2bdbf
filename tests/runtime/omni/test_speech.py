"""The talker and the code predictor of Qwen3-Omni against transformers: logits of first codes, and all codes."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from rungs import COMPILED, RUNGS

from tests.runtime.omni.speech_cases import CASES, FRAMES, NEW_TOKENS

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
