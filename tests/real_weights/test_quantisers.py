"""Directories that llm-compressor and AutoRound make by the scripts of docs/quantisation.md, against their own forward
pass in transformers."""

import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from ranks import run_ranks
from registry_models import NotAvailable
from safetensors.torch import load_file

from tests.real_weights.models import Model, install, wanted, windows_of

ROOT = Path(__file__).parents[2]
LLM_COMPRESSOR, AUTO_ROUND = re.findall(
    r"^```python\n(.*?)^```$", (ROOT / "docs" / "quantisation.md").read_text(), re.MULTILINE | re.DOTALL
)
TEXT = ROOT / "tilerank" / "launch" / "commands" / "calibration.txt"
CASES = {
    "llm-compressor, W4A16": (LLM_COMPRESSOR, "W4A16"),
    "llm-compressor, FP8": (LLM_COMPRESSOR, "FP8"),
    "AutoRound": (AUTO_ROUND, "2"),
}
"""Scripts with their last argument. Not W8A8: its activations have 8 bits, and the forward pass of the library in bf16
and in fp32 differs by more than 0.3 %."""

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with both libraries, below TILERANK_TEST_MODELS or anew."""
    kept = os.environ.get("TILERANK_TEST_MODELS")
    environment = (Path(kept) if kept else tmp_path_factory.mktemp("made")) / "quantisers"
    found = environment / "bin" / "python"
    try:
        if not found.exists():
            subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        install("torch==2.13.0", "llmcompressor", "auto-round", python=found)
    except NotAvailable as missing:
        pytest.skip(str(missing))
    return found


@pytest.mark.parametrize("name", CASES)
def test_perplexity_is_that_of_the_library(
    model_of: Callable[[str], Model], python: Path, name: str, tmp_path: Path
) -> None:
    """Within 0.3 %: their forward pass has the same codes and scales, and inputs as the settings say."""
    (script, argument), out, model = CASES[name], tmp_path / "out", model_of("smollm2").directory
    subprocess.run([python, "-c", script, model, TEXT, out, argument], check=True, cwd=tmp_path)
    made = next(out.rglob("config.json")).parent
    windows = windows_of(model)
    losses = load_file(wanted(made, tmp_path / "losses.safetensors", windows=windows, python=python))["losses"]
    right = math.exp(losses.double().mean())
    for tp in (1, 3):
        job = {"model": str(made), "windows": windows}
        found = run_ranks(tp, "tests.real_weights.rank_jobs:perplexity", kwargs=job, timeout=1200)[0]
        print(f"{name}, TP {tp}: perplexity {found:.4f} of {len(losses)} tokens, of the library {right:.4f}")
        assert found == pytest.approx(right, rel=3e-3)
