"""The configuration of vision models: nested parts, spellings, refusals, and what a plan says of the tower."""

import json
import shutil
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutate import json_mutations
from tiny import make_checkpoint

from tilerank.loader.card import read_card
from tilerank.loader.errors import ConfigError
from tilerank.loader.rope import RopeConfig
from tilerank.parallel.sharding import Sharding
from tilerank.runtime.models.decoder import Decoder
from tilerank.runtime.models.text_config import USUAL_SECTIONS, read_text_config
from tilerank.runtime.models.towers.vision_config import VisionConfig, read_vision_config
from tilerank.runtime.protocol.errors import EngineError
from tilerank.runtime.rank.registry import build_model, read_supported_card
from tilerank.runtime.step.bytes_per_step import bytes_per_step
from tilerank.runtime.step.rope import axes_of_frequencies

TEXT: dict[str, Any] = {
    "attention_bias": False,
    "bos_token_id": 151643,
    "dtype": "bfloat16",
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 262144,
    "model_type": "qwen3_vl_text",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
    "rope_theta": 5000000,
    "vocab_size": 151936,
}
VISION: dict[str, Any] = {
    "deepstack_visual_indexes": [8, 16, 24],
    "depth": 27,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "in_channels": 3,
    "intermediate_size": 4304,
    "model_type": "qwen3_vl",
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "out_hidden_size": 4096,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
QWEN3_VL_8B: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "image_token_id": 151655,
    "model_type": "qwen3_vl",
    "text_config": TEXT,
    "tie_word_embeddings": False,
    "video_token_id": 151656,
    "vision_config": VISION,
    "vision_end_token_id": 151653,
    "vision_start_token_id": 151652,
}


def write(
    model_dir: Path, text: dict[str, Any] | None = None, vision: dict[str, Any] | None = None, **top: Any
) -> Path:
    """Write the config of Qwen3-VL-8B with changes; None as a changed value is null, which counts as absent."""
    values = QWEN3_VL_8B | {"text_config": TEXT | (text or {}), "vision_config": VISION | (vision or {})} | top
    (model_dir / "config.json").write_text(json.dumps(values))
    return model_dir


def model(model_dir: Path, rank: int = 0, size: int = 1) -> Decoder:
    found = build_model(read_supported_card(model_dir), Sharding(rank, size, torch.bfloat16, None))
    assert isinstance(found, Decoder)
    return found


def refusal(model_dir: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        model(model_dir)
    return str(caught.value).removeprefix(f"{model_dir / 'config.json'}: ")


def test_the_card_reads_the_language_model_and_the_top(tmp_path: Path) -> None:
    card = read_card(write(tmp_path))
    assert (card.model_type, card.vocab_size, card.context_length) == ("qwen3_vl", 151936, 262144)
    assert (card.eos_token_ids, card.bos_token_id, card.dtype) == ((151645,), 151643, "bfloat16")
    assert read_card(write(tmp_path, {"dtype": None}, torch_dtype="float16")).dtype == "float16"
    assert read_card(write(tmp_path, eos_token_id=[7, 8])).eos_token_ids == (7, 8, 151645)


@pytest.mark.parametrize("top", [False, True])
def test_quantisation_in_either_part(tmp_path: Path, top: bool) -> None:
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["model.visual"]}
    config = {"quantization_config": fp8}
    card = read_card(write(tmp_path, **config) if top else write(tmp_path, config))
    assert card.quantization is not None
    assert card.quantization.scheme_of("model.language_model.layers.0.mlp.up_proj")
    assert not card.quantization.scheme_of("model.visual.blocks.0.attn.qkv")


