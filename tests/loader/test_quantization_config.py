"""`quantization_config`: every supported published form, and one sentence for each that is not supported."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_configs import LLAMA, write_config
from mutate import json_mutations

from tilerank.loader.card import read_card
from tilerank.loader.errors import ConfigError
from tilerank.loader.quantization_config import QuantizationConfig, Scheme

AWQ: dict[str, Any] = {  # as AutoAWQ writes it
    "bits": 4,
    "group_size": 128,
    "modules_to_not_convert": None,
    "quant_method": "awq",
    "version": "gemm",
    "zero_point": True,
}
GPTQ: dict[str, Any] = {  # as GPTQModel writes it
    "bits": 4,
    "checkpoint_format": "gptq",
    "desc_act": False,
    "group_size": 128,
    "lm_head": False,
    "meta": {"quantizer": ["gptqmodel:2.2.0"], "static_groups": False},
    "pack_dtype": "int32",
    "quant_method": "gptq",
    "sym": True,
}
FP8: dict[str, Any] = {  # as in Qwen's files, with a shortened list
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "model.layers.0.input_layernorm"],
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
WEIGHTS = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False}
ACTIVATIONS = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
COMPRESSED: dict[str, Any] = {  # as llm-compressor writes it
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": ACTIVATIONS}},
    "format": "int-quantized",
    "ignore": ["lm_head", "re:.*self_attn[.]o_proj"],
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
ROUND: dict[str, Any] = {  # as AutoRound writes it
    "bits": 4,
    "data_type": "int",
    "group_size": 128,
    "packing_format": "auto_round:auto_gptq",
    "quant_method": "auto-round",
    "sym": True,
}
MODELOPT: dict[str, Any] = {"quant_algo": "FP8", "ignore": ["lm_head"], "producer": {"name": "modelopt"}}
UP = "model.layers.0.mlp.up_proj"


def read(model_dir: Path, values: dict[str, Any]) -> QuantizationConfig:
    found = read_card(write_config(model_dir, {"quantization_config": values})).quantization
    assert found is not None
    return found


def test_none(tmp_path: Path) -> None:
    assert read_card(write_config(tmp_path, {})).quantization is None
    assert read_card(write_config(tmp_path, {"quantization_config": None})).quantization is None


def test_awq(tmp_path: Path) -> None:
    found = read(tmp_path, AWQ)
    assert found.scheme == Scheme("awq", 4, (1, 128), symmetric=False)
    assert found.scheme_of(UP) and not found.scheme_of("lm_head")
    old = {"w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM", "quant_method": "awq"}
    assert read(tmp_path, old).scheme.group == 64


def test_gptq(tmp_path: Path) -> None:
    found = read(tmp_path, GPTQ)
    assert found.scheme == Scheme("gptq", 4, (1, 128), zeros_minus_one=True)
    assert str(found.scheme) == "int4 (gptq)"
    assert found.scheme_of(UP) and not found.scheme_of("lm_head")
    assert not read(tmp_path, GPTQ | {"checkpoint_format": "gptq_v2"}).scheme.zeros_minus_one
    oldest = {key: GPTQ[key] for key in ("quant_method", "bits", "group_size", "sym")}
    assert read(tmp_path, oldest).scheme.zeros_minus_one
    renamed = {key: value for key, value in GPTQ.items() if key != "checkpoint_format"} | {"format": "gptq_v2"}
    assert not read(tmp_path, renamed).scheme.zeros_minus_one
    assert read(tmp_path, GPTQ | {"format": "gptq_v2"}).scheme.zeros_minus_one, "the older name has priority"
    assert read(tmp_path, GPTQ | {"group_size": -1}).scheme.group == 0
    assert read(tmp_path, GPTQ | {"lm_head": True}).scheme_of("lm_head")
    assert not found.scheme.act_order and read(tmp_path, GPTQ | {"desc_act": True}).scheme.act_order
    assert not read(tmp_path, GPTQ | {"desc_act": True, "meta": {"static_groups": True}}).scheme.act_order
    old = {key: value for key, value in GPTQ.items() if key != "meta"} | {"desc_act": True}
    assert read(tmp_path, old).scheme.act_order and not read(tmp_path, old | {"static_groups": True}).scheme.act_order
    assert not read(tmp_path, old | {"group_size": -1}).scheme.act_order, "one group has no order"
    left = read(tmp_path, GPTQ | {"dynamic": {r"-:.*\.self_attn\..*": {}}})
    assert left.scheme_of(UP) and not left.scheme_of("model.layers.0.self_attn.q_proj")
    only = read(tmp_path, GPTQ | {"modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.down_proj"]]})
    assert only.scheme_of("model.layers.3.mlp.down_proj") and not only.scheme_of(UP)


@pytest.mark.parametrize(
    "pattern",
    [
        r"(model\.)?layers\.\d+\.mlp\..*",
        r".*\.(?:gate|up|down)_proj$",
        r"model\.layers\.(?:0|1|[2-9][0-9]?)\.mlp\.(gate|up)_proj",
        r"^(?!.*self_attn).*?\.up_proj$",
    ],
)
def test_patterns_of_names(tmp_path: Path, pattern: str) -> None:
    found = read(tmp_path, GPTQ | {"dynamic": {f"-:{pattern}": {}}})
    assert not found.scheme_of(UP)
    assert found.scheme_of("model.layers.0.self_attn.q_proj")


def test_fp8(tmp_path: Path) -> None:
    found = read(tmp_path, FP8)
    assert found.scheme == Scheme("fp8", 8, (128, 128))
    assert found.scheme_of("model.layers.0.mlp.gate_proj"), "its name begins like one that is left out"
    assert not found.scheme_of("model.layers.0.mlp.gate") and not found.scheme_of("lm_head")
    assert not read(tmp_path, FP8 | {"modules_to_not_convert": None}).scheme_of("lm_head")
    assert not read(tmp_path, FP8 | {"modules_to_not_convert": ["self_attn"]}).scheme_of(
        "model.layers.9.self_attn.k_proj"
    )


@pytest.mark.parametrize("method", ["blockwise_int8", "int8"])
def test_block_int8(tmp_path: Path, method: str) -> None:
    values = {"quant_method": method, "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    found = read(tmp_path, values)
    assert found.scheme == Scheme("int8", 8, (128, 128))
    assert found.scheme_of(UP) and not found.scheme_of("lm_head")


def test_int8(tmp_path: Path) -> None:
    assert read(tmp_path, {"quant_method": "int8"}) == read(tmp_path, {"quant_method": "w8a8_int8"})
    found = read(tmp_path, {"quant_method": "w8a8_int8"})
    assert found.scheme == Scheme("int8", 8, (1, 0))
    assert found.scheme_of(UP) and not found.scheme_of("lm_head")
    found = read(tmp_path, COMPRESSED)
    assert found.scheme == Scheme("int8", 8, (1, 0))
    assert found.scheme_of(UP)
    assert not found.scheme_of("model.layers.7.self_attn.o_proj") and not found.scheme_of("lm_head")
    found = read(tmp_path, COMPRESSED | {"ignore": []})
    assert found.scheme_of("lm_head") and not found.scheme_of("model.embed_tokens")


def group(**changes: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": COMPRESSED["config_groups"]["group_0"] | changes}}


PATTERNS = "regular expressions with at most 4 repetitions and groups, no group repeated"
REFUSALS: list[tuple[dict[str, Any], str]] = [
    (
        {"quant_method": "bitsandbytes"},
        "quant_method: expected one of awq, gptq, auto-round, fp8, fbgemm_fp8, compressed-tensors, modelopt, "
        "mxfp4, w8a8_int8, blockwise_int8, int8, found 'bitsandbytes'",
    ),
    ({}, "quant_method: expected a string, found no such key"),
    (AWQ | {"bits": 8}, "bits: expected 4, found 8"),
    (AWQ | {"version": "gemv"}, "version: expected 'gemm', the only layout of AWQ that is supported, found 'gemv'"),
    (AWQ | {"version": None, "format": "gemv"}, "format: expected 'gemm', the only layout of AWQ that is supported"),
    (AWQ | {"zero_point": False}, "zero_point: expected true, found False"),
    (AWQ | {"zero_point": 1}, "zero_point: expected true, found 1"),
    (AWQ | {"group_size": 48}, "group_size: expected -1 or a multiple of 32, found 48"),
    (AWQ | {"group_size": 0}, "group_size: expected -1 or a multiple of 32, found 0"),
    (AWQ | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert: expected a list of names of modules, found"),
    (GPTQ | {"bits": 3}, "bits: expected 4 or 8, found 3"),
    (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format: expected 'gptq' or 'gptq_v2', found 'marlin'"),
    (GPTQ | {"dynamic": {"+:.*down.*": {"bits": 3}}}, "dynamic.+:.*down.*.bits: expected 4 or 8, found 3"),
    (GPTQ | {"dynamic": {"-:.*down.*": 3}}, "dynamic: expected an object of settings for each rule, found"),
    (GPTQ | {"dynamic": {"-:(a+)+$": {}}}, f"dynamic: expected {PATTERNS}, found"),
    (GPTQ | {"dynamic": {"-:" + ".?" * 90 + "#": {}}}, f"dynamic: expected {PATTERNS}, found"),
    (GPTQ | {"dynamic": {"-:" + "(.|.|.|.)" * 20 + "#": {}}}, f"dynamic: expected {PATTERNS}, found"),
    (GPTQ | {"dynamic": {"-:a{99999999999}": {}}}, f"dynamic: expected {PATTERNS}, found"),
    (GPTQ | {"dynamic": {"-:[": {}}}, f"dynamic: expected {PATTERNS}, found"),
    (GPTQ | {"modules_in_block_to_quantize": ["a"]}, "modules_in_block_to_quantize: expected a list of lists"),
    (
        {"quant_method": "blockwise_int8"},
        "weight_block_size: expected [rows, columns] of the blocks that share a scale, multiples of 32, found no such "
        "key",
    ),
    (FP8 | {"fmt": "e5m2"}, "fmt: expected 'e4m3', found 'e5m2'"),
    (FP8 | {"activation_scheme": "other"}, "activation_scheme: expected dynamic or static, found 'other'"),
    (FP8 | {"weight_block_size": [128, 100]}, "weight_block_size: expected [rows, columns] of the blocks"),
    (FP8 | {"weight_block_size": [128, 0]}, "weight_block_size: expected rows and columns from 32 to 4096"),
    (
        COMPRESSED | {"format": "marlin-24"},
        "format: expected one of pack-quantized, nvfp4-pack-quantized, int-quantized, float-quantized, "
        "naive-quantized, found 'marlin-24'",
    ),
    (
        COMPRESSED | {"format": "pack-quantized"} | group(weights=WEIGHTS | {"strategy": "tensor"}),
        "config_groups.group_0.weights.strategy: expected group or channel, found 'tensor'",
    ),
    (COMPRESSED | {"ignore": ["re:.*.*.*.*.*"]}, f"ignore: expected {PATTERNS}, found"),
    (COMPRESSED | group(targets=["Conv2d"]), "config_groups.group_0.targets: expected Linear, names of modules"),
    (
        COMPRESSED | group(weights=WEIGHTS | {"strategy": "group"}),
        "config_groups.group_0.weights.strategy: expected tensor, channel or block, found 'group'",
    ),
    (
        COMPRESSED | group(input_activations=None),
        "config_groups.group_0.input_activations: expected an object, found None",
    ),
    (COMPRESSED | {"config_groups": None}, "config_groups: expected an object, found None"),
    (ROUND | {"packing_format": "auto_round:exl2"}, "packing_format: expected one of auto_round:auto_gptq, "),
    (
        MODELOPT | {"quant_algo": "W4A8_AWQ"},
        "quant_algo: expected one of FP8, FP8_PER_CHANNEL_PER_TOKEN, NVFP4, found 'W4A8_AWQ'",
    ),
    (
        COMPRESSED | {"format": "nvfp4-pack-quantized"} | group(weights=WEIGHTS | {"type": "float", "num_bits": 4}),
        "config_groups.group_0.weights.strategy: expected 'tensor_group', found 'channel'",
    ),
]


@pytest.mark.parametrize(("values", "sentence"), REFUSALS, ids=range(len(REFUSALS)))
def test_refusals(tmp_path: Path, values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, values)
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: quantization_config.{sentence}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("values", [AWQ, GPTQ, FP8, COMPRESSED], ids=["awq", "gptq", "fp8", "compressed"])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated(tmp_path: Path, values: dict[str, Any], data: st.DataObject) -> None:
    """Parsing raises only our own error, and a result that is accepted can be used."""
    text = data.draw(json_mutations(json.dumps(values)))
    (tmp_path / "config.json").write_bytes(json.dumps(LLAMA)[:-1].encode() + b', "quantization_config": ' + text + b"}")
    try:
        found = read_card(tmp_path).quantization
    except ConfigError as e:
        assert str(e).startswith(f"{tmp_path / 'config.json'}: ")
    else:
        assert found is None or (found.scheme_of(UP) is None) in (True, False)


def test_auto_round(tmp_path: Path) -> None:
    found = read(tmp_path, ROUND)
    assert found.scheme == Scheme("gptq", 4, (1, 128), zeros_minus_one=True)
    assert found.scheme_of(UP) and not found.scheme_of("lm_head")
    extra = {".*self_attn.*": {"bits": 16}, "model.layers.0.mlp.up_proj": {"bits": 8, "group_size": 32}}
    mixed = read(tmp_path, ROUND | {"extra_config": extra})
    assert mixed.scheme_of("model.layers.0.self_attn.q_proj") is None
    assert mixed.scheme_of(UP) == Scheme("gptq", 8, (1, 32), zeros_minus_one=True)
    assert mixed.scheme_of("model.layers.1.mlp.up_proj") == mixed.scheme
    assert read(tmp_path, ROUND | {"packing_format": "auto_round:auto_awq"}).scheme.layout == "awq"
    for packing, less_one in (("auto_round:gptq", True), ("auto", True), ("auto_round", False)):
        scheme = read(tmp_path, ROUND | {"packing_format": packing, "sym": False}).scheme
        assert scheme == Scheme("gptq", 4, (1, 128), symmetric=False, zeros_minus_one=less_one)


def test_rules_of_gptq(tmp_path: Path) -> None:
    """The first rule that matches counts; those of `lm_head` and the embedding, with empty objects, change nothing."""
    rules = {"lm_head": {}, "model.language_model.embed_tokens": {}, "-:.*attn.*": {}, "+:.*down.*": {"bits": 8}}
    found = read(tmp_path, GPTQ | {"dynamic": rules})
    assert found.scheme_of("lm_head") is None and found.scheme_of("model.language_model.embed_tokens") is None
    assert found.scheme_of("model.language_model.layers.0.linear_attn.out_proj") is None
    assert found.scheme_of("model.language_model.layers.0.mlp.experts.3.up_proj") == found.scheme
    down = found.scheme_of("model.language_model.layers.0.mlp.experts.3.down_proj")
    assert down is not None and down.bits == 8


def packed(**weights: Any) -> dict[str, Any]:
    numbers = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32} | weights
    groups = {"group_0": {"targets": ["Linear"], "weights": numbers, "input_activations": None}}
    return COMPRESSED | {"format": "pack-quantized", "config_groups": groups}


def test_packed(tmp_path: Path) -> None:
    assert read(tmp_path, packed()).scheme == Scheme("packed", 4, (1, 32))
    assert read(tmp_path, packed(symmetric=False, group_size=128)).scheme == Scheme("packed", 4, (1, 128), False)
    assert read(tmp_path, packed(strategy="channel", group_size=None)).scheme == Scheme("packed", 4, (1, 0))
    assert read(tmp_path, packed(group_size=-1, num_bits=8)).scheme == Scheme("packed", 8, (1, 0))
    assert read(tmp_path, packed(actorder="group")).scheme.act_order
    assert not read(tmp_path, packed(actorder="weight")).scheme.act_order


def test_groups_of_modules(tmp_path: Path) -> None:
    """Names of modules and patterns count before the class; `format` may stand in each group."""
    int4 = WEIGHTS | {"num_bits": 4, "strategy": "group", "group_size": 32}
    mlp = {"targets": ["re:.*mlp\\..*proj$"], "weights": int4}
    rest = {"targets": ["Linear"], "weights": WEIGHTS | {"type": "float"}, "format": "float-quantized"}
    values = COMPRESSED | {"config_groups": {"a": rest, "b": mlp | {"format": "pack-quantized"}}, "format": "mixed"}
    found = read(tmp_path, values | {"ignore": ["lm_head", "model.layers.1.mlp", "re:.*layers[.]2[.]"]})
    assert found.scheme_of(UP) == Scheme("packed", 4, (1, 32))
    assert found.scheme_of("model.layers.0.self_attn.q_proj") == found.scheme == Scheme("fp8", 8, (1, 0))
    assert found.scheme_of("model.layers.1.mlp.up_proj"), "a name excepts a module, not those inside it"
    assert not found.scheme_of("model.layers.2.mlp.up_proj") and not found.scheme_of("lm_head")


def test_fp8_without_blocks(tmp_path: Path) -> None:
    whole = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
    for values in (whole, whole | {"weight_block_size": None}, MODELOPT, MODELOPT | {"quant_method": "modelopt"}):
        found = read(tmp_path, values)
        assert found.scheme == Scheme("fp8", 8, (0, 0)) and found.scheme_of(UP) and not found.scheme_of("lm_head")
    assert read(tmp_path, {"quant_method": "fbgemm_fp8"}).scheme == Scheme("fp8", 8, (1, 0))
    block = WEIGHTS | {"type": "float", "strategy": "block", "block_structure": [128, 128]}
    values = COMPRESSED | {"format": "float-quantized"} | group(weights=block)
    assert read(tmp_path, values).scheme == Scheme("fp8", 8, (128, 128))


def test_names_on_disk_and_in_memory(tmp_path: Path) -> None:
    """A list may say `visual` for `model.visual`, and leaves out what is inside; a router is no `gate_proj`."""
    names = ["visual", "layers.3.mlp.gate", "model.layers.4.self_attn", "language_model.layers.5.mlp"]
    found = read(tmp_path, FP8 | {"modules_to_not_convert": names})
    for name in ("visual.blocks.0.attn.qkv", "layers.3.mlp.gate", "language_model.layers.4.self_attn.q_proj"):
        assert found.scheme_of(f"model.{name}") is None
    assert found.scheme_of("thinker.model.layers.5.mlp.up_proj") is None
    assert found.scheme_of("model.language_model.layers.3.mlp.gate_proj") == found.scheme


def test_hf_quant_config(tmp_path: Path) -> None:
    """It counts where config.json says nothing; its names may have wildcards."""
    write_config(tmp_path, {})
    where = tmp_path / "hf_quant_config.json"
    settings: dict[str, Any] = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}

    def read_alone(**changes: Any) -> QuantizationConfig | None:
        where.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": settings | changes}))
        return read_card(tmp_path).quantization

    found = read_alone()
    assert found is not None and found.scheme == Scheme("fp8", 8, (0, 0)) and not found.scheme_of("lm_head")
    assert found.cache == "quantization.kv_cache_quant_algo"
    found = read_alone(exclude_modules=["model.layers.0*", "*.o_proj"])
    assert found is not None and not found.scheme_of(UP) and found.scheme_of("model.layers.1.mlp.up_proj")
    assert not found.scheme_of("model.layers.1.self_attn.o_proj")
    assert read_alone(quant_algo=None) is None
    with pytest.raises(ConfigError) as caught:
        read_alone(quant_algo="W4A8_AWQ")
    expected = "quantization.quant_algo: expected one of FP8, FP8_PER_CHANNEL_PER_TOKEN, NVFP4, found 'W4A8_AWQ'"
    assert str(caught.value) == f"{where}: {expected}"
    assert read(tmp_path, FP8).scheme.block == (128, 128), "config.json comes first"


def test_mlx_is_refused(tmp_path: Path) -> None:
    values = {"group_size": 64, "bits": 8, "mode": "affine"}
    for key in ("quantization", "quantization_config"):
        with pytest.raises(ConfigError, match=rf"{key}: expected a quant_method.*in the format of MLX \(bits 8"):
            read_card(write_config(tmp_path, {key: values}))
