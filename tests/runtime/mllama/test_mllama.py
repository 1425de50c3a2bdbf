"""mllama against transformers, on a tiny checkpoint whose heads and widths do not divide: pictures and text."""

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import row_errors
from ranks import run_ranks
from safetensors.torch import load_file
from vision_exact import mean, of_dtype

from tilerank.parallel.channel import Channel
from tilerank.parallel.group import SingleGroup
from tilerank.parallel.join import Team
from tilerank.runtime.rank.rank_config import RankConfig
from tilerank.runtime.rank.worker import Worker

NEW_TOKENS = 8
TP = [1, 2, 3, 6]
MODEL: dict[str, Any] = {
    "name": "mllama-6-3",  # the tower of make_tiny.py has 4 heads and 136 columns: of 6 ranks, the last have none
    "seed": 3,
    "heads": 6,
    "kv_heads": 3,
    "hidden": 144,
    "inter": 200,
    "vocab": 777,
    "layers": 6,
}

Case = dict[str, Any]
Run = Callable[..., list[list[Case]]]  # of every case: what each rank found


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a checkpoint and with what transformers makes of it (reference_mllama.py)."""
    out = tmp_path_factory.mktemp("mllama")
    job = out / "job.json"
    job.write_text(json.dumps({"out": str(out), "models": [MODEL], "new_tokens": NEW_TOKENS}))
    script = Path(__file__).parents[2] / "support" / "tools" / "reference_mllama.py"
    subprocess.run([sys.executable, str(script), str(job)], check=True, stdout=subprocess.DEVNULL, timeout=300)
    return out


@pytest.fixture(scope="session")
def run(reference: Path) -> Run:
    """All cases of so many ranks, in one start of them."""

    @cache
    def run(tp: int, isa: str) -> list[list[Case]]:
        job: dict[str, Any] = {"out": str(reference), "models": [MODEL["name"]], "new_tokens": NEW_TOKENS}
        if isa:  # plain torch takes many times as long
            job |= {"strategies": ["pad"], "dtypes": ["float32"]}
        else:
            job |= {"strategies": ["pad", "split"] if tp > 1 else ["split"], "dtypes": ["float32", "bfloat16"]}
        env = {"TILERANK_ISA": isa} if isa else {}
        ranks = run_ranks(tp, "vision_exact:run", kwargs=job, env=env, timeout=300)
        return [list(found) for found in zip(*ranks, strict=True)]

    return run


RUNS = [pytest.param((tp, ""), id=f"{tp}") for tp in TP] + [pytest.param((2, "reference"), id="2-reference")]


@pytest.mark.parametrize("ranks", RUNS)
def test_encodings_in_fp32_equal_transformers(run: Run, ranks: tuple[int, str]) -> None:
    """Three pictures, of 2, 3 and 4 tiles, on every rank."""
    for case in of_dtype(run(*ranks), "float32"):
        for rank in case:
            assert len(rank["tower"]) == 3
            assert max(errors["max"] for errors in rank["tower"]) <= 1e-4, rank


@pytest.mark.parametrize("ranks", RUNS)
def test_logits_and_greedy_tokens_in_fp32_equal_transformers(run: Run, ranks: tuple[int, str]) -> None:
    """Text alone, one picture, two with text between, and five of which some follow each other. Logits of every
    position, and tokens of one batch of all prompts, which transformers cannot compute as one."""
    for case in of_dtype(run(*ranks), "float32"):
        assert len(case[0]["prompts"]) == 4
        assert max(errors["max"] for errors in case[0]["prompts"]) <= 1e-4, case[0]
        assert case[0]["wrong_tokens"] == [], case[0]


@pytest.mark.parametrize("tp", TP)
def test_bf16_is_as_exact_as_transformers(run: Run, tp: int) -> None:
    """As in test_vision_models.py."""
    for case in of_dtype(run(tp, ""), "bfloat16"):
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


def test_intermediate_layers_as_transformers_takes_them(reference: Path) -> None:
    """Their outputs, instead of their inputs; one of the layers is the last."""
    wanted = load_file(reference / f"{MODEL['name']}.safetensors")
    found = {}
    for rule in ("meta", "transformers"):
        team = Team(SingleGroup(), Channel(0, None, {}, 10.0))
        options = {"--mllama-intermediate": rule}
        worker = Worker(reference / MODEL["name"], team, RankConfig(dtype=torch.float32, family_options=options))
        _, rows, columns = wanted["media.0.grid"].tolist()
        assert worker.encoder is not None
        *_, encoding = worker.encoder.encode(wanted["media.0.frames"], (1, rows, columns), 1e9)
        assert encoding is not None
        found[rule] = encoding
    for rule, name in (("meta", "media.0.float32"), ("transformers", "outputs")):
        assert row_errors(found[rule], wanted[name]).max() <= 1e-4
    assert row_errors(found["meta"], wanted["outputs"]).max() > 0.01
