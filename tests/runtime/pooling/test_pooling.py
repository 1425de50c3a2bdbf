"""Vectors and scores of texts against transformers, on several ranks and in chunks."""

import random
from pathlib import Path

import pytest
import torch
from batching import single_engine
from ranks import run_ranks

from tests.runtime.pooling.pooled_models import make_models, right_values
from tests.runtime.pooling.pooling_job import PARAMS, values
from tilerank.runtime.lead.engine import Engine, Request
from tilerank.runtime.lead.sampling import SamplingParams
from tilerank.runtime.protocol.errors import RequestError
from tilerank.runtime.protocol.prompt import Prompt

CAUSAL = ("last", "all-modes", "labelled", "scored")
DRAW = random.Random(0)
TEXTS = [[DRAW.randrange(500) for _ in range(length)] for length in (1, 5, 33, 70, 21)]
TEXTS.append(TEXTS[3][:64] + TEXTS[4])  # shares two pages with another


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pooled")
    make_models(out)
    return out


@pytest.fixture(scope="module")
def right(models: Path) -> dict[str, list[torch.Tensor]]:
    return {name: right_values(models / name, TEXTS) for name in (*CAUSAL, "both-sides")}


@pytest.mark.parametrize(("tp", "isa"), [(1, None), (2, "reference"), (3, None), (6, None)])
def test_vectors_and_scores(models: Path, right: dict[str, list[torch.Tensor]], tp: int, isa: str | None) -> None:
    """The largest difference of a number of a vector is 1e-5, and that of a score or a sum is 1e-4 of it."""
    names = [*CAUSAL, "both-sides"] if tp in (1, 3) else ["last", "both-sides"]
    kwargs = {"models": [str(models / name) for name in names], "texts": TEXTS, "rows": [90, 2048]}
    found, *_ = run_ranks(
        tp, "tests.runtime.pooling.pooling_job:run", kwargs=kwargs, env={"TILERANK_ISA": isa} if isa else {}
    )
    for name in names:
        small, whole = (found[f"{models / name}:{rows}"] for rows in (90, 2048))
        for ours, cut, theirs in zip(whole, small, right[name], strict=True):
            vector = torch.tensor(ours)
            bound = 1e-5 if name in ("last", "both-sides") else 1e-4
            assert (vector - theirs).abs().max() <= bound * max(1.0, float(theirs.abs().max())), name
            assert isa or torch.equal(vector, torch.tensor(cut)), name


@pytest.fixture(scope="module")
def engine(models: Path) -> Engine:
    return single_engine(models / "last", dtype=torch.float32, max_total_tokens=256)


def test_many_texts_leave_no_page(engine: Engine) -> None:
    """Texts of four times as many tokens as the cache has run in turn, and nothing of them stays in it."""
    texts = TEXTS * 5
    assert values(engine, texts) == [values(engine, [text])[0] for text in TEXTS] * 5
    pool = engine.scheduler.kinds[0]
    assert pool.prefix([*TEXTS[3]]) == []  # type: ignore[attr-defined]


def test_dimensions_are_cut_before_the_vector_is_normalised(engine: Engine) -> None:
    whole, cut = (torch.tensor(values(engine, TEXTS[2:3], dimensions)[0]) for dimensions in (0, 32))
    assert torch.allclose(cut, torch.nn.functional.normalize(whole[:32], dim=0), atol=1e-7)


def test_a_cancelled_text_and_requests_for_text(engine: Engine) -> None:
    with pytest.raises(RequestError, match="the request: the model embeds texts, and generates none"):
        engine.submit(Request(Prompt([1]), SamplingParams()))
    engine.cancel(engine.submit(Request(Prompt(TEXTS[0]), PARAMS)))
    assert not engine.busy
