"""Weights that a checkpoint stores as parts of other tensors: every rank reads exactly its rectangle of them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized.layouts import encode
from safetensors.torch import load_file, save_file
from tiny import make_checkpoint
from torch import Tensor

from tilerank.kernels.weight_formats import Format, Int8
from tilerank.loader.card import read_card
from tilerank.loader.checkpoint import SINGLE, Checkpoint
from tilerank.loader.errors import CheckpointError
from tilerank.loader.weight_formats import weight_formats
from tilerank.loader.weights import LoadReport, load_weights
from tilerank.parallel.experts import FusedOrder, ParallelExperts
from tilerank.parallel.parameters import Layer, WeightParameter
from tilerank.parallel.sharding import Sharding, WeightFormats
from tilerank.parallel.stacked import QKVParallelLinear
from tilerank.runtime.rank.registry import build_model

COUNT, HIDDEN, WIDTH = 3, 64, 80


def load(model: Layer, model_dir: Path) -> LoadReport:
    return load_weights(model, Checkpoint(model_dir), ignore=lambda name: False, progress=False)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def stored(form: str, gate_up: Tensor, down: Tensor) -> dict[str, Tensor]:
    """gate_up [experts, 2 * width, hidden] and down [experts, hidden, width], as a checkpoint has them."""
    if form == "as in memory":
        return {"x.gate_up_proj": gate_up, "x.down_proj": down}
    if form == "published":
        return {name: t.mT.contiguous() for name, t in stored("as in memory", gate_up, down).items()}
    tensors: dict[str, Tensor] = {}
    for expert in range(len(gate_up)):
        gate, up = gate_up[expert].chunk(2)
        parts = {"gate_proj": gate, "up_proj": up, "down_proj": down[expert]}
        tensors |= {f"x.{expert}.{name}.weight": part.clone() for name, part in parts.items()}
    return tensors


def matrices(model: Layer) -> list[Tensor]:
    """Return what every rectangle of the model has become, by its name."""
    found = {}
    for rectangle in model.rectangles():
        if isinstance(rectangle.parameter, WeightParameter) and rectangle.elements:
            weight, row = rectangle.parameter.place(rectangle.row)
            rows, columns = (part.stop - part.start for part in rectangle.index)
            found[rectangle.name] = weight.unpack()[row : row + rows, :columns]
    return [found[name] for name in sorted(found)]


@pytest.mark.parametrize("order", ["in_out", "out_in"])
@pytest.mark.parametrize("form", ["published", "as in memory"])
@pytest.mark.parametrize("width", [WIDTH, HIDDEN, HIDDEN // 2])
@pytest.mark.parametrize("held", [None, Int8()])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_experts_in_one_tensor(
    tmp_path: Path, order: FusedOrder, form: str, width: int, held: Format | None, size: int
) -> None:
    """The numbers are those of a tensor for each expert. Where shapes leave it open, the published order counts."""
    gate_up, down = random(COUNT, 2 * width, HIDDEN), random(COUNT, HIDDEN, width)
    (tmp_path / "apart").mkdir()
    save_file(stored("apart", gate_up, down), tmp_path / "apart" / SINGLE)
    wanted_form = stored(form, gate_up, down)
    for name, square in (("x.gate_up_proj", 2 * width == HIDDEN), ("x.down_proj", width == HIDDEN)):
        if square and (form == "published") != (order == "in_out"):
            wanted_form[name] = wanted_form[name].mT.contiguous()
    save_file(wanted_form, tmp_path / SINGLE)
    formats = None if held is None else WeightFormats(held, held)
    nbytes = 0
    for rank in range(size):
        sharding = Sharding(rank, size, torch.bfloat16, None, formats=formats)
        together, apart = (
            ParallelExperts("x", HIDDEN, width, COUNT, sharding, top_k=2, fused=fused) for fused in (order, None)
        )
        report = load(together, tmp_path)
        load(apart, tmp_path / "apart")
        assert all(map(torch.equal, matrices(together), matrices(apart)))
        nbytes += report.bytes_read
    assert nbytes == gate_up.nbytes + down.nbytes  # each number is read once, by one rank


def test_experts_that_may_be_in_one_tensor_may_also_be_apart(tmp_path: Path) -> None:
    tensors = stored("apart", random(COUNT, 2 * WIDTH, HIDDEN), random(COUNT, HIDDEN, WIDTH))
    save_file(tensors, tmp_path / SINGLE)
    model = ParallelExperts("x", HIDDEN, WIDTH, COUNT, Sharding(0, 1, torch.bfloat16, None), top_k=2, fused="in_out")
    assert load(model, tmp_path).tensors == 3 * COUNT
    assert all(map(torch.equal, matrices(model), [tensors[name] for name in sorted(tensors)]))


@pytest.mark.parametrize(
    "shape, sentence",
    [
        (None, "{dir}: the model needs tensor x.gate_up_proj, found in no file"),
        ((3, 2, 2), "{file}: tensor x.gate_up_proj: expected shape [3, 64, 160], found [3, 2, 2]"),
    ],
)
def test_experts_that_are_not_there(tmp_path: Path, shape: tuple[int, ...] | None, sentence: str) -> None:
    tensors = stored("published", random(COUNT, 2 * WIDTH, HIDDEN), random(COUNT, HIDDEN, WIDTH))
    del tensors["x.gate_up_proj"]
    save_file(tensors | ({} if shape is None else {"x.gate_up_proj": random(*shape)}), tmp_path / SINGLE)
    model = ParallelExperts("x", HIDDEN, WIDTH, COUNT, Sharding(0, 1, torch.bfloat16, None), top_k=2, fused="in_out")
    with pytest.raises(CheckpointError) as caught:
        load(model, tmp_path)
    assert str(caught.value) == sentence.format(dir=tmp_path, file=tmp_path / SINGLE)


def test_a_number_that_is_not_finite_is_named_by_its_place_in_the_stored_tensor(tmp_path: Path) -> None:
    tensors = stored("published", random(COUNT, 2 * WIDTH, HIDDEN), random(COUNT, HIDDEN, WIDTH))
    tensors["x.gate_up_proj"][2, 5, 100] = float("nan")
    save_file(tensors, tmp_path / SINGLE)
    model = ParallelExperts("x", HIDDEN, WIDTH, COUNT, Sharding(0, 1, torch.bfloat16, None), top_k=2, fused="in_out")
    with pytest.raises(CheckpointError, match=r"tensor x.gate_up_proj: .* found nan at \[2, 5, 100\]"):
        load(model, tmp_path)


def test_pages_of_experts_in_one_tensor_leave_resident_memory(tmp_path: Path) -> None:
    """100 MB, transposed while it is read: a rank holds its part and the pages of one expert."""
    tensors = {
        "x.gate_up_proj": torch.ones(16, 1024, 2048).bfloat16(),
        "x.down_proj": torch.ones(16, 1024, 1024).bfloat16(),
    }
    save_file(tensors, tmp_path / SINGLE)
    checkpoint = Checkpoint(tmp_path)
    checkpoint.read("x.gate_up_proj", (slice(3, 4), slice(0, 1024), slice(0, 1024))).float().sum()
    assert resident(tmp_path / SINGLE) < 8 << 20  # of 64 MB
    model = ParallelExperts("x", 1024, 1024, 16, Sharding(1, 3, torch.bfloat16, None), top_k=2, fused="in_out")
    load_weights(model, checkpoint, ignore=lambda name: False, progress=False)
    assert resident(tmp_path / SINGLE) < 1 << 20


def resident(path: Path) -> int:
    """Return the resident bytes of a mapped file."""
    blocks = Path("/proc/self/smaps").read_text().split(str(path))[1:]
    return sum(int(block.split("Rss:")[1].split()[0]) * 1024 for block in blocks)


@pytest.mark.parametrize("size", [1, 2, 3, 6])
@pytest.mark.parametrize("strategy", ["pad", "split"])
def test_queries_keys_and_values_in_one_tensor(tmp_path: Path, size: int, strategy: Any) -> None:
    """4 heads of 8: each third is cut by heads, and ranks without heads read nothing."""
    weight, bias = random(96, 40), random(96)
    save_file({"a.qkv.weight": weight, "a.qkv.bias": bias}, tmp_path / SINGLE)
    apart = tmp_path / "apart"
    apart.mkdir()
    thirds = zip("qkv", weight.chunk(3), bias.chunk(3), strict=True)
    tensors = {
        f"a.{letter}_proj.{end}": t.clone()
        for letter, *both in thirds
        for end, t in zip(("weight", "bias"), both, strict=True)
    }
    save_file(tensors, apart / SINGLE)
    read = 0
    for rank in range(size):
        sharding = Sharding(rank, size, torch.bfloat16, None, strategy)
        one = QKVParallelLinear("a", 40, 4, 4, 8, sharding, bias=True, projections=("qkv",))
        three = QKVParallelLinear("a", 40, 4, 4, 8, sharding, bias=True)
        read += load(one, tmp_path).bytes_read
        load(three, apart)
        assert torch.equal(one.stacks[0].weight.packed.unpack(), three.stacks[0].weight.packed.unpack())
        assert one.stacks[0].bias is not None and three.stacks[0].bias is not None
        assert torch.equal(one.stacks[0].bias.data, three.stacks[0].bias.data)
    assert read == weight.nbytes + bias.nbytes


@pytest.mark.parametrize("family, nested", [("qwen3_vl", False), ("qwen3_vl_moe", True)])
def test_text_of_fp8_blocks_beside_a_tower_of_floats(tmp_path: Path, family: str, nested: bool) -> None:
    """Published FP8 files have a tensor for each expert, and keep the tower by the names of its modules on disk."""
    dims = {"hidden": 192, "heads": 6, "kv_heads": 3, "head_dim": 64, "inter": 352, "layers": 4, "vocab": 500}
    dims |= {"experts": 3, "topk": 2, "moe_inter": 288}
    floats = make_checkpoint(family, tmp_path, **dims)
    model_dir = tmp_path / "apart"
    shutil.copytree(floats, model_dir, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(experts_apart(floats), model_dir / SINGLE)
    plain_dir = encode(model_dir, tmp_path / "fp8", "fp8", keep=("model.visual",))
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    if nested:
        config["text_config"]["quantization_config"] = config.pop("quantization_config")
        (tmp_path / "fp8" / "config.json").write_text(json.dumps(config))
    plain = load_file(plain_dir / SINGLE)
    card = read_card(tmp_path / "fp8")
    assert card.quantization is not None
    formats = weight_formats(card.quantization, torch.bfloat16, None)
    for rank in range(3):
        model = build_model(card, Sharding(rank, 3, torch.bfloat16, None, formats=formats))
        load_weights(
            model, Checkpoint(tmp_path / "fp8"), ignore=model.ignore, progress=False, quantization=card.quantization
        )
        quantised = set()
        for rectangle in model.rectangles():
            parameter = rectangle.parameter
            if isinstance(parameter, WeightParameter) and rectangle.elements and len(rectangle.shape) == 2:
                weight, row = parameter.place(rectangle.row)
                rows, columns = (part.stop - part.start for part in rectangle.index)
                found = weight.unpack()[row : row + rows, :columns].float()
                torch.testing.assert_close(found, plain[rectangle.name][rectangle.index], rtol=1e-2, atol=0)
                if parameter.is_quantised:
                    quantised.add(rectangle.name)
        assert quantised == {name for name in quantised if name.startswith("model.language_model.layers.")}
        assert len(quantised) >= 4 * 7 - 3


def experts_apart(model_dir: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint, with those of published experts split and transposed."""
    tensors = {}
    for path in model_dir.glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            prefix, _, last = name.rpartition(".")
            if last == "gate_up_proj":
                for expert, both in enumerate(tensor.mT):
                    for projection, part in zip(("gate_proj", "up_proj"), both.chunk(2), strict=True):
                        tensors[f"{prefix}.{expert}.{projection}.weight"] = part.contiguous()
            elif last == "down_proj":
                for expert, matrix in enumerate(tensor.mT):
                    tensors[f"{prefix}.{expert}.down_proj.weight"] = matrix.contiguous()
            else:
                tensors[name] = tensor
    return tensors
