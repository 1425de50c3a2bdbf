"""The tensors say how weights are quantised, whatever config.json says; all ranks hold what the codes stand for."""

from pathlib import Path
from typing import Any

import pytest
import torch
from model_configs import write_config
from safetensors.torch import save_file
from torch import Tensor

from tilerank.kernels.weight_formats import BlockInt8, Float, Format, Fp8, TokenInt8
from tilerank.loader.card import read_card
from tilerank.loader.checkpoint import SINGLE, Checkpoint
from tilerank.loader.errors import CheckpointError, ConfigError
from tilerank.loader.weight_formats import weight_formats
from tilerank.loader.weights import load_weights
from tilerank.parallel.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from tilerank.parallel.parameters import Layer
from tilerank.parallel.sharding import Sharding

HIDDEN, WIDTH, EXPERTS = 320, 576, 8  # 576 rows are four blocks and a half
UP, DOWN, GATE = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj", "model.layers.0.mlp.gate"

FP8_CONFIG: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
BLOCKWISE = FP8_CONFIG | {"quant_method": "blockwise_int8"}
NUMBERS = {"num_bits": 8, "type": "int", "symmetric": True}
GROUP = {
    "targets": ["Linear"],
    "weights": NUMBERS | {"strategy": "channel"},
    "input_activations": NUMBERS | {"strategy": "token", "dynamic": True},
}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {"group_0": GROUP},
    "ignore": ["lm_head"],  # not the router, which is stored as floats all the same
}


class Model(Layer):
    """An MLP without its activation, and a router."""

    def __init__(self, sharding: Sharding) -> None:
        self.up = ColumnParallelLinear(UP, HIDDEN, WIDTH, sharding)
        self.gate = ReplicatedLinear(GATE, HIDDEN, EXPERTS, sharding)
        self.down = RowParallelLinear(DOWN, WIDTH, HIDDEN, sharding, span=self.up.span)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def channel_int8(shape: tuple[int, int], scales: torch.dtype) -> tuple[dict[str, Tensor], Tensor]:
    codes = (random(*shape) * 40).clamp(-128, 127).to(torch.int8)
    scale = (random(shape[0], 1).abs() + 0.1).to(scales)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale.float()