def test_the_tied_head_of_the_top_counts(tmp_path: Path) -> None:
    untied = model(write(tmp_path, {"tie_word_embeddings": True}))
    assert not untied.ignore("lm_head.weight")
    assert model(write(tmp_path, {"tie_word_embeddings": False}, tie_word_embeddings=True)).ignore("lm_head.weight")
    assert model(write(tmp_path, {"tie_word_embeddings": True}, tie_word_embeddings=None)).ignore("lm_head.weight")


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl_moe"])
def test_both_dialects_read_alike(family: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    """The published file, and the same config re-saved by transformers 5."""
    from transformers import AutoConfig

    old = make_checkpoint(family, tmp_path_factory.mktemp("checkpoints"))
    reference = AutoConfig.from_pretrained(old)
    reference.save_pretrained(tmp_path)
    shutil.copy(old / "generation_config.json", tmp_path)
    resaved = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" in resaved["text_config"]
    cards = read_card(old), read_card(tmp_path)
    assert cards[0] == cards[1]
    texts = [read_text_config(card.text, sections=USUAL_SECTIONS) for card in cards]
    assert texts[0].rope == texts[1].rope == RopeConfig(5e6, sections=(6, 5, 5))
    assert texts[0].hidden_size == texts[1].hidden_size == reference.text_config.hidden_size
    towers = [read_vision_config(card.fields.object("vision_config"), texts[0].hidden_size) for card in cards]
    assert towers[0] == towers[1]
    assert (towers[0].depth, towers[0].num_heads, towers[0].head_dim) == (4, 4, 24)
    shapes = [{r.name: r.shape for r in model(path).rectangles()} for path in (old, tmp_path)]
    assert shapes[0] == shapes[1]


def test_axes_of_the_published_sections() -> None:
    """Height has frequencies 1, 4, .. 58, width 2, 5, .. 59, and time the rest, the last four among them."""
    axes = axes_of_frequencies((24, 20, 20), 64)
    assert axes == [0, 1, 2] * 20 + [0] * 4
    assert [axes.count(axis) for axis in range(3)] == [24, 20, 20]
    assert axes_of_frequencies(None, 3) == [0, 0, 0]


@pytest.mark.parametrize(
    "scaling",
    [
        {"mrope_section": [24, 20, 20]},
        {"rope_type": "mrope", "mrope_section": [24, 20, 20]},
        {"type": "mrope", "mrope_section": [24, 20, 20], "interleaved": True},
        {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": None},
        {"rope_type": "default"},  # the sections of transformers
    ],
)
def test_spellings_of_the_sections(tmp_path: Path, scaling: dict[str, Any]) -> None:
    found = model(write(tmp_path, {"rope_scaling": scaling}))
    assert found.position_axes == 3
    parameters = {"rope_scaling": None, "rope_theta": None, "rope_parameters": scaling | {"rope_theta": 5e6}}
    assert model(write(tmp_path, parameters)).position_axes == 3


@pytest.mark.parametrize(
    "part, changes, sentence",
    [
        ("text", {"vocab_size": None}, "text_config.vocab_size: expected an integer from 1 to 16777216, found None"),
        ("text", {"rope_theta": None}, "text_config.rope_theta: expected a number above 1"),
        (
            "text",
            {"head_dim": 64, "rope_scaling": {"rope_type": "default"}},
            "text_config.rope_scaling.mrope_section: expected the frequencies of three axes, 32 together, found no",
        ),
        (
            "text",
            {"rope_scaling": {"mrope_section": [24, 20, 24]}},
            "text_config.rope_scaling.mrope_section: expected the frequencies of three axes, 64 together, found [24, 2",
        ),
        (
            "text",
            {"rope_scaling": {"mrope_section": [24, 20, 20], "mrope_interleaved": False}},
            "text_config.rope_scaling.mrope_interleaved: expected true",
        ),
        (
            "text",
            {"rope_scaling": {"mrope_section": [24, 20, 20], "rope_type": "ntk"}},
            "text_config.rope_scaling.rope_type: expected one of default, linear, dynamic, llama3, yarn, longrope, ",
        ),
        (
            "text",
            {"partial_rotary_factor": 0.5},
            "text_config.partial_rotary_factor: expected 1 (partial rotary embedding is not supported), found 0.5",
        ),
        (
            "text",
            {"num_hidden_layers": 3},
            "vision_config.deepstack_visual_indexes: expected fewer blocks than the 3 layers of the language model, "
            "found [8, 16, 24]",
        ),
        ("vision", {"out_hidden_size": 2048}, "vision_config.out_hidden_size: expected 4096, found 2048"),
        ("vision", {"hidden_act": "silu"}, "vision_config.hidden_act: expected 'gelu_pytorch_tanh', found 'silu'"),
        ("vision", {"in_channels": 4}, "vision_config.in_channels: expected 3, found 4"),
        (
            "vision",
            {"num_heads": 7},
            "vision_config.hidden_size: expected 7 heads of a multiple of 8 up to 512, found 1152",
        ),
        (
            "vision",
            {"num_position_embeddings": 2305},
            "vision_config.num_position_embeddings: expected the square of an integer, found 2305",
        ),
        (
            "vision",
            {"deepstack_visual_indexes": [8, 27]},
            "vision_config.deepstack_visual_indexes: expected a list of blocks from 0 to 26, found [8, 27]",
        ),
        (
            "vision",
            {"deepstack_visual_indexes": [16, 8]},
            "vision_config.deepstack_visual_indexes: expected blocks in ascending order, found [16, 8]",
        ),
        (
            "vision",
            {"rope_parameters": {"rope_type": "axial", "rope_theta": 5000}},
            "vision_config.rope_parameters.rope_theta: expected 10000, found 5000",
        ),
        ("top", {"vision_config": None}, "vision_config: expected an object, found None"),
        ("top", {"text_config": None, **TEXT, "model_type": "qwen3_vl"}, "text_config: expected an object, found None"),
    ],
)
def test_what_is_inconsistent_or_unsupported_is_refused(
    tmp_path: Path, part: str, changes: dict[str, Any], sentence: str
) -> None:
    write(tmp_path, **(changes if part == "top" else {part: changes}))
    assert refusal(tmp_path).startswith(sentence)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_config_never_raises_anything_else(tmp_path: Path, data: st.DataObject) -> None:
    small = QWEN3_VL_8B | {"text_config": TEXT | {"num_hidden_layers": 4}, "vision_config": VISION | {"depth": 25}}
    (tmp_path / "config.json").write_bytes(data.draw(json_mutations(json.dumps(small))))
    try:
        text = read_text_config(read_card(tmp_path).text, sections=USUAL_SECTIONS)
        vision = read_vision_config(read_card(tmp_path).fields.object("vision_config"), text.hidden_size)
    except ConfigError as refused:
        assert str(tmp_path) in str(refused)
    else:
        assert isinstance(vision, VisionConfig)
        assert vision.hidden_size == vision.num_heads * vision.head_dim


# Parameters of the tower by hand: each projection with its bias, each norm with weight and bias.
BLOCK = 4 * (1152 * 1152 + 1152) + 4304 * 1152 + 4304 + 1152 * 4304 + 1152 + 4 * 1152
MERGERS = 4 * (4608 * 4608 + 4608 + 4096 * 4608 + 4096) + 2 * 1152 + 3 * 2 * 4608
TOWER = 1152 * 3 * 2 * 16 * 16 + 1152 + 2304 * 1152 + 27 * BLOCK + MERGERS


def test_bytes_of_the_tower(tmp_path: Path) -> None:
    found = model(write(tmp_path))
    assert found.encoder is not None
    shapes = {r.name: r.shape for r in found.rectangles() if r.name.startswith("model.visual.")}
    assert sum(map(prod, shapes.values())) == TOWER
    assert len(shapes) == 3 + 27 * 12 + 4 * 6
    # A width of 4304 is padded to whole tiles of 32 columns.
    assert found.encoder.nbytes() == pytest.approx(2 * TOWER, rel=0.005)
    assert found.nbytes() > 2 * (TOWER + 8e9)


def test_a_step_of_text_does_not_read_the_tower(tmp_path: Path) -> None:
    """The same bytes as Qwen3-8B, whose decoder has these sizes."""
    vision = bytes_per_step(model(write(tmp_path)))
    (tmp_path / "config.json").write_text(json.dumps(TEXT | {"model_type": "qwen3", "rope_scaling": None}))
    assert bytes_per_step(build_model(read_card(tmp_path), Sharding(0, 1, torch.bfloat16, None))) == vision


def test_the_tower_is_cut_over_six_ranks(tmp_path: Path) -> None:
    """16 heads are padded to 18; 4304 columns are 134.5 tiles; nothing large is held twice."""
    write(tmp_path)
    models = [model(tmp_path, rank, 6) for rank in range(6)]
    cuts = {name: [span.size for span in cut.spans] for name, cut in models[0].cuts() if name.startswith("vision")}
    assert cuts == {
        "vision heads": [3] * 6,
        "vision MLP width": [736, 736, 736, 704, 704, 688],
        "vision merger width": [768] * 6,
    }
    sizes = [found.encoder.nbytes() for found in models if found.encoder is not None]
    whole = 2 * (1152 * 3 * 2 * 16 * 16 + 2304 * 1152)  # patch and position embeddings
    assert max(sizes) < 2 * TOWER / 6 * 1.05 + whole
    assert next(models[0].head_cuts()).head_dim == 128  # those of the decoder come first


@pytest.mark.parametrize("size", [1, 2, 3, 5, 6, 8, 16])
def test_any_number_of_ranks(tmp_path: Path, size: int) -> None:
    """Every element of the large matrices of the tower is on exactly one rank."""
    write(tmp_path, {"num_hidden_layers": 4}, {"depth": 2, "deepstack_visual_indexes": [0]})
    held: dict[str, int] = {}
    models = [model(tmp_path, rank, size) for rank in range(size)]
    for found in models:
        for rectangle in found.rectangles():
            held[rectangle.name] = held.get(rectangle.name, 0) + rectangle.elements
    shapes = {r.name: r.shape for r in models[0].rectangles()}
    for name in shapes:
        if name.startswith("model.visual.blocks.") and name.endswith(("qkv.weight", "fc1.weight", "fc2.weight")):
            assert held[name] == prod(shapes[name])


def test_without_settings_of_a_processor_nothing_is_encoded(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """Text alone needs no preprocessor_config.json, and such a directory can be planned."""
    checkpoint = make_checkpoint("qwen3_vl", tmp_path_factory.mktemp("checkpoints"))
    shutil.copy(checkpoint / "config.json", tmp_path)
    found = model(tmp_path)
    found.allocate()
    assert found.encoder is not None
    with pytest.raises(EngineError, match=r"expected a preprocessor_config.json in the model directory, found none"):
        next(found.encoder.encode(torch.zeros(1, 32, 32, 3, dtype=torch.uint8), (1, 2, 2), 1e9))
