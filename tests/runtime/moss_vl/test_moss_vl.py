"""MOSS-VL against its reference, on tiny checkpoints whose heads and widths do not divide: pictures, video and text."""

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from vision_exact import mean, of_dtype

NEW_TOKENS = 8
TP = [1, 2, 3, 6]
MODELS: list[dict[str, Any]] = [
    {  # the tower of make_tiny.py has 4 heads and 136 columns: of 6 ranks, the last have none
        "name": "moss-6-3",
        "seed": 3,
        "heads": 6,
        "kv_heads": 3,
        "head_dim": 24,
        "hidden": 144,
        "inter": 200,
        "vocab": 777,
        "layers": 8,
    },
    {
        "name": "moss-biases",
        "seed": 4,
        "heads": 4,
        "kv_heads": 2,
        "hidden": 96,
        "inter": 136,
        "vocab": 700,
        "layers": 5,
        "config": {"attention_bias": True},
    },
]

Case = dict[str, Any]
Run = Callable[..., list[list[Case]]]  # of every case: what each rank found


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with checkpoints and with what moss_vl_ref.py makes of them (reference_moss.py)."""
    out = tmp_path_factory.mktemp("moss")
    job = out / "job.json"
    job.write_text(json.dumps({"out": str(out), "models": MODELS, "new_tokens": NEW_TOKENS}))
    script = Path(__file__).parents[2] / "support" / "tools" / "reference_moss.py"
    subprocess.run([sys.executable, str(script), str(job)], check=True, stdout=subprocess.DEVNULL, timeout=300)
    return out


@pytest.fixture(scope="module")
def run(reference: Path) -> Run:
    """All cases of so many ranks, in one start of them."""

    @cache
    def run(tp: int, isa: str) -> list[list[Case]]:
        job: dict[str, Any] = {"out": str(reference), "models": [MODELS[0]["name"]], "new_tokens": NEW_TOKENS}
        # Plain torch takes many times as long.
        job |= {"strategies": ["pad"] if isa else ["pad", "split"] if tp > 1 else ["split"], "dtypes": ["float32"]}
        if tp == 2 and not isa:
            job["models"] = [model["name"] for model in MODELS]
        if tp == 3:
            job["dtypes"] = ["float32", "bfloat16"]
        env = {"TILERANK_ISA": isa} if isa else {}
        ranks = run_ranks(tp, "vision_exact:run", kwargs=job, env=env, timeout=300)
        return [list(found) for found in zip(*ranks, strict=True)]

    return run


RUNS = [pytest.param((tp, ""), id=f"{tp}") for tp in TP] + [pytest.param((2, "reference"), id="2-reference")]


@pytest.mark.parametrize("ranks", RUNS)
def test_encodings_in_fp32_equal_the_reference(run: Run, ranks: tuple[int, str]) -> None:
    """Three pictures and five frames of a video, with their separators, on every rank."""
    for case in of_dtype(run(*ranks), "float32"):
        for rank in case:
            assert len(rank["tower"]) == 4
            assert max(errors["max"] for errors in rank["tower"]) <= 1e-4, rank


@pytest.mark.parametrize("ranks", RUNS)
def test_logits_and_greedy_tokens_in_fp32_equal_the_reference(run: Run, ranks: tuple[int, str]) -> None:
    """Text alone, one picture, two with text between, a video, and pictures in a row before a video. Logits of every
    position, those before the first picture included, and tokens of one batch of all prompts."""
    for case in of_dtype(run(*ranks), "float32"):
        assert len(case[0]["prompts"]) == 5
        assert max(errors["max"] for errors in case[0]["prompts"]) <= 1e-4, case[0]
        assert case[0]["wrong_tokens"] == [], case[0]


def test_bf16_is_as_exact_as_the_reference(run: Run) -> None:
    """As in test_vision_models.py."""
    for case in of_dtype(run(3, ""), "bfloat16"):
        towers, prompts = case[0]["tower"], case[0]["prompts"]
        assert mean(towers, "mean") <= 1.1 * mean(towers, "hf_mean"), case[0]
        assert max(e["max"] for e in towers) <= 1.5 * max(e["hf_max"] for e in towers), case[0]
        assert mean(prompts, "mean") <= 1.1 * mean(prompts, "hf_mean"), case[0]


@pytest.mark.parametrize("tp", TP[1:])
def test_all_ranks_hold_the_same_bits(run: Run, tp: int) -> None:
    """Every sum over the ranks and every gathered logit, of encodings and of steps."""
    for case in run(tp, ""):
        assert case[0]["collectives"] > 0
        assert len({(rank["digest"], rank["collectives"]) for rank in case}) == 1, case[0]
