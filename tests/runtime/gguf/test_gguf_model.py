"""A GGUF file against a directory with the same values, which the conformance tests compare with transformers."""

from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch import Tensor

from tests.runtime.gguf.tiny_llama import HIDDEN, LAYERS, VOCAB, make
from tilerank.loader.calibration import Calibration, write_calibration
from tilerank.loader.card import read_card
from tilerank.loader.checkpoint import Checkpoint
from tilerank.loader.quantization_config import Quantization
from tilerank.loader.tokenizer import Tokenizer
from tilerank.loader.weight_formats import weight_formats
from tilerank.loader.weights import load_weights
from tilerank.parallel.parameters import WeightParameter
from tilerank.parallel.sharding import Sharding
from tilerank.runtime.rank.registry import build_model

IDS = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(0)).tolist()
DTYPES = ["float32", "bfloat16", "bfloat16"]
ACTIVATION_BITS = [16, 16, 8]


def logits(model: Path, tp: int, forms: int = len(DTYPES)) -> list[np.ndarray]:
    """Return the logits of the first forms, each a dtype and the bits of activations."""
    kwargs = {"model": str(model), "dtypes": DTYPES[:forms], "activation_bits": ACTIVATION_BITS[:forms], "ids": IDS}
    return [np.array(flat) for flat in run_ranks(tp, "tests.runtime.gguf.tiny_llama:score", kwargs=kwargs)[0]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    return make(tmp_path_factory.mktemp("gguf"))


def test_logits_are_those_of_the_stored_values(models: tuple[Path, Path, Path]) -> None:
    file, directory, _ = models
    exact, rounded = logits(directory, 1, forms=2)
    error_of_bf16 = np.abs(rounded - exact).mean()
    for tp in (1, 3):
        plain, blocks, quantised = logits(file, tp)
        assert np.abs(plain - exact).max() <= 1e-4, tp
        assert np.abs(blocks - exact).mean() <= error_of_bf16, tp  # which rounds the weights, too
        # Codes have 7 bits below the largest of a group, bf16 numbers 8 below each.
        assert np.abs(quantised - exact).mean() <= 4 * error_of_bf16, tp


def quantised(model_dir: Path, calibration: Path) -> dict[str, Tensor]:
    """Return the values of the int4 weights of the second of four ranks."""
    card = read_card(model_dir)
    formats = weight_formats(card.quantization, torch.bfloat16, Quantization("int4", 32))
    model = build_model(card, Sharding(1, 4, torch.bfloat16, None, formats=formats))
    load_weights(
        model,
        Checkpoint(model_dir),
        ignore=model.ignore,
        progress=False,
        quantization=card.quantization,
        calibration=Calibration(calibration),
    )
    parameters = {rectangle.name: rectangle.parameter for rectangle in model.rectangles()}
    held = {name: one for name, one in parameters.items() if isinstance(one, WeightParameter) and one.is_quantised}
    return {name: one.place(0)[0].unpack() for name, one in held.items()}


@pytest.mark.usefixtures("restored")
def test_floats_are_quantised_as_those_of_a_directory(models: tuple[Path, Path, Path], tmp_path: Path) -> None:
    write_calibration(tmp_path / "calibration", {"model.layers.0.self_attn.q_proj": torch.rand(HIDDEN)})
    wanted, found = (quantised(model, tmp_path / "calibration") for model in models[1:])
    assert len(found) >= 7 * LAYERS and found.keys() == wanted.keys()
    for name, values in found.items():
        assert values.any() and torch.equal(values, wanted[name]), name


def test_no_matrix_is_held_as_floats(models: tuple[Path, Path, Path]) -> None:
    """Gate and up have different types in the file, and so have queries, keys and values; the table is no head."""
    card = read_card(models[0])
    formats = weight_formats(card.quantization, torch.bfloat16, None)
    model = build_model(card, Sharding(1, 3, torch.bfloat16, None, formats=formats))
    matrices = {each.name: each.parameter for each in model.rectangles() if len(each.shape) == 2}
    assert len(matrices) == 7 * LAYERS + 2
    for name, one in matrices.items():
        assert isinstance(one, WeightParameter) and one.is_quantised, name


def test_a_tokenizer_and_a_chat_template_come_from_the_file(models: tuple[Path, Path, Path]) -> None:
    tokenizer = Tokenizer(models[0])
    assert tokenizer.encode("abc</s>") == [tokenizer.token_id("abc"), VOCAB - 1]
    assert tokenizer.encode("</s> 12") == [VOCAB - 1, *(tokenizer.token_id(t) for t in "Ġ12")]
    assert tokenizer.end_token_ids() == (VOCAB - 1,)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}]) == "a</s>"
