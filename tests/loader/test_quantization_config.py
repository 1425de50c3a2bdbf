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
from tilerank.loader.quantization_config import QuantizationConfig

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
    assert (found.layout, found.codes, found.group, found.symmetric) == ("awq", "int4", 128, False)
    assert found.converts(UP) and not found.converts("lm_head")
    old = {"w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM", "quant_method": "awq"}
    assert read(tmp_path, old).group == 64


def test_gptq(tmp_path: Path) -> None:
    found = read(tmp_path, GPTQ)
    assert (found.layout, found.codes, found.group, found.symmetric) == ("gptq", "int4", 128, True)
    assert found.zeros_minus_one
    assert found.converts(UP) and not found.converts("lm_head")
    assert not read(tmp_path, GPTQ | {"checkpoint_format": "gptq_v2"}).zeros_minus_one
    assert read(tmp_path, {key: GPTQ[key] for key in ("quant_method", "bits", "group_size", "sym")}).zeros_minus_one
    renamed = {key: value for key, value in GPTQ.items() if key != "checkpoint_format"} | {"format": "gptq_v2"}
    assert not read(tmp_path, renamed).zeros_minus_one
    assert read(tmp_path, GPTQ | {"format": "gptq_v2"}).zeros_minus_one, "the older name has priority"
    assert read(tmp_path, GPTQ | {"group_size": -1}).group == 0
    assert read(tmp_path, GPTQ | {"lm_head": True}).converts("lm_head")
    assert not found.act_order and read(tmp_path, GPTQ | {"desc_act": True}).act_order
    assert not read(tmp_path, GPTQ | {"desc_act": True, "meta": {"static_groups": True}}).act_order
    old = {key: value for key, value in GPTQ.items() if key != "meta"} | {"desc_act": True}
    assert read(tmp_path, old).act_order and not read(tmp_path, old | {"static_groups": True}).act_order
    assert not read(tmp_path, old | {"group_size": -1}).act_order, "one group has no order"
    left = read(tmp_path, GPTQ | {"dynamic": {r"-:.*\.self_attn\..*": {}}})
    assert left.converts(UP) and not left.converts("model.layers.0.self_attn.q_proj")
    only = read(tmp_path, GPTQ | {"modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.down_proj"]]})
    assert only.converts("model.layers.3.mlp.down_proj") and not only.converts(UP)


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
    assert not found.converts(UP)
    assert found.converts("model.layers.0.self_attn.q_proj")


def test_fp8(tmp_path: Path) -> None:
    found = read(tmp_path, FP8)
    assert (found.layout, found.codes, found.block) == ("fp8", "fp8", (128, 128))
    assert found.converts("model.layers.0.mlp.gate_proj"), "its name begins like one that is left out"
    assert not found.converts("model.layers.0.mlp.gate") and not found.converts("lm_head")
    assert not read(tmp_path, FP8 | {"modules_to_not_convert": None}).converts("lm_head")
    assert not read(tmp_path, FP8 | {"modules_to_not_convert": ["self_attn"]}).converts(
        "model.layers.9.self_attn.k_proj"
    )


@pytest.mark.parametrize("method", ["blockwise_int8", "int8"])
def test_block_int8(tmp_path: Path, method: str) -> None:
    values = {"quant_method": method, "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    found = read(tmp_path, values)
    assert (found.layout, found.codes, found.block) == ("block_int8", "int8", (128, 128))
    assert found.converts(UP) and not found.converts("lm_head")


def test_int8(tmp_path: Path) -> None:
    assert read(tmp_path, {"quant_method": "int8"}) == read(tmp_path, {"quant_method": "w8a8_int8"})
    found = read(tmp_path, {"quant_method": "w8a8_int8"})
    assert (found.layout, found.codes) == ("int8", "int8")
    assert found.converts(UP) and not found.converts("lm_head")
    found = read(tmp_path, COMPRESSED)
    assert (found.layout, found.codes) == ("int8", "int8")
    assert (
        found.converts(UP) and not found.converts("model.layers.7.self_attn.o_proj") and not found.converts("lm_head")
    )
    found = read(tmp_path, COMPRESSED | {"ignore": []})
    assert found.converts("lm_head") and not found.converts("model.embed_tokens")


def group(**changes: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": COMPRESSED["config_groups"]["group_0"] | changes}}


PATTERNS = "regular expressions with at most 4 repetitions and groups, no group repeated"
REFUSALS: list[tuple[dict[str, Any], str]] = [
    (
        {"quant_method": "bitsandbytes"},
        "quant_method: expected one of awq, gptq, fp8, compressed-tensors, w8a8_int8, blockwise_int8, int8, "
        "found 'bitsandbytes'",
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
    (GPTQ | {"bits": 3}, "bits: expected 4, found 3"),
    (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format: expected 'gptq' or 'gptq_v2', found 'marlin'"),
    (
        GPTQ | {"dynamic": {"+:.*down.*": {"bits": 8}}},
        "dynamic: expected rules that leave modules out (-:PATTERN) only, found",
    ),
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
    (FP8 | {"activation_scheme": "static"}, "activation_scheme: expected 'dynamic', found 'static'"),
    (FP8 | {"weight_block_size": [128, 100]}, "weight_block_size: expected [rows, columns] of the blocks"),
    (FP8 | {"weight_block_size": [128, 0]}, "weight_block_size: expected rows and columns from 32 to 4096"),
    (COMPRESSED | {"format": "pack-quantized"}, "format: expected 'int-quantized', found 'pack-quantized'"),
    (COMPRESSED | {"ignore": ["re:.*.*.*.*.*"]}, f"ignore: expected {PATTERNS}, found"),
    (COMPRESSED | {"kv_cache_scheme": {}}, "kv_cache_scheme: expected no such key"),
    (COMPRESSED | group(targets=["Conv2d"]), "config_groups.group_0.targets: expected ['Linear'], found ['Conv2d']"),
    (
        COMPRESSED | group(weights=WEIGHTS | {"strategy": "group"}),
        "config_groups.group_0.weights.strategy: expected 'channel', found 'group'",
    ),
    (
        COMPRESSED | group(input_activations=None),
        "config_groups.group_0.input_activations: expected an object, found None",
    ),
    (COMPRESSED | {"config_groups": {}}, "config_groups: expected one group of modules, found {}"),
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
        assert found is None or found.converts(UP) in (True, False)
