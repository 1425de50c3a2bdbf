"""FP8, AWQ and GPTQ files of Qwen3-VL, whose towers are floats, against transformers with the dequantised weights."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from encode import encode
from ranks import run_ranks
from tiny import make_checkpoint

DIMS = {"hidden": 192, "heads": 6, "kv_heads": 3, "head_dim": 64, "inter": 352, "layers": 4, "vocab": 777}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8": ("fp8", {}),
    "awq": ("awq", {"group": 32}),
    "gptq": ("gptq", {"group": 32, "sym": True}),
}
TP = [1, 3]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For each case: the checkpoint `case`, the dequantised one `case-plain`, and what transformers makes of that."""
    out = tmp_path_factory.mktemp("quantised-vision")
    floats = make_checkpoint("qwen3_vl", out, seed=5, **DIMS)
    models = []
    for case, (layout, options) in CASES.items():
        encode(floats, out / case, layout, keep=("model.visual",), **options)
        models.append({"name": f"{case}-plain", "family": "qwen3_vl", "seed": 5})
    # A public AWQ file has its settings beside those of the language model.
    config = json.loads((out / "awq" / "config.json").read_text())
    config["text_config"]["quantization_config"] = config.pop("quantization_config")
    (out / "awq" / "config.json").write_text(json.dumps(config))
    job = out / "job.json"
    job.write_text(json.dumps({"out": str(out), "models": models, "new_tokens": 1}))
    script = Path(__file__).parents[1] / "support" / "tools" / "reference_vl.py"
    subprocess.run([sys.executable, str(script), str(job)], check=True, stdout=subprocess.DEVNULL, timeout=300)
    for case in CASES:
        shutil.copy(out / f"{case}-plain.safetensors", out / f"{case}.safetensors")
    return out


@pytest.mark.parametrize("tp", TP)
def test_logits_of_text_and_pictures(made: Path, tp: int) -> None:
    """The errors against fp32 are those of bf16 activations: encodings of the tower and logits are about as exact as
    those of transformers in bf16 (test_vision_models.py; test_quantized.py for the factor of the logits)."""
    models = [name for case in CASES for name in (case, f"{case}-plain")]
    job = {"out": str(made), "models": models, "strategies": ["auto"], "dtypes": ["bfloat16"], "new_tokens": 1}
    found = {case["model"]: case for case in run_ranks(tp, "vision_exact:run", kwargs=job, timeout=300)[0]}
    for case in CASES:
        coded, plain = found[case], found[f"{case}-plain"]
        assert coded["tower"] == plain["tower"], "the tower has the bits of the plain one"
        assert len(coded["prompts"]) == 5
        assert mean(coded) <= 1.25 * mean(plain), case
        assert mean(plain) <= 1.1 * mean(plain, "hf_mean"), case


def mean(case: dict[str, Any], key: str = "mean") -> float:
    errors: list[float] = [prompt[key] for prompt in case["prompts"]]
    return sum(errors) / len(errors)