def blocks(shape: tuple[int, int], codes: Tensor, scales: torch.dtype) -> tuple[dict[str, Tensor], Tensor]:
    """Element [i, j] has scale [i // 128, j // 128]."""
    size = (-(-shape[0] // 128), -(-shape[1] // 128))
    if scales.itemsize == 1:  # ue8m0
        exponents = torch.randint(0, 254, size, generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
        exponents[0, 0], exponents[-1, -1] = 0, 254
        stored = exponents.view(scales)
        scale = torch.exp2(exponents.double() - 127).float()
    else:
        stored = (random(*size).abs() + 0.1).to(scales)
        scale = stored.float()
    each = scale[torch.arange(shape[0]) // 128][:, torch.arange(shape[1]) // 128]
    return {"weight": codes, "weight_scale_inv": stored}, codes.float() * each


def block_int8(shape: tuple[int, int], scales: torch.dtype) -> tuple[dict[str, Tensor], Tensor]:
    return blocks(shape, channel_int8(shape, torch.float32)[0]["weight"], scales)


def block_fp8(shape: tuple[int, int], scales: torch.dtype) -> tuple[dict[str, Tensor], Tensor]:
    return blocks(shape, random(*shape).to(torch.float8_e4m3fn), scales)


ENCODERS = {"int8": channel_int8, "block_int8": block_int8, "fp8": block_fp8}
SCHEMES = {"int8": ("int8", (1, 0)), "block_int8": ("int8", (128, 128)), "fp8": ("fp8", (128, 128))}
FORMATS: dict[str, type[Format]] = {"int8": TokenInt8, "block_int8": BlockInt8, "fp8": Fp8}


def write(
    out: Path, layout: str, config: dict[str, Any] | None, scales: torch.dtype = torch.float32
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Write a checkpoint; return its tensors, and the values of its weights by name."""
    write_config(out, {} if config is None else {"quantization_config": config})
    tensors: dict[str, Tensor] = {f"{GATE}.weight": random(EXPERTS, HIDDEN).bfloat16()}
    values = {f"{GATE}.weight": tensors[f"{GATE}.weight"].float()}
    for module, shape in ((UP, (WIDTH, HIDDEN)), (DOWN, (HIDDEN, WIDTH))):
        parts, values[f"{module}.weight"] = ENCODERS[layout](shape, scales)
        tensors |= {f"{module}.{end}": part for end, part in parts.items()}
    save_file(tensors, out / SINGLE)
    return tensors, values


def load(model_dir: Path, rank: int = 0, size: int = 1, *, progress: bool = False) -> Model:
    card = read_card(model_dir)
    formats = weight_formats(card.quantization, torch.bfloat16, None)
    model = Model(Sharding(rank, size, torch.bfloat16, None, formats=formats))
    checkpoint = Checkpoint(model_dir)
    load_weights(model, checkpoint, ignore=lambda name: False, progress=progress, quantization=card.quantization)
    return model


CASES: list[tuple[str, dict[str, Any] | None, torch.dtype]] = [
    ("int8", None, torch.float32),
    ("int8", FP8_CONFIG, torch.float32),
    ("int8", {"quant_method": "w8a8_int8"}, torch.float32),
    ("int8", {"quant_method": "int8"}, torch.bfloat16),
    ("int8", {"quant_method": "mystery"}, torch.float16),
    ("int8", COMPRESSED, torch.bfloat16),
    ("int8", COMPRESSED | {"ignore": ["re:.*mlp"]}, torch.float32),  # a list of other names
    ("int8", BLOCKWISE, torch.float32),
    ("block_int8", BLOCKWISE, torch.float32),
    ("block_int8", BLOCKWISE | {"quant_method": "int8"}, torch.bfloat16),
    ("block_int8", None, torch.float32),
    ("block_int8", FP8_CONFIG, torch.float32),
    ("block_int8", {"quant_method": "w8a8_int8"}, torch.uint8),
    ("fp8", FP8_CONFIG, torch.float32),
    ("fp8", FP8_CONFIG | {"scale_fmt": "ue8m0"}, torch.uint8),
    ("fp8", FP8_CONFIG | {"scale_fmt": "ue8m0"}, torch.float8_e8m0fnu),
    ("fp8", FP8_CONFIG | {"modules_to_not_convert": ["model"]}, torch.bfloat16),
    ("fp8", None, torch.float32),
]


@pytest.mark.parametrize(("layout", "config", "scales"), CASES, ids=range(len(CASES)))
def test_every_rank_holds_what_the_codes_stand_for(
    tmp_path: Path, layout: str, config: dict[str, Any] | None, scales: torch.dtype
) -> None:
    _, values = write(tmp_path, layout, config, scales)
    found = read_card(tmp_path).quantization
    assert found is not None and (found.scheme.layout, found.scheme.block) == SCHEMES[layout]
    assert found.scheme_of(UP) == found.scheme_of(DOWN) == found.scheme and found.scheme_of(GATE) is None
    for size in (1, 2, 3):
        for rank in range(size):
            model = load(tmp_path, rank, size)
            part = slice(model.up.span.start, model.up.span.stop)
            assert isinstance(model.up.weight.format, FORMATS[layout])
            assert isinstance(model.down.weight.format, FORMATS[layout])
            assert torch.equal(model.up.weight.packed.unpack(), values[f"{UP}.weight"][part])
            assert torch.equal(model.down.weight.packed.unpack(), values[f"{DOWN}.weight"][:, part])
            assert torch.equal(model.gate.weight.packed.unpack().float(), values[f"{GATE}.weight"])


@pytest.mark.parametrize("layout", ENCODERS)
def test_a_layer_that_the_model_holds_as_floats_is_dequantised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, layout: str
) -> None:
    tensors, values = write(tmp_path, layout, None)
    parts, values[f"{GATE}.weight"] = ENCODERS[layout]((EXPERTS, HIDDEN), torch.float32)
    save_file(tensors | {f"{GATE}.{end}": part for end, part in parts.items()}, tmp_path / SINGLE)
    with caplog.at_level("INFO", "tilerank.loader.weights"):
        model = load(tmp_path, progress=True)
    assert model.gate.weight.format == Float(torch.bfloat16)
    assert torch.equal(model.gate.weight.packed.unpack(), values[f"{GATE}.weight"].bfloat16())
    assert f"held as floats, though quantised: {GATE}.weight" in caplog.text
    quantization = read_card(tmp_path).quantization
    assert quantization is not None
    assert f"quantised weights are {quantization.scheme} by their tensors" in caplog.text


@pytest.mark.parametrize("method", ["awq", "mystery"])
def test_floats_stay_floats_whatever_the_config_says(tmp_path: Path, method: str) -> None:
    """A card is read without torch; settings of no effect are not checked."""
    write_config(tmp_path, {"quantization_config": {"quant_method": method}})
    shapes = {f"{UP}.weight": (WIDTH, HIDDEN), f"{GATE}.weight": (EXPERTS, HIDDEN), f"{DOWN}.weight": (HIDDEN, WIDTH)}
    tensors = {name: random(*shape).bfloat16() for name, shape in shapes.items()}
    save_file(tensors, tmp_path / SINGLE)
    assert read_card(tmp_path).quantization is None
    assert torch.equal(load(tmp_path).up.weight.packed.unpack(), tensors[f"{UP}.weight"])


def test_packed_codes_need_the_config(tmp_path: Path) -> None:
    """qweight of AWQ and of GPTQ differ in the order of their codes only."""
    save_file({f"{UP}.qweight": torch.zeros(8, 8, dtype=torch.int32)}, tmp_path / SINGLE)
    write_config(tmp_path, {})
    with pytest.raises(ConfigError) as caught:
        read_card(tmp_path)
    expected = f"quantization_config: expected that of AWQ or GPTQ for tensor {UP}.qweight, found no such key"
    assert str(caught.value) == f"{tmp_path / 'config.json'}: {expected}"
    write_config(tmp_path, {"quantization_config": FP8_CONFIG})
    with pytest.raises(ConfigError) as caught:
        read_card(tmp_path)
    expected = "quant_method: expected awq or gptq, because the checkpoint has tensors qweight, found 'fp8'"
    assert str(caught.value) == f"{tmp_path / 'config.json'}: quantization_config.{expected}"


@pytest.mark.parametrize("content", [b"", b"\xff" * 16, b"\x02" + bytes(7) + b"[]", b"\x05" + bytes(7) + b'{"a":'])
def test_the_config_decides_alone_without_files_that_can_be_read(tmp_path: Path, content: bytes) -> None:
    write_config(tmp_path, {"quantization_config": BLOCKWISE})
    alone = read_card(tmp_path)
    assert alone.quantization is not None and alone.quantization.scheme.block == (128, 128)
    (tmp_path / SINGLE).write_bytes(content)
    assert read_card(tmp_path) == alone
    with pytest.raises(CheckpointError):
        Checkpoint(tmp_path)


Mutation = tuple[str, str, Tensor | None, str]  # layout, tensor, its replacement, the sentence
SCALE, SCALE_INV = f"{UP}.weight_scale", f"{UP}.weight_scale_inv"
MUTATIONS: list[Mutation] = [
    ("int8", SCALE, torch.ones(WIDTH, 2), f"{SCALE}: expected shape [576, 1], found [576, 2]"),
    ("int8", SCALE, torch.ones(WIDTH, 1).long(), f"{SCALE}: expected one of BF16, F16, F32, found I64"),
    ("int8", SCALE, torch.full((WIDTH, 1), torch.nan), f"{SCALE}: expected finite numbers, found nan at [0, 0]"),
    ("int8", SCALE, None, f"the model needs tensor {SCALE}, found in no file"),
    ("int8", f"{UP}.weight", None, f"the model needs tensor {UP}.weight, found in no file"),
    ("int8", f"{UP}.weight", torch.ones(WIDTH, HIDDEN), f"{UP}.weight: expected I8, found F32"),
    ("block_int8", SCALE_INV, torch.ones(4, 3), f"{SCALE_INV}: expected shape [5, 3], found [4, 3]"),
    ("block_int8", SCALE_INV, None, f"the model needs tensor {SCALE_INV}, found in no file"),
    ("fp8", SCALE_INV, torch.ones(5, 2), f"{SCALE_INV}: expected shape [5, 3], found [5, 2]"),
    ("fp8", SCALE_INV, torch.ones(5, 3).char(), f"{SCALE_INV}: expected one of BF16, F16, F32, U8, F8_E8M0, found I8"),
    (
        "fp8",
        SCALE_INV,
        torch.tensor([[127, 127, 127]] * 4 + [[127, 255, 127]], dtype=torch.uint8),
        f"{SCALE_INV}: expected finite numbers, found nan at [4, 1]",
    ),
    ("fp8", f"{UP}.weight", torch.ones(WIDTH, HIDDEN), f"{UP}.weight: expected F8_E4M3, found F32"),
]


@pytest.mark.parametrize(("layout", "name", "tensor", "sentence"), MUTATIONS, ids=range(len(MUTATIONS)))
@pytest.mark.parametrize("announced", [False, True])
def test_a_wrong_tensor_is_named_in_one_sentence(
    tmp_path: Path, layout: str, name: str, tensor: Tensor | None, sentence: str, announced: bool
) -> None:
    config = {"int8": {"quant_method": "w8a8_int8"}, "block_int8": BLOCKWISE, "fp8": FP8_CONFIG}[layout]
    tensors, _ = write(tmp_path, layout, config if announced else None)
    del tensors[name]
    save_file(tensors | ({} if tensor is None else {name: tensor}), tmp_path / SINGLE)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    where = tmp_path if tensor is None else f"{tmp_path / SINGLE}: tensor"
    colon = ":" if tensor is None else ""
    assert str(caught.value) == f"{where}{colon} {sentence}"


@pytest.mark.parametrize("config", [None, BLOCKWISE, FP8_CONFIG])
def test_of_two_layouts_each_module_is_read_in_its_own(tmp_path: Path, config: dict[str, Any] | None) -> None:
    tensors, values = write(tmp_path, "fp8", config)
    codes = torch.ones(WIDTH, HIDDEN).char()
    save_file(tensors | {f"{UP}.weight": codes}, tmp_path / SINGLE)
    model = load(tmp_path)
    assert isinstance(model.up.weight.format, BlockInt8) and isinstance(model.down.weight.format, Fp8)
    scales = tensors[SCALE_INV].repeat_interleave(128, 0)[:WIDTH].repeat_interleave(128, 1)[:, :HIDDEN]
    assert torch.equal(model.up.weight.packed.unpack(), scales)
    assert torch.equal(model.down.weight.packed.unpack(), values[f"{DOWN}.weight"])
