"""A real model against transformers: SmolLM2-135M, whose 9 heads and 3 KV heads do not divide."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import run_ranks

from tests.real_weights import smollm2

NEW_TOKENS = 12
SUBJECTS = ("a lighthouse", "the first snow", "a broken clock", "two rivers", "an old map", "the night train")
FRAMES = (
    "Write one sentence about {}.",
    "The best thing about {} is",
    "Question: Why do people remember {}?\nAnswer:",
    "def describe():\n    # what is {}?\n    return",
    "<|im_start|>user\nTell me about {} in three words.<|im_end|>\n<|im_start|>assistant\n",
    "Once upon a time there was {}, and nobody knew",
    "{}",
    "1. {}\n2.",
    "Translate to French: {} =",
    "In the long history of the village, which had seen kings and floods and one very patient mathematician, {} was",
)
PROMPTS = [frame.format(subject) for frame in FRAMES for subject in SUBJECTS]

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's directory below TILERANK_TEST_MODELS, which keeps it for the next run, or below a temporary one."""
    kept = os.environ.get("TILERANK_TEST_MODELS")
    out = Path(kept) / "smollm2-135m" if kept else tmp_path_factory.mktemp("smollm2-135m")
    try:
        return smollm2.make(out)
    except smollm2.NotAvailable as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def wanted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What transformers computes of the prompts in fp32."""
    folder = tmp_path_factory.mktemp("wanted")
    job = {"model": str(model), "prompts": PROMPTS, "new_tokens": NEW_TOKENS, "out": str(folder / "wanted.safetensors")}
    (folder / "job.json").write_text(json.dumps(job))
    subprocess.run([sys.executable, smollm2.__file__, "answer", str(folder / "job.json")], check=True)
    return folder / "wanted.safetensors"


@pytest.mark.parametrize("tp", [1, 2, 3, 5, 6])
def test_fp32_equals_transformers(model: Path, wanted: Path, tp: int) -> None:
    """Compare the logits of every answer's tokens, and greedy tokens of 60 prompts in one batch."""
    job = {"model": str(model), "wanted": str(wanted), "new_tokens": NEW_TOKENS}
    found = run_ranks(tp, "tests.real_weights.smollm2_ranks:run", kwargs=job, timeout=1200)[0]
    print(f"TP {tp}: largest error of a logit {found['logit_error']:.1e}")
    assert found["prompts"] == len(PROMPTS) == 60
    assert found["logit_error"] <= 1e-4
    assert found["wrong_tokens"] == []
