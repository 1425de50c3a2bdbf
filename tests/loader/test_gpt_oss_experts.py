"""gpt-oss's experts as they are stored, in blocks of MXFP4 and as floats: every rank holds the numbers of its part.

The right numbers of blocks are those of transformers' own function."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tilerank.loader.checkpoint import Checkpoint
from tilerank.loader.errors import CheckpointError
from tilerank.loader.fields import Fields
from tilerank.loader.quantization_config import MXFP4
from tilerank.loader.stored_quantization import find_quantization
from tilerank.loader.weight_formats import weight_formats
from tilerank.loader.weights import load_weights
from tilerank.parallel.experts import ParallelExperts
from tilerank.parallel.sharding import Sharding

COUNT, HIDDEN, WIDTH = 3, 64, 160
SETTINGS = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def biases() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    of_gate_up, of_down = (torch.randn(COUNT, n, generator=draw).bfloat16() for n in (2 * WIDTH, HIDDEN))
    return {"x.gate_up_proj_bias": of_gate_up, "x.down_proj_bias": of_down}


def blocks() -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Return random tensors of a checkpoint and their values [experts, in, out]."""
    draw, tensors, values = torch.Generator().manual_seed(0), dict[str, Tensor](), []
    for name, n, k in (("gate_up_proj", 2 * WIDTH, HIDDEN), ("down_proj", HIDDEN, WIDTH)):
        codes = torch.randint(0, 256, (COUNT, n, k // 32, 16), generator=draw, dtype=torch.uint8)
        scales = torch.randint(100, 140, (COUNT, n, k // 32), generator=draw, dtype=torch.uint8)
        tensors |= {f"x.{name}_blocks": codes, f"x.{name}_scales": scales}
        values.append(convert_moe_packed_tensors(codes, scales, dtype=torch.float32))
    gate_up, down = values
    return tensors | biases(), gate_up, down


def held(tmp_path: Path, rank: int, size: int, config: dict[str, Any] | None = None) -> ParallelExperts:
    """Return the experts that a rank loads from `tmp_path`."""
    fields = None if config is None else Fields(tmp_path / "config.json", config)
    stored = find_quantization(tmp_path, fields)
    formats = weight_formats(stored, torch.bfloat16, None)
    sharding = Sharding(rank, size, torch.bfloat16, None, formats=formats)
    experts = ParallelExperts(
        "x", HIDDEN, WIDTH, COUNT, sharding, top_k=2, fused="in_out_turns", biases=True, activation="swiglu_clamped"
    )
    load_weights(experts, Checkpoint(tmp_path), ignore=lambda _: False, progress=False, quantization=stored)
    return experts


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("coded", [True, False], ids=["blocks", "floats"])
def test_ranks_hold_the_numbers_of_their_part(tmp_path: Path, restored: None, coded: bool, size: int) -> None:
    """160 columns are 5 blocks of 32: two ranks have 3 and 2 of them."""
    tensors, gate_up, down = blocks()
    if not coded:
        draw = torch.Generator().manual_seed(2)
        gate_up, down = (torch.randn(values.shape, generator=draw).bfloat16() for values in (gate_up, down))
        tensors = {"x.gate_up_proj": gate_up, "x.down_proj": down, **biases()}
    save_file(tensors, tmp_path / "model.safetensors")
    of_gate_up, of_down = (bias.float() for bias in biases().values())
    columns = 0
    for rank in range(size):
        experts = held(tmp_path, rank, size, SETTINGS if coded else None)
        mine = slice(experts.span.start, experts.span.stop)
        columns += experts.span.size
        assert experts.gate_up_bias is not None and experts.down_bias is not None
        turns = experts.gate_up_bias.data.view(COUNT, -1, 2, 32)
        for expert in range(COUNT):
            for part in (0, 1):
                found = experts.gate_up.packed.unpack(expert, part)
                assert torch.equal(found, gate_up[expert, :, part::2].T[mine])
                bias = turns[expert, :, part].flatten()
                assert torch.equal(bias[: experts.span.size], of_gate_up[expert, part::2][mine])
            assert torch.equal(experts.down.packed.unpack(expert), down[expert].T[:, mine])
        assert torch.equal(experts.down_bias.data, of_down) if rank == 0 else not experts.down_bias.data.numel()
        nbytes = 17 / 32 if coded else 2
        assert experts.gate_up.nbytes() == COUNT * 2 * experts.span.size * HIDDEN * nbytes or size > 1
    assert columns == WIDTH


def test_the_tensors_say_how_experts_are_stored(tmp_path: Path) -> None:
    save_file(blocks()[0], tmp_path / "model.safetensors")
    for config in (None, SETTINGS, {"quant_method": "fp8"}):
        fields = None if config is None else Fields(tmp_path / "config.json", config)
        found = find_quantization(tmp_path, fields)
        assert found is not None and found.scheme == MXFP4 and (found.overrides is None) == (config is SETTINGS)
        assert found.scheme_of("x.2.up_proj") == found.scheme_of("x.0.down_proj") == MXFP4
        assert found.scheme_of("x.3.up_proj") is None and found.scheme_of("lm_head") is None


def test_a_scale_that_is_no_number_is_named(tmp_path: Path, restored: None) -> None:
    tensors = blocks()[0]
    tensors["x.down_proj_scales"][1, 5, 2] = 255
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"x.down_proj_scales: expected finite numbers, found nan at \[1, 5, 2\]"):
        held(tmp_path, 0, 1, SETTINGS)


def test_blocks_without_scales_are_named(tmp_path: Path) -> None:
    tensors = blocks()[0]
    del tensors["x.down_proj_scales"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"the model needs tensor x.down_proj_scales, found in no file"):
        held(tmp_path, 0, 1, SETTINGS)
