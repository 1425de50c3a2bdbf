"""Widths cut inside of the blocks of a quantised checkpoint: ranks hold its very values, and sums are right."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tilerank.loader.checkpoint import Checkpoint
from tilerank.loader.fields import Fields
from tilerank.loader.stored_quantization import find_quantization
from tilerank.loader.weight_formats import weight_formats
from tilerank.loader.weights import load_weights
from tilerank.parallel.experts import ParallelExperts
from tilerank.parallel.parameters import Layer
from tilerank.parallel.sharding import Sharding
from tilerank.runtime.models.gated_mlp import GatedMLP

HIDDEN, WIDTH, EXPERTS = 128, 640, 3
CONFIGS: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    "int8": {"quant_method": "w8a8_int8"},
}


class Both(Layer):
    """A dense MLP and experts."""

    def __init__(self, sharding: Sharding) -> None:
        self.mlp = GatedMLP("mlp", HIDDEN, WIDTH, sharding)
        self.experts = ParallelExperts("experts", HIDDEN, WIDTH, EXPERTS, sharding, top_k=2)


def write(folder: Path, layout: str) -> dict[str, Tensor]:
    """Write a checkpoint and return its values."""
    draw = torch.Generator().manual_seed(7)
    stored, values = {}, {}
    for module in ("mlp", *(f"experts.{expert}" for expert in range(EXPERTS))):
        shapes = {"gate_proj": (WIDTH, HIDDEN), "up_proj": (WIDTH, HIDDEN), "down_proj": (HIDDEN, WIDTH)}
        for projection, (n, k) in shapes.items():
            name = f"{module}.{projection}.weight"
            numbers = torch.randn(n, k, generator=draw)
            if layout == "fp8":
                codes = (numbers * 100).to(torch.float8_e4m3fn)
                scales = torch.rand(n // 128, k // 128, generator=draw) / 1e3
                stored[f"{name}_scale_inv"] = scales
                values[name] = codes.float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
            else:
                codes = (numbers * 40).clamp(-127, 127).to(torch.int8)
                stored[f"{name}_scale"] = torch.rand(n, 1, generator=draw) / 400
                values[name] = codes.float() * stored[f"{name}_scale"]
            stored[name] = codes
    save_file(stored, folder / "model.safetensors")
    return values


@pytest.mark.parametrize("layout", CONFIGS)
def test_ranks_hold_the_values_of_the_checkpoint(tmp_path: Path, restored: None, layout: str) -> None:
    """640 columns are 5 blocks of 128; three ranks have 224, 224 and 192 of them."""
    values, sums = write(tmp_path, layout), torch.zeros(5, HIDDEN)
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    config = find_quantization(tmp_path, Fields(tmp_path / "config.json", CONFIGS[layout]))
    formats = weight_formats(config, torch.bfloat16, None)
    for rank, size in enumerate((224, 224, 192)):
        held = Both(Sharding(rank, 3, torch.bfloat16, None, formats=formats))
        load_weights(held, Checkpoint(tmp_path), ignore=lambda _: False, progress=False, quantization=config)
        mine = slice(224 * rank, 224 * rank + size)
        assert held.mlp.gate_up.span == held.experts.span and held.experts.span.size == size
        assert torch.equal(held.mlp.gate_up.weight.part(1).unpack(), values["mlp.up_proj.weight"][mine])
        assert torch.equal(held.mlp.down.weight.packed.unpack(), values["mlp.down_proj.weight"][:, mine])
        for expert in range(EXPERTS):
            parts = [held.experts.gate_up.packed.unpack(expert, part) for part in (0, 1)]
            assert torch.equal(parts[0], values[f"experts.{expert}.gate_proj.weight"][mine])
            assert torch.equal(parts[1], values[f"experts.{expert}.up_proj.weight"][mine])
            down = held.experts.down.packed.unpack(expert)
            assert torch.equal(down, values[f"experts.{expert}.down_proj.weight"][:, mine])
        sums += held.mlp(x).float()
    gate, up, down = (values[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    wanted = (torch.nn.functional.silu(x.float() @ gate.T) * (x.float() @ up.T)) @ down.T
    assert (sums - wanted).abs().max() <= 0.03 * wanted.abs().max()  # bf16, and int8 activations
