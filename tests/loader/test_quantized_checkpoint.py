"""Quantised checkpoints: every rank holds exactly the weights of its rectangles, for any cut."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized.cases import CASES, make
from safetensors.torch import load_file, save_file

from tilerank.kernels.weight_formats import BlockInt8
from tilerank.loader.card import read_card
from tilerank.loader.checkpoint import Checkpoint
from tilerank.loader.encodings.packed_encoding import GPTQ, CompressedInts
from tilerank.loader.errors import CheckpointError
from tilerank.loader.quantization_config import Quantization, Scheme
from tilerank.loader.weight_formats import weight_formats
from tilerank.loader.weights import load_weights
from tilerank.parallel.parameters import Layer, Rectangle, WeightParameter
from tilerank.parallel.sharding import Sharding
from tilerank.runtime.rank.registry import build_model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quantized")


@pytest.mark.parametrize("strategy", ["pad", "split"])
@pytest.mark.parametrize("case", [case for case in CASES if "act-order" not in case])
def test_every_rank_holds_its_rectangles(base: Path, case: str, strategy: Any) -> None:
    model_dir, plain_dir = make(case, base)
    plain = load_file(plain_dir / "model.safetensors")
    card = read_card(model_dir)
    formats = weight_formats(card.quantization, torch.bfloat16, None)
    for size in (1, 2, 3):
        for rank in range(size):
            sharding = Sharding(rank, size, torch.bfloat16, None, strategy, formats=formats)
            model = build_model(card, sharding)
            load_weights(
                model, Checkpoint(model_dir), ignore=model.ignore, progress=False, quantization=card.quantization
            )
            for rectangle, found in quantised_parts(model):
                wanted = plain_values(plain, rectangle)
                if keys_of_int8(rectangle):
                    wanted = load_scaled(model_dir, rectangle)
                torch.testing.assert_close(found, wanted, rtol=1e-6 if found.dtype is torch.float32 else 1e-2, atol=0)


def plain_values(plain: dict[str, torch.Tensor], rectangle: Rectangle) -> torch.Tensor:
    """Return the values of a rectangle, whose weight may be a part of a tensor of all experts."""
    if rectangle.name in plain:
        return plain[rectangle.name][rectangle.index]
    place = rectangle.places[0]
    return place.extract(plain[place.name][place.index(rectangle.index)])


def keys_of_int8(rectangle: Rectangle) -> bool:
    """Return whether codes are held without their scales, which latent attention applies to queries."""
    parameter = rectangle.parameter
    return isinstance(parameter, WeightParameter) and parameter.transposed and isinstance(parameter.format, BlockInt8)


def load_scaled(model_dir: Path, rectangle: Rectangle) -> torch.Tensor:
    """Return codes, times their scales if those belong to blocks."""
    tensors = load_file(model_dir / "model.safetensors")
    codes = tensors[rectangle.name].float()
    scales = tensors.get(f"{rectangle.name}_scale_inv")
    if scales is not None:
        codes *= scales.repeat_interleave(128, 0)[: len(codes)].repeat_interleave(128, 1)[:, : codes.shape[1]]
    return codes[rectangle.index]


def quantised_parts(model: Layer) -> Iterator[tuple[Rectangle, torch.Tensor]]:
    """Yield each rectangle that is held in a quantised format, with its dequantised values."""
    for rectangle in model.rectangles():
        parameter = rectangle.parameter
        if isinstance(parameter, WeightParameter) and parameter.is_quantised and rectangle.elements:
            weight, row = parameter.place(rectangle.row)
            values = weight.unpack()
            if parameter.transposed:
                values, row = values.T, rectangle.row % parameter.k
            rows, columns = (part.stop - part.start for part in rectangle.index)
            yield rectangle, values[row : row + rows, :columns].float()


def test_words_of_any_strides_are_unpacked(base: Path) -> None:
    """A rank may read one column or one row of words; code j of a word has the bits from 4 j on."""
    encoding = CompressedInts(Scheme("packed", 4, (1, 32)), Checkpoint(make("awq-32", base)[0]))
    words = torch.randint(-(2**31), 2**31 - 1, (6, 5), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    for part in (words, words[:, 2:3], words[2:3], words[:, 2:3].T, words[1:3].T):
        codes = torch.stack([part.long() >> 4 * j & 15 for j in range(8)], -1).permute(1, 2, 0).reshape(-1, len(part))
        assert torch.equal(encoding.unpacked(part).long(), codes)


@pytest.mark.parametrize(("bits", "ones"), [(4, 0x11111111), (8, 0x01010101)])
def test_a_zero_point_of_zero_borrows_from_the_next(base: Path, bits: int, ones: int) -> None:
    """GPTQModel and AutoRound subtract a one from all zero points of a word at once."""
    zeros, per_word = torch.tensor([[0, 8, 0, 0, 15, 1, 0, 7], [1, 0, 0, 15, 0, 0, 0, 0]]), 32 // bits
    scheme = Scheme("gptq", bits, (1, 32), symmetric=False, zeros_minus_one=True)
    words = [sum(int(zero) << bits * i for i, zero in enumerate(row[:per_word])) - ones for row in zeros]
    packed = torch.tensor([[word if word < 2**31 else word - 2**32] for word in words], dtype=torch.int32)
    taken: Any = None  # no parameter is filled
    rectangle = Rectangle("a.weight", (per_word, 64), (slice(0, per_word), slice(0, 64)), taken)
    found = GPTQ(scheme, Checkpoint(make("awq-32", base)[0])).zeros(rectangle, packed)
    assert torch.equal(found.T.long(), zeros[:, :per_word])


def load(model_dir: Path) -> None:
    card = read_card(model_dir)
    sharding = Sharding(0, 1, torch.bfloat16, None, formats=weight_formats(card.quantization, torch.bfloat16, None))
    model = build_model(card, sharding)
    load_weights(model, Checkpoint(model_dir), ignore=model.ignore, progress=True, quantization=card.quantization)


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


def test_scales_of_a_cache_that_is_not_quantised_are_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model_dir = make("fp8", tmp_path)[0]
    tensors = load_file(model_dir / "model.safetensors")
    for layer in range(2):
        for part in "kv":
            tensors[f"model.layers.{layer}.self_attn.{part}_scale"] = torch.tensor(0.5)
    save_file(tensors, model_dir / "model.safetensors")
    with caplog.at_level("INFO", "tilerank.loader.weights"):
        load(model_dir)
    assert [record.getMessage() for record in caplog.records if "cache" in record.getMessage()] == [
        f"{model_dir}: the cache is not quantised as the checkpoint announces (model.layers.0.self_attn.k_scale (and 3 "
        "more)); its scales are not used"
    ]


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


@pytest.mark.parametrize("name", ["weight", "weight_scale_inv"])
def test_nan_in_fp8_codes_or_scales_is_refused_by_name(base: Path, tmp_path: Path, name: str) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(make("moe-fp8", base)[0], copy)
    tensors = load_file(copy / "model.safetensors")
    tensor = tensors[f"model.layers.0.self_attn.o_proj.{name}"]
    tensor[-1, -1] = torch.nan
    save_file(tensors, copy / "model.safetensors")
    place = rf"\[{tensor.shape[0] - 1}, {tensor.shape[1] - 1}\]"
    with pytest.raises(CheckpointError, match=rf"o_proj\.{name}: expected finite numbers, found nan at {place}"):
        load(copy)


QUANTISED = [Quantization("int8"), Quantization("fp8"), Quantization("int4", 32), Quantization("int4", 128)]
QUANTISED += [Quantization("mxfp4")]


@pytest.mark.parametrize("asked", QUANTISED, ids=str)
@pytest.mark.parametrize("case", ["awq-128", "moe-fp8"])
def test_every_rank_quantises_its_rectangles(base: Path, case: str, asked: Quantization) -> None:
    """Quantised from the plain checkpoint, every weight is within half a step of its format in its block."""
    model_dir = make(case, base)[1]
    plain = load_file(model_dir / "model.safetensors")
    card = read_card(model_dir)
    formats = weight_formats(card.quantization, torch.bfloat16, asked)
    for rank, size in ((0, 1), (1, 2), (2, 3)):
        model = build_model(card, Sharding(rank, size, torch.bfloat16, None, "pad", formats=formats))
        load_weights(model, Checkpoint(model_dir), ignore=model.ignore, progress=False)
        for rectangle, found in quantised_parts(model):
            wanted = plain[rectangle.name][rectangle.index]
            keeps_8_bits = ["lm_head.weight", "model.embed_tokens.weight"]
            if asked.codes in ("int4", "mxfp4"):
                keeps_8_bits.append("v_proj.weight")
            held = INT8 if rectangle.name.endswith(tuple(keeps_8_bits)) else asked
            assert within_half_a_step(found, wanted, held), rectangle.name


INT8 = Quantization("int8")


def within_half_a_step(found: torch.Tensor, wanted: torch.Tensor, asked: Quantization) -> bool:
    """Check every element; for int4 the mean square of a group, whose scale may trade range for smaller steps."""
    error = (found - wanted).abs()
    if asked.codes == "int8":
        return bool((error <= wanted.abs().amax(1, keepdim=True) * 1.01 / 254).all())
    if asked.codes == "fp8":  # 3 bits of mantissa, and subnormals of 2^-9 of a scale that is the block's largest / 448
        return bool((error <= wanted.abs() * 1.01 / 16 + wanted.abs().max() / 448 * 2**-9).all())
    group = asked.group or 32
    tail = -wanted.shape[1] % group
    padded = (torch.nn.functional.pad(x, (0, tail)) for x in (wanted, error))
    groups, errors = (torch.unflatten(x, 1, (-1, group)) for x in padded)
    if asked.codes == "mxfp4":  # half of the largest step, from 4 to 6, with the larger of two scales
        scale = (groups.abs().amax(2).log2().floor() - 2).exp2()
        return bool((errors.amax(2) <= 2 * scale).all())
    step = (groups.amax(2).clamp(min=0) - groups.amin(2).clamp(max=0)) / 15
    return bool((errors.square().mean(2).sqrt() <= step * 1.02 / 2).all())
