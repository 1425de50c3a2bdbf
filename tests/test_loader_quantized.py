"""Quantised checkpoints: every rank holds exactly the weights that its rectangles stand for, whatever the cut."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from encode import CASES, make
from safetensors.torch import load_file, save_file

from tilerank.loader.checkpoint import Checkpoint
from tilerank.loader.config import load_config
from tilerank.loader.errors import CheckpointError
from tilerank.loader.formats import weight_formats
from tilerank.loader.quantization import Quantization
from tilerank.loader.weights import load_weights
from tilerank.parallel.layer import Sharding
from tilerank.runtime.registry import model_class


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quantized")


@pytest.mark.parametrize("strategy", ["pad", "split"])
@pytest.mark.parametrize("case", [case for case in CASES if "act-order" not in case])
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


def load(model_dir: Path) -> None:
    config = load_config(model_dir)
    sharding = Sharding(0, 1, torch.bfloat16, None, formats=weight_formats(config, torch.bfloat16, None))
    model = model_class(config.model_type)(config, sharding)
    load_weights(model, Checkpoint(model_dir), ignore=model.ignore, progress=True, quantization=config.quantization)


def test_act_order_is_said_and_needs_to_be_announced(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model_dir = make("gptq-act-order", base)[0]
    load(model_dir)
    assert "held as floats, not in int4 (gptq): columns that share a scale lie apart (desc_act)" in caplog.text
    raw = json.loads((model_dir / "config.json").read_text())
    silent = shutil.copytree(model_dir, tmp_path / "silent")
    raw["quantization_config"]["desc_act"] = False
    (silent / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="found another order, without desc_act"):
        load(silent)


def test_a_group_that_does_not_exist_is_refused(base: Path, tmp_path: Path) -> None:
    model_dir = shutil.copytree(make("gptq-act-order", base)[0], tmp_path / "wrong")
    tensors = load_file(model_dir / "model.safetensors")
    name = next(name for name in tensors if name.endswith("q_proj.g_idx"))
    tensors[name][5] = 6  # of 192 columns in groups of 32
    save_file(tensors, model_dir / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{name}: expected groups from 0 to 5, found others"):
        load(model_dir)


def test_a_scale_that_the_format_does_not_hold_is_refused_by_name(base: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(make("awq-128", base)[0], copy)
    tensors = load_file(copy / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.scales"
    tensors[name][0, 0] = float("inf")
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor .*q_proj\.scales: .*found inf"):
        load(copy)


QUANTISED = [Quantization("int8"), Quantization("fp8"), Quantization("int4", 32), Quantization("int4", 128)]


@pytest.mark.parametrize("asked", QUANTISED, ids=str)
@pytest.mark.parametrize("case", ["awq-128", "moe-fp8"])
def test_every_rank_quantises_its_rectangles(base: Path, case: str, asked: Quantization) -> None:
    """From the plain checkpoint: no weight is further from its own than half a step of its format, in its block."""
    model_dir = make(case, base)[1]
    plain = load_file(model_dir / "model.safetensors")
    config = load_config(model_dir)
    formats = weight_formats(config, torch.bfloat16, asked)
    for rank, size in ((0, 1), (1, 2), (2, 3)):
        model = model_class(config.model_type)(
            config, Sharding(rank, size, torch.bfloat16, None, "pad", formats=formats)
        )
        load_weights(model, Checkpoint(model_dir), ignore=model.ignore, progress=False)
        for piece in model.pieces():
            if piece.place is not None and piece.elements:
                weight, row = piece.place()
                wanted = plain[piece.name][piece.index]
                found = weight.unpack()[row : row + len(wanted), : wanted.shape[1]].float()
                is_head = piece.name in ("lm_head.weight", "model.embed_tokens.weight")
                assert within_half_a_step(found, wanted, INT8 if is_head else asked), piece.name


INT8 = Quantization("int8")


def within_half_a_step(found: torch.Tensor, wanted: torch.Tensor, asked: Quantization) -> bool:
    """For every element, of int4 in the mean square of a group, which may trade range for smaller steps."""
    error = (found - wanted).abs()
    if asked.codes == "int8":
        return bool((error <= wanted.abs().amax(1, keepdim=True) * 1.01 / 254).all())
    if asked.codes == "fp8":  # 3 bits of mantissa, and subnormals of 2^-9 of a scale that is the block's largest / 448
        return bool((error <= wanted.abs() * 1.01 / 16 + wanted.abs().max() / 448 * 2**-9).all())
    assert asked.group is not None
    tail = -wanted.shape[1] % asked.group
    groups, errors = (torch.nn.functional.pad(x, (0, tail)).unflatten(1, (-1, asked.group)) for x in (wanted, error))
    step = (groups.amax(2).clamp(min=0) - groups.amin(2).clamp(max=0)) / 15
    return bool((errors.square().mean(2).sqrt() <= step * 1.02 / 2).all())
