"""Quantised checkpoints: every rank holds exactly the weights that its rectangles stand for, whatever the cut."""

from pathlib import Path
from typing import Any

import pytest
import torch
from encode import CASES, make
from safetensors.torch import load_file

from tilerank.loader.checkpoint import Checkpoint
from tilerank.loader.config import load_config
from tilerank.loader.formats import weight_formats
from tilerank.loader.weights import load_weights
from tilerank.parallel.layer import Sharding
from tilerank.runtime.registry import model_class


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quantized")


@pytest.mark.parametrize("strategy", ["pad", "split"])
@pytest.mark.parametrize("case", CASES)
def test_every_rank_holds_its_rectangles(base: Path, case: str, strategy: Any) -> None:
    model_dir, plain_dir = make(case, base)
    plain = load_file(plain_dir / "model.safetensors")
    config = load_config(model_dir)
    formats = weight_formats(config, torch.bfloat16, None)
    for size in (1, 2, 3):
        for rank in range(size):
            sharding = Sharding(rank, size, torch.bfloat16, None, strategy, formats=formats)
            model = model_class(config.model_type)(config, sharding)
            load_weights(
                model, Checkpoint(model_dir), ignore=model.ignore, progress=False, quantization=config.quantization
            )
            for piece in model.pieces():
                if piece.place is None or not piece.elements:
                    continue
                weight, row = piece.place()
                wanted = plain[piece.name][piece.index]
                rows, columns = wanted.shape
                found = weight.unpack()[row : row + rows, :columns].float()
                torch.testing.assert_close(found, wanted, rtol=1e-6 if found.dtype is torch.float32 else 1e-2, atol=0)
