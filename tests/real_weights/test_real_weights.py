"""Real models against transformers, whose weights are the dequantised values of GGUF files in fp32.

SmolLM2-135M, whose 9 heads and 3 KV heads do not divide, as a GGUF file and as a directory.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from ranks import run_ranks
from registry_models import NotAvailable, fetch
from safetensors.torch import load_file

from tests.real_weights import oracle
from tilerank.launch.bench.scoring.text import DEFAULT_TEXT
from tilerank.loader.tokenizer import Tokenizer

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
WINDOW, WINDOWS = 1024, 4

pytestmark = pytest.mark.long


@dataclass(frozen=True)
class Model:
    """A GGUF file and a directory with its values."""

    file: Path
    directory: Path

    def wanted(self, out: Path, prompts: list[str], windows: list[list[int]]) -> Path:
        """Return a file with what transformers computes (oracle.py)."""
        job = {"model": str(self.directory), "prompts": prompts, "windows": windows, "new_tokens": NEW_TOKENS}
        path = out.with_suffix(".json")
        path.write_text(json.dumps(job | {"out": str(out)}))
        subprocess.run([sys.executable, oracle.__file__, "answer", str(path)], check=True)
        return out


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """Return what finds a model below TILERANK_TEST_MODELS, which keeps it for the next run, or makes it anew."""

    @cache
    def find(name: str) -> Model:
        kept = os.environ.get("TILERANK_TEST_MODELS")
        out = Path(kept) / name if kept else tmp_path_factory.mktemp(name)
        try:
            file = fetch(name, out)
            return Model(file, _directory(file, out))
        except NotAvailable as missing:
            pytest.skip(str(missing))

    return find


@pytest.fixture(scope="module")
def answers_of(model_of: Callable[[str], Model], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return what finds the answers of transformers to the prompts."""

    @cache
    def find(name: str) -> Path:
        return model_of(name).wanted(tmp_path_factory.mktemp("wanted") / f"{name}.safetensors", PROMPTS, [])

    return find


def _directory(file: Path, out: Path) -> Path:
    """Return the directory of the values of a file. Raises NotAvailable."""
    if (directory := out / "model-fp32").is_dir():
        return directory
    packages = out / "packages"
    install = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*install, "--target", str(packages), "gguf", "accelerate"], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        raise NotAvailable(f"gguf and accelerate cannot be installed: {reason}")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")])}
    convert = [sys.executable, oracle.__file__, "convert", str(file), str(directory)]
    subprocess.run(convert, check=True, env=environment)
    return directory


CASES = [
    *(("smollm2", "directory", tp) for tp in (1, 2, 3, 5, 6)),
    *(("smollm2", "file", tp) for tp in (1, 2, 3, 6)),
]


@pytest.mark.parametrize(("name", "form", "tp"), CASES)
def test_fp32_equals_transformers(
    model_of: Callable[[str], Model], answers_of: Callable[[str], Path], name: str, form: str, tp: int
) -> None:
    """Compare the logits of every answer's tokens, and greedy tokens of all prompts in one batch."""
    model, wanted = model_of(name), answers_of(name)
    path = model.file if form == "file" else model.directory
    job = {"model": str(path), "wanted": str(wanted), "new_tokens": NEW_TOKENS}
    found = run_ranks(tp, "tests.real_weights.rank_jobs:answer", kwargs=job, timeout=1200)[0]
    print(f"{name}, {form}, TP {tp}: largest error of a logit {found['logit_error']:.1e}")
    assert found["prompts"] == len(PROMPTS) == 60
    assert found["logit_error"] <= 1e-4
    assert found["wrong_tokens"] == []


def test_perplexity_of_a_file_is_that_of_its_values(model_of: Callable[[str], Model], tmp_path: Path) -> None:
    """With blocks as they are stored and activations of 16 bits, within 0.1 % of the fp32 forward."""
    model = model_of("smollm2")
    ids = Tokenizer(model.file).encode(DEFAULT_TEXT.read_text())[: WINDOW * WINDOWS]
    windows = [ids[first : first + WINDOW] for first in range(0, len(ids), WINDOW)]
    losses = load_file(model.wanted(tmp_path / "losses.safetensors", [], windows))["losses"]
    wanted = math.exp(losses.double().mean())
    for tp in (1, 3):
        job = {"model": str(model.file), "windows": windows}
        found = run_ranks(tp, "tests.real_weights.rank_jobs:perplexity", kwargs=job, timeout=1200)[0]
        print(f"TP {tp}: perplexity {found:.4f} of {len(losses)} tokens, of the fp32 forward {wanted:.4f}")
        assert found == pytest.approx(wanted, rel=1e-3)
