"""`tilerank calibrate`: the inputs of the demo model on two ranks, and a model that is quantised by them."""

from pathlib import Path

import pytest
import torch
from command import DEMO, run
from safetensors.torch import load_file

from tilerank.loader.card import read_card
from tilerank.loader.tokenizer import Tokenizer

TEXT = "The cat sat on the mat.\n\nIt was a sunny day, and nobody wanted to go home."


def test_inputs_of_a_text(tmp_path: Path) -> None:
    """The inputs of the first layer are normalised embeddings; the file has every projection but the head."""
    (tmp_path / "text").write_text(TEXT)
    result = run(
        "calibrate", DEMO, "--text", tmp_path / "text", "-o", tmp_path / "file", "--dtype", "float32", "--tp", 2
    )
    assert result.status == 0, result.err
    found, weights = load_file(tmp_path / "file"), load_file(DEMO / "model.safetensors")
    assert {name for name in weights if "_proj.weight" in name} <= {f"{name}.weight" for name in found}
    ids = Tokenizer(DEMO).encode(TEXT)
    x = weights["model.embed_tokens.weight"].double()[ids]
    x *= (x.square().mean(1, keepdim=True) + read_card(DEMO).fields.number("rms_norm_eps", 0, 1)).rsqrt()
    x *= weights["model.layers.0.input_layernorm.weight"].double()
    for part in "qkv":
        mean = found[f"model.layers.0.self_attn.{part}_proj"].double()
        torch.testing.assert_close(mean, x.square().mean(0), rtol=1e-4, atol=0)
    int4 = ("--quantization", "int4", "--prompt", "The cat", "--max-new-tokens", 4)
    result = run("generate", DEMO, *int4, "--calibration", tmp_path / "file")
    assert result.status == 0 and result.out.strip(), result.err


@pytest.mark.parametrize("codes", [(), ("--quantization", "int8")])
def test_a_file_that_nothing_uses_is_refused(codes: tuple[str, ...], tmp_path: Path) -> None:
    result = run("generate", DEMO, "--prompt", "a", *codes, "--calibration", tmp_path / "file")
    assert result.status == 1 and "--calibration needs --quantization int4 or fp8" in result.err
