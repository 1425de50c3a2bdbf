"""Calibration files: by which columns quantising weighs errors on every rank, and which files are refused."""

from pathlib import Path

import pytest
import torch
from quantized.cases import SMALL
from safetensors.torch import load_file, save_file
from tiny import make_checkpoint

from tilerank.kernels.reference.weight_formats import quantise_int4
from tilerank.loader.calibration import Calibration, write_calibration
from tilerank.loader.card import read_card
from tilerank.loader.checkpoint import Checkpoint
from tilerank.loader.errors import CheckpointError
from tilerank.loader.quantization_config import Quantization
from tilerank.loader.weight_formats import weight_formats
from tilerank.loader.weights import load_weights
from tilerank.parallel.parameters import Layer
from tilerank.parallel.sharding import Sharding
from tilerank.runtime.models.decoder import Decoder
from tilerank.runtime.models.gated_mlp import GatedMLP
from tilerank.runtime.rank.registry import build_model

DOWN = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen2", tmp_path_factory.mktemp("calibration"), **SMALL)


def load(model_dir: Path, calibration: Path, rank: int = 0, size: int = 1) -> Layer:
    card = read_card(model_dir)
    formats = weight_formats(None, torch.bfloat16, Quantization("int4", 32, False))
    model = build_model(card, Sharding(rank, size, torch.bfloat16, None, formats=formats))
    checkpoint = Checkpoint(model_dir)
    load_weights(model, checkpoint, ignore=model.ignore, progress=False, calibration=Calibration(calibration))
    return model


def test_errors_are_weighed_by_the_columns_of_each_rank(plain: Path, tmp_path: Path) -> None:
    """A column counts by its mean square, of their mean, and a hundredth. Other projections are as without a file."""
    tensors = {name: part for path in plain.glob("*.safetensors") for name, part in load_file(path).items()}
    weight = tensors[f"{DOWN}.weight"].float()
    means = torch.linspace(0, 3, weight.shape[1]).square()
    write_calibration(tmp_path / "file", {DOWN: means})
    codes, scales, _ = quantise_int4(weight, 32, False, means / means.mean() + 0.01)
    expected = (codes.float() - 8) * scales.repeat_interleave(32, 1)
    assert not torch.equal(quantise_int4(weight, 32, False)[1], scales)
    for rank, size in ((0, 1), (0, 2), (1, 2), (2, 3)):
        model = load(plain, tmp_path / "file", rank, size)
        assert isinstance(model, Decoder)
        mlp = model.layers[0].mlp
        assert isinstance(mlp, GatedMLP)
        span = mlp.down.span
        found = mlp.down.weight.packed.unpack()[:, : span.real]
        assert torch.equal(found, expected[:, span.start : span.stop])


def test_files_of_other_models_or_kinds_are_refused(plain: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    with pytest.raises(CheckpointError, match=r"file: cannot be read: No such file"):
        load(plain, file)
    save_file({DOWN: torch.ones(64)}, file)
    with pytest.raises(CheckpointError, match=r"file: expected a file of `tilerank calibrate`, found one of kind None"):
        load(plain, file)
    file.write_bytes(b"{}")
    with pytest.raises(CheckpointError, match=r"file: expected a safetensors file, found 2 bytes"):
        load(plain, file)
    write_calibration(file, {DOWN: torch.ones(3)})
    with pytest.raises(CheckpointError, match=rf"file: {DOWN}: expected shape \[\d+\], found \[3\]"):
        load(plain, file)
    write_calibration(file, {"other": torch.ones(3)})
    with pytest.raises(CheckpointError, match="file: expected a file of this model, found none of its projections: "):
        load(plain, file)
    for vector in (torch.zeros(3), torch.tensor([1.0, torch.nan]), -torch.ones(3), torch.ones(3).double()):
        write_calibration(file, {DOWN: vector})
        with pytest.raises(CheckpointError, match=f"file: {DOWN}: expected mean squares in float32, finite and"):
            load(plain, file)
