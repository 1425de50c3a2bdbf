"""What Qwen3.5 reads of config.json, under which names it finds its weights, and how they are cut."""

import json
import re
import shutil
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from model_configs import ABSENT, write_config
from safetensors.torch import load_file, save_file
from tiny import make_checkpoint
from torch import Tensor

from tilerank.kernels.weight_formats import Fp8, Int8
from tilerank.launch.bench.public import public_config
from tilerank.launch.planning.work import model_work
from tilerank.loader.card import read_card
from tilerank.loader.checkpoint import Checkpoint
from tilerank.loader.errors import ConfigError
from tilerank.loader.quantization_config import Quantization
from tilerank.loader.tokenizer import Tokenizer
from tilerank.loader.weight_formats import weight_formats
from tilerank.loader.weights import load_weights
from tilerank.parallel.errors import ShardError
from tilerank.parallel.parameters import PlainParameter
from tilerank.parallel.shard import Strategy
from tilerank.parallel.sharding import Sharding, WeightFormats
from tilerank.runtime.media.qwen_vl import QwenVLProcessor
from tilerank.runtime.media.registry import load_processor
from tilerank.runtime.models.decoder import Decoder
from tilerank.runtime.models.delta_net import GatedDeltaNet
from tilerank.runtime.rank.registry import build_model
from tilerank.runtime.step.cache import RecurrentState

NINE_B = public_config("qwen3.5-9b")
TEXT: dict[str, Any] = NINE_B["text_config"]
KINDS = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 8


