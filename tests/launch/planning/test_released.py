"""Plans of models as they are released, at 1, 2, 3 and 6 ranks: their bytes are those of their files.

The bytes are arithmetic: every tensor that is used, in the dtype of the file, quantised layers as codes, scales and
zero points. A plan also has tables of rotations, and holds some scales and zero points in more bytes than files do.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from fake_sysfs import sockets
from model_configs import GPT_OSS, LLAMA
from planning import plan_on

from tilerank.loader.card import read_card
from tilerank.loader.errors import ConfigError

QWEN = LLAMA | {
    "model_type": "qwen3",
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_scaling": None,
    "bos_token_id": None,
    "eos_token_id": 151645,
}
VISION = {
    "deepstack_visual_indexes": [8, 16, 24],
    "depth": 27,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "in_channels": 3,
    "intermediate_size": 4304,
    "num_heads": 16,
    "out_hidden_size": 4096,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
"""Without num_position_embeddings, as in Qwen3-Omni."""
PICTURES = {
    "model_type": "qwen3_vl",
    "text_config": QWEN | {"max_position_embeddings": 262144, "rope_theta": 5000000},
    "vision_config": VISION,
}
"""Without sections of positions."""
DELTA_NETS = {
    "model_type": "qwen3_5",
    "dtype": "bfloat16",
    "vision_config": VISION
    | {"out_hidden_size": 5120, "deepstack_visual_indexes": [], "num_position_embeddings": 2304},
    "text_config": {
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "vocab_size": 248320,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262144,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
    },
}


def compressed(form: str, activations: bool = False, *ignored: str, **weights: Any) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "int", "symmetric": True} | weights,
        "input_activations": {"num_bits": 8, "dynamic": True} if activations else None,
    }
    ignore = ["lm_head", *ignored]
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": ignore}


INT4: dict[str, Any] = {"num_bits": 4, "strategy": "group", "group_size": 128}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 8, "group_size": 128, "desc_act": False, "sym": True}
ROUND = GPTQ | {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_gptq"}
FP8 = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
NAMES = ["lm_head", "visual", "model.visual", "model.embed_tokens"]
for layer in range(64):
    NAMES += [f"model.language_model.layers.{layer}.{name}" for name in ("mlp.gate", "mlp.shared_expert_gate")]
    NAMES += [f"model.language_model.layers.{layer}.linear_attn.in_proj_{name}" for name in ("a", "b", "ba")]
ALONE = [
    f"model.language_model.layers.{layer}.linear_attn{end}"
    for layer in range(64)
    for end in ("", ".in_proj_a", ".in_proj_b", ".norm")
]

RELEASED: dict[str, tuple[dict[str, Any], dict[str, Any] | None, int]] = {
    "llama": (LLAMA, None, 16_060_522_496),
    "llama-w8a8": (LLAMA, compressed("int-quantized", True, strategy="channel"), 9_083_953_152),
    "llama-w4a16": (LLAMA, compressed("pack-quantized", **INT4), 5_700_591_616),
    "llama-nvfp4": (LLAMA, {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, 6_027_748_224),
    "llama-fp8-dynamic": (LLAMA, compressed("float-quantized", True, type="float", strategy="channel"), 9_083_953_152),
    "qwen": (QWEN, None, 16_381_470_720),
    "qwen-awq": (QWEN, AWQ, 6_098_479_104),
    "qwen-gptq-8": (QWEN, GPTQ, 9_603_803_136),
    "qwen-auto-round": (QWEN, ROUND, 6_098_479_104),
    "qwen-fp8-tensor": (QWEN, FP8, 9_435_705_312),
    "qwen-fp8-block": (
        QWEN,
        compressed("float-quantized", type="float", strategy="block", block_structure=[128, 128]),
        9_436_551_168,
    ),
    "gpt-oss": (
        GPT_OSS,
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
        13_761_264_768,
    ),
    "pictures": (PICTURES, None, 17_534_247_392),
    "delta-nets": (DELTA_NETS, None, 54_713_457_120),
    "delta-nets-fp8": (DELTA_NETS, BLOCKS | {"modules_to_not_convert": NAMES}, 30_392_433_120),
    "delta-nets-w4a16": (
        DELTA_NETS,
        compressed("pack-quantized", False, *ALONE, **INT4 | {"symmetric": False}),
        18_698_148_320,
    ),
}


def check(tmp_path: Path, nbytes: int) -> None:
    card = read_card(tmp_path)
    weights = [plan_on(sockets(1, 8), tmp_path / f"{tp}", card, tp, cores="none").memory.weights for tp in (1, 2, 3, 6)]
    assert abs(weights[0] / nbytes - 1) < 0.02
    assert all(weights[0] <= more < 1.12 * weights[0] for more in weights[1:])


@pytest.mark.parametrize("name", RELEASED)
def test_bytes(tmp_path: Path, name: str) -> None:
    config, settings, nbytes = RELEASED[name]
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    check(tmp_path, nbytes)


def test_settings_beside_config(tmp_path: Path) -> None:
    """Fp8 by hf_quant_config.json alone has the bytes of fp8; what is not read is refused, and not planned as bf16."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    settings = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    where = tmp_path / "hf_quant_config.json"
    where.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": settings}))
    check(tmp_path, 9_435_705_312)
    where.write_text(json.dumps({"quantization": settings | {"quant_algo": "W4A8_AWQ"}}))
    with pytest.raises(ConfigError, match=r"hf_quant_config\.json: quantization\.quant_algo: .* found 'W4A8_AWQ'"):
        read_card(tmp_path)