def model(model_dir: Path, rank: int = 0, size: int = 1, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    found = build_model(read_card(model_dir), Sharding(rank, size, dtype, None))
    assert isinstance(found, Decoder)
    return found


def loaded(model_dir: Path) -> Decoder:
    found = model(model_dir)
    load_weights(found, Checkpoint(model_dir), ignore=found.ignore, progress=False)
    return found


def nested(text: dict[str, Any], **top: Any) -> dict[str, Any]:
    """The published config with changes."""
    fields = {key: value for key, value in {**TEXT, **text}.items() if value is not ABSENT}
    return NINE_B | {"text_config": fields} | top


def shapes(found: Decoder) -> dict[str, tuple[int, ...]]:
    return {rectangle.name: rectangle.shape for rectangle in found.rectangles()}


@pytest.mark.parametrize("like", ["qwen3.5-2b", "qwen3.5-9b"])
def test_names_and_shapes_are_those_of_transformers(tmp_path: Path, like: str) -> None:
    from transformers import AutoConfig, Qwen3_5ForConditionalGeneration

    write_config(tmp_path, public_config(like), {})
    with torch.device("meta"):
        theirs = Qwen3_5ForConditionalGeneration(AutoConfig.from_pretrained(tmp_path)).state_dict()
    found = model(tmp_path)
    wanted = {name: tuple(tensor.shape) for name, tensor in theirs.items() if not found.ignore(name)}
    assert shapes(found) == wanted
    assert found.ignore("mtp.layers.0.self_attn.q_proj.weight")
    assert found.ignore("lm_head.weight") == (like == "qwen3.5-2b")


def test_a_mixture_has_every_projection_of_transformers(tmp_path: Path) -> None:
    """Our names are those of experts that are stored apart; transformers 5 has them in two tensors."""
    from transformers import AutoConfig, Qwen3_5MoeForConditionalGeneration

    write_config(tmp_path, public_config("qwen3.5-35b-a3b"), {})
    with torch.device("meta"):
        theirs = Qwen3_5MoeForConditionalGeneration(AutoConfig.from_pretrained(tmp_path)).state_dict()
    ours = shapes(model(tmp_path))
    apart = re.compile(r"\.experts\.\d+\.")
    assert {name: shape for name, shape in ours.items() if not apart.search(name)} == {
        name: tuple(tensor.shape) for name, tensor in theirs.items() if ".experts." not in name
    }
    experts = sum(tensor.numel() for name, tensor in theirs.items() if ".experts." in name)
    assert sum(prod(shape) for name, shape in ours.items() if apart.search(name)) == experts


@pytest.mark.parametrize("changes", [{"full_attention_interval": ABSENT, "layer_types": KINDS}, {"layer_types": KINDS}])
def test_kinds_of_layers_in_both_spellings(tmp_path: Path, changes: dict[str, Any]) -> None:
    write_config(tmp_path, NINE_B, {})
    interval = [type(layer.mixer) for layer in model(tmp_path).layers]
    write_config(tmp_path, nested(changes), {})
    assert [type(layer.mixer) for layer in model(tmp_path).layers] == interval
    assert [kind is GatedDeltaNet for kind in interval] == [kind == "linear_attention" for kind in KINDS]


def test_text_alone_in_one_object(tmp_path: Path) -> None:
    """As transformers writes Qwen3_5ForCausalLM; the sections of positions count for pictures only."""
    rope = {key: value for key, value in TEXT["rope_parameters"].items() if "mrope" not in key}
    flat = TEXT | {"tie_word_embeddings": False, "rope_parameters": rope}
    write_config(tmp_path, flat, {})
    found = model(tmp_path)
    assert found.encoder is None and found.position_axes == 1
    assert "model.layers.31.self_attn.q_proj.weight" in shapes(found)
    assert shapes(found)["model.layers.0.linear_attn.conv1d.weight"] == (8192, 1, 4)
    assert found.ignore("model.visual.patch_embed.proj.weight")
    write_config(tmp_path, nested({"rope_parameters": rope}), {})
    assert model(tmp_path).position_axes == 3, "with the sections of transformers"


@pytest.mark.parametrize(
    "text, sentence",
    [
        ({"attn_output_gate": False}, "attn_output_gate: expected true"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type: expected 'swish', found 'sigmoid'"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype: expected 'float32', found 'bfloat16'"),
        ({"linear_num_value_heads": 24}, "linear_num_value_heads: expected a multiple of linear_num_key_heads (16)"),
        ({"linear_conv_kernel_dim": 9}, "linear_conv_kernel_dim: expected an integer from 1 to 8, found 9"),
        ({"linear_key_head_dim": 512}, "linear_key_head_dim: expected an integer from 1 to 256, found 512"),
        ({"full_attention_interval": ABSENT}, "full_attention_interval: expected an integer"),
        ({"layer_types": KINDS[:4]}, "layer_types: expected one entry for each of the 32 layers"),
        (
            {"layer_types": ["sliding_attention"] * 32},
            "layer_types: expected a list of 'linear_attention' and 'full_attention' only",
        ),
        (
            {"partial_rotary_factor": 0.5},
            "rope_parameters.partial_rotary_factor: expected the 0.5 of text_config.partial_rotary_factor",
        ),
    ],
)
def test_what_would_change_the_result_is_refused(tmp_path: Path, text: dict[str, Any], sentence: str) -> None:
    write_config(tmp_path, nested(text), {})
    with pytest.raises(ConfigError, match=re.escape(f"text_config.{sentence}")):
        model(tmp_path)


def test_a_gate_of_another_name_and_a_factor_beside_the_layers_are_accepted(tmp_path: Path) -> None:
    """Keys of Qwen3.6, and where transformers 4 has the factor; without it, a quarter of each head is rotated."""
    rope = {key: value for key, value in TEXT["rope_parameters"].items() if key != "partial_rotary_factor"}
    for text in ({"partial_rotary_factor": 0.25}, {}):
        write_config(tmp_path, nested({"output_gate_type": "swish", "rope_parameters": rope, **text}), {})
        assert [table.nbytes() for table in model(tmp_path).ropes] == [262144 * 64 * 2]


def test_bytes_of_a_state(tmp_path: Path) -> None:
    """24 layers: 32 matrices of 128 x 128 in fp32, and three inputs of 8192 channels in bf16."""
    write_config(tmp_path, NINE_B, {})
    specs = [spec for spec in model(tmp_path).cache_specs() if isinstance(spec, RecurrentState)]
    assert sum(spec.nbytes(1) for spec in specs) == 24 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    assert sum(spec.nbytes(1) for spec in specs) / (1 << 20) == pytest.approx(48, abs=1.2)


def test_a_step_reads_and_writes_states(tmp_path: Path) -> None:
    """Beside the weights and, in 8 layers, the keys and values of 4 heads of 256 numbers for each token."""
    write_config(tmp_path, NINE_B, {})
    work = model_work(read_card(tmp_path), torch.bfloat16)
    states = 24 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    assert work.decode(3, 100).nbytes == work.weights + 300 * 8 * 2 * 4 * 256 * 2 + 3 * 2 * states
    # The parameters of the text but the embedding, in bf16: 24 delta nets, 8 attentions, 32 MLPs and the head.
    delta_net = (2 * 2048 + 4096) * 4096 + 4096 * 4096 + 2 * 32 * 4096 + 8192 * 4 + 4096 * 4096
    attention = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 4096 * 4096
    parameters = 24 * delta_net + 8 * attention + 32 * 3 * 4096 * 12288 + 248320 * 4096
    assert work.weights / 2 == pytest.approx(parameters, rel=1e-4)


@pytest.mark.parametrize("size, heads", [(2, [8, 8]), (3, [6, 5, 5]), (5, [4, 3, 3, 3, 3]), (6, [3, 3, 3, 3, 2, 2])])
def test_key_heads_are_on_one_rank_with_their_value_heads(tmp_path: Path, size: int, heads: list[int]) -> None:
    write_config(tmp_path, nested({"num_hidden_layers": 4}), {})
    models = [model(tmp_path, rank, size) for rank in range(size)]
    held: Counter[str] = Counter()
    for found, keys in zip(models, heads, strict=True):
        spec = found.layers[0].mixer.cache_spec
        assert isinstance(spec, RecurrentState)
        assert (spec.value_heads, spec.conv_channels) == (2 * keys, 2 * keys * 128 + 2 * keys * 128)
        assert dict(found.cuts())["delta net key heads"].waste == pytest.approx(max(heads) * size / 16 - 1)
        for rectangle in found.rectangles():
            held[rectangle.name] += rectangle.elements
    names = [name for name in held if ".linear_attn." in name and not name.endswith("norm.weight")]
    assert len(names) == 3 * 8
    assert all(held[name] == prod(shapes(models[0])[name]) for name in names)


def test_more_ranks_than_key_heads(tmp_path: Path) -> None:
    """The last ranks hold nothing of a delta net, or zero heads if equal parts are asked for."""
    write_config(
        tmp_path, nested({"num_hidden_layers": 4, "linear_num_key_heads": 4, "linear_num_value_heads": 16}), {}
    )
    card = read_card(tmp_path)
    strategy: Strategy
    for strategy, heads in (("split", 0), ("pad", 4)):
        found = build_model(card, Sharding(5, 6, torch.bfloat16, None, strategy))
        spec = found.cache_specs()[0]
        assert isinstance(spec, RecurrentState) and spec.value_heads == heads
        assert not sum(r.elements for r in found.rectangles() if ".0.linear_attn.in_proj" in r.name)


def test_heads_that_are_no_multiple_of_a_block_are_refused(tmp_path: Path) -> None:
    """What is quantised while loading has scales for single rows, blocks of 32 rows have one for all of them."""
    small = {"linear_key_head_dim": 24, "linear_value_head_dim": 24, "num_hidden_layers": 4}
    write_config(tmp_path, nested(small), {})
    card = read_card(tmp_path)
    for codes in ("int8", "int4", "fp8"):
        formats = weight_formats(None, torch.bfloat16, Quantization(codes))
        for ranks in (2, 3):
            sharding = Sharding(0, ranks, torch.bfloat16, None, formats=formats)
            assert isinstance(build_model(card, sharding), Decoder)
    blocks = WeightFormats(Fp8(32, 128), Int8())
    assert isinstance(build_model(card, Sharding(0, 2, torch.bfloat16, None, formats=blocks)), Decoder)
    sharding = Sharding(0, 3, torch.bfloat16, None, formats=blocks)  # 6 heads of 24 rows: 4.5 blocks
    with pytest.raises(ShardError, match=r"in_proj_qkv: cannot be held in .*: expected heads .* 32 rows on a rank"):
        build_model(card, sharding)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


def tensors_of(model_dir: Path) -> dict[str, Tensor]:
    return {name: tensor for path in model_dir.glob("*.safetensors") for name, tensor in load_file(path).items()}


def resaved(model_dir: Path, out: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    """Write the files of a checkpoint with other tensors and changes of config.json."""
    shutil.copytree(model_dir, out, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return write_config(out, config, json.loads((model_dir / "config.json").read_text()))


def weights(found: Decoder) -> dict[str, Tensor]:
    """Every weight of the language model, without its prefix."""
    held: dict[str, Tensor] = {}
    for rectangle in found.rectangles():
        parameter: Any = rectangle.parameter
        if isinstance(parameter, PlainParameter):
            values = parameter.data
        else:
            weight, _ = parameter.place(rectangle.row)
            values = weight.unpack()
        name = rectangle.name.removeprefix("model.").removeprefix("language_model.")
        held.setdefault(f"{name} {rectangle.row}", values)
    return held


@pytest.mark.parametrize("prefix", ["model.language_model.", "model."])
@pytest.mark.parametrize("is_nested", [True, False])
def test_the_files_decide_the_prefix(base: Path, tmp_path: Path, prefix: str, is_nested: bool) -> None:
    """All four pairs of prefix and config are in use; the head for several tokens and the tower may be on disk."""
    dims = {"hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "inter": 64, "layers": 4, "vocab": 400}
    alone = make_checkpoint("qwen3_5", base, text_alone=True, **dims)
    stored = tensors_of(alone)
    renamed = {re.sub("^model[.]", prefix, name): tensor for name, tensor in stored.items()}
    renamed |= {name: torch.ones(3) for name in ("mtp.fc.weight", "model.visual.pos_embed.weight")}
    found = resaved(alone, tmp_path / "renamed", renamed)
    if is_nested:
        text = json.loads((alone / "config.json").read_text())
        write_config(found, {"model_type": "qwen3_5", "text_config": text, "dtype": "bfloat16"}, {})
    wanted, ours = weights(loaded(alone)), weights(loaded(found))
    assert wanted.keys() == ours.keys() and len(wanted) > 40
    assert all(torch.equal(wanted[name], ours[name]) for name in wanted)


def test_only_checkpoints_with_a_tower_have_a_processor(base: Path) -> None:
    for text_alone in (True, False):
        model_dir = make_checkpoint("qwen3_5", base, layers=4, hidden=64, vocab=400, text_alone=text_alone)
        processor = load_processor(model_dir, Tokenizer(model_dir))
        assert isinstance(processor, type(None) if text_alone else QwenVLProcessor)


def test_float32_decays_are_kept_and_bf16_ones_are_read(base: Path) -> None:
    for all_bf16 in (False, True):
        model_dir = make_checkpoint("qwen3_5", base, layers=4, hidden=64, vocab=400, all_bf16=all_bf16)
        stored = tensors_of(model_dir)["model.language_model.layers.0.linear_attn.A_log"]
        assert stored.dtype is (torch.bfloat16 if all_bf16 else torch.float32)
        mixer = loaded(model_dir).layers[0].mixer
        assert isinstance(mixer, GatedDeltaNet)
        assert torch.equal(mixer.a_log.data, stored.float())
        assert all_bf16 or not torch.equal(stored, stored.bfloat16().float())


def test_experts_in_one_tensor_and_apart(base: Path, tmp_path: Path) -> None:
    """The fused tensor has the outputs first, also where its shape leaves that open (2 * 64 columns of 128)."""
    fused = make_checkpoint("qwen3_5_moe", base, layers=4, hidden=128, vocab=400, experts=4, moe_inter=64)
    apart: dict[str, Tensor] = {}
    for name, tensor in tensors_of(fused).items():
        if not name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            apart[name] = tensor
            continue
        parts = ["gate_proj", "up_proj"] if "gate_up" in name else ["down_proj"]
        for expert, matrix in enumerate(tensor):
            for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True):
                apart[f"{name.rpartition('.')[0]}.{expert}.{part}.weight"] = rows.clone()
    wanted, ours = weights(loaded(fused)), weights(loaded(resaved(fused, tmp_path / "apart", apart)))
    assert wanted.keys() == ours.keys()
    assert all(torch.equal(wanted[name], ours[name]) for name in wanted)
