"""Tiny quantised checkpoints by name, each beside one of the same weights, dequantised.

make("awq-32", tmp) -> both directories of one of CASES
"""

from pathlib import Path
from typing import Any

import torch
from tiny import make_checkpoint

from .layouts import encode

# Widths of 7 tiles, and of 5 and 2.75 blocks of 128; heads that do not divide; groups of 128 columns, heads of 64.
SMALL = {"hidden": 192, "heads": 6, "kv_heads": 3, "inter": 224, "layers": 2, "vocab": 500}
WIDE = {"hidden": 384, "heads": 6, "kv_heads": 6, "head_dim": 64, "inter": 640, "layers": 2, "vocab": 500}
MIXTURE = SMALL | {"head_dim": 32, "experts": 4, "topk": 2}
DELTA_NET = {"hidden": 192, "heads": 6, "kv_heads": 3, "head_dim": 64, "inter": 352, "layers": 4, "vocab": 500}
# Two key heads, whose rows are whole blocks of 128, as in the released model.
NEXT = MIXTURE | {"layers": 1, "experts": 2, "moe_inter": 96, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
NEXT |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
# Heads of 48 rows begin within blocks of 128 rows that share a scale. Tokens take all experts: rounding sends none to
# another expert, so that errors are small ones.
DEEPSEEK: dict[str, Any] = {"seed": 4, "vocab": 500, "layers": 3, "experts": 6, "topk": 6}
DEEPSEEK["config"] = {"n_group": 1, "topk_group": 1}
PARTIAL = {"hidden": 192, "heads": 6, "kv_heads": 3, "head_dim": 64, "inter": 352, "layers": 2, "vocab": 500}
# Heads of 48 columns and 11 groups of 16 inputs.
NARROW = {"hidden": 176, "heads": 5, "kv_heads": 5, "head_dim": 48, "inter": 176, "layers": 2, "vocab": 500}

VISION = {"seed": 5, "hidden": 192, "heads": 6, "kv_heads": 3, "head_dim": 64, "inter": 352, "layers": 4, "vocab": 777}
TOWER = ("model.visual",)

CASES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "awq-32": ("qwen2", SMALL, "awq", {"group": 32}),
    "awq-128": ("llama3", WIDE | {"tied": True}, "awq", {"group": 128}),
    "awq-keeps-attention": ("llama3", WIDE, "awq", {"group": 64, "keep": ("layers.1.self_attn",)}),
    "gptq-32": ("qwen2", SMALL, "gptq", {"group": 32}),
    "gptq-v2-64": ("qwen3", WIDE, "gptq", {"group": 64, "form": "gptq_v2"}),
    "gptq-all-columns": ("llama3", WIDE, "gptq", {"group": -1, "sym": True, "form": "gptq"}),
    "gptq-v1-that-is-v2": ("llama3", WIDE, "gptq", {"group": 128, "sym": True, "form": "gptq", "stored_zero": 8}),
    "gptq-act-order": ("qwen2", SMALL, "gptq", {"group": 32, "act_order": True}),
    "gptq-act-order-symmetric": ("llama3", WIDE, "gptq", {"group": 128, "sym": True, "act_order": True}),
    "fp8": ("llama3", PARTIAL, "fp8", {}),
    "fp8-keeps-mlp": ("qwen3", PARTIAL, "fp8", {"keep": ("layers.0.mlp",)}),
    "fp8-exponents": ("qwen3", PARTIAL, "fp8", {"exponents": True}),
    "block-int8": ("llama3", PARTIAL, "blockwise_int8", {}),
    "w8a8": ("qwen2", SMALL, "w8a8_int8", {}),
    "moe-awq": ("qwen3_moe", MIXTURE | {"moe_inter": 96}, "awq", {"group": 32}),
    "moe-fp8": ("qwen3_moe", MIXTURE | {"moe_inter": 288}, "fp8", {}),
    "moe-block-int8": ("qwen3_moe", MIXTURE | {"moe_inter": 288}, "blockwise_int8", {}),
    "moe-w8a8": ("qwen3_moe", MIXTURE | {"moe_inter": 208}, "w8a8_int8", {}),
    "delta-net-fp8": ("qwen3_5", DELTA_NET, "fp8", {}),
    "delta-net-awq": ("qwen3_5", DELTA_NET, "awq", {"group": 32, "keep": ("linear_attn",)}),
    "delta-net-gptq": ("qwen3_5", DELTA_NET, "gptq", {"group": 32, "keep": ("in_proj_b", "in_proj_a")}),
    "deepseek-fp8": ("deepseek_v3", DEEPSEEK, "fp8", {}),
    "deepseek-block-int8": ("deepseek_v3", DEEPSEEK, "blockwise_int8", {}),
    "deepseek-w8a8": ("deepseek_v3", DEEPSEEK, "w8a8_int8", {}),
    "deepseek-compressed": ("deepseek_v3", DEEPSEEK, "compressed-tensors", {}),
    "vl-fp8": ("qwen3_vl", VISION, "fp8", {"keep": TOWER}),
    "vl-awq": ("qwen3_vl", VISION, "awq", {"group": 32, "keep": TOWER}),
    "vl-gptq": ("qwen3_vl", VISION, "gptq", {"group": 32, "sym": True, "keep": TOWER}),
    "deepseek-awq": ("deepseek_v3", DEEPSEEK, "awq", {"group": 32}),
    "deepseek-fp8-tensor": ("deepseek_v3", DEEPSEEK, "fp8-tensor", {}),
    "deepseek-fp8-channel": ("deepseek_v3", DEEPSEEK, "fp8-compressed", {}),
    "delta-net-packed": ("qwen3_5", DELTA_NET, "packed", {"group": 32, "sym": False, "gates": True}),
    "delta-net-fp8-gates": ("qwen3_5", DELTA_NET, "fp8-tensor", {"gates": True}),
    "compressed": ("llama3", PARTIAL, "compressed-tensors", {"keep": ("o_proj",)}),
    "gptq-8": ("qwen3", WIDE, "gptq", {"bits": 8, "group": 128, "sym": True, "form": "gptq"}),
    "gptq-8-zeros": ("qwen2", SMALL, "gptq", {"bits": 8, "group": 32}),
    "auto-round": ("qwen3", WIDE, "auto-round", {"group": 64, "keep": ("layers.0.mlp",)}),
    "auto-round-zeros": ("qwen3", WIDE, "auto-round", {"group": 64, "sym": False}),
    "auto-round-own": ("qwen3", WIDE, "auto-round", {"group": 64, "sym": False, "packing": "auto_round"}),
    "packed-32": ("llama3", WIDE, "packed", {"group": 32}),
    "packed-128-zeros": ("qwen3", WIDE, "packed", {"group": 128, "sym": False}),
    "packed-channel": ("llama3", WIDE, "packed", {"group": -1}),
    "packed-8-bits": ("qwen3", WIDE, "packed", {"bits": 8, "group": 128}),
    "moe-packed": ("qwen3_moe", MIXTURE | {"moe_inter": 96}, "packed", {"group": 32, "keep": ("self_attn",)}),
    "fp8-tensor": ("qwen3", PARTIAL, "fp8-tensor", {}),
    "fp8-modelopt": ("llama3", PARTIAL, "fp8-tensor", {"method": "modelopt", "shape": (1,), "keep": ("o_proj",)}),
    "moe-fp8-tensor": ("qwen3_moe", MIXTURE | {"moe_inter": 288}, "fp8-tensor", {}),
    "fp8-channel": ("llama3", PARTIAL, "fp8-compressed", {"scales": torch.bfloat16}),
    "fp8-compressed-block": ("qwen3", PARTIAL, "fp8-compressed", {"strategy": "block"}),
    "moe-mxfp4": ("gpt_oss", {"vocab": 500, "layers": 2, "topk": 5}, "mxfp4", {}),
    "nvfp4": ("qwen3", NARROW, "nvfp4", {}),
    "moe-nvfp4": ("qwen3_moe", MIXTURE | {"moe_inter": 80}, "nvfp4", {"by": "modelopt", "keep": ("self_attn",)}),
    "next-fp8": ("qwen3_next", NEXT, "fp8", {}),
    "minimax-fp8": ("minimax_m2", MIXTURE | {"layers": 1, "experts": 2, "moe_inter": 160}, "fp8", {}),
    "moe-fp8-channel": ("qwen3_moe", MIXTURE | {"moe_inter": 288}, "fp8-compressed", {}),
}


def make(case: str, tmp: Path) -> tuple[Path, Path]:
    """Return the quantised checkpoint and the plain one of the same weights. Make them below `tmp` unless they
    exist."""
    family, dims, layout, options = CASES[case]
    out = tmp / case
    plain = Path(f"{out}-plain")
    if not plain.exists():
        encode(make_checkpoint(family, tmp, **dims), out, layout, **options)
    return out, plain


def kept(case: str) -> list[str]:
    """Return parts of the names of the projections that stay floats."""
    return list(CASES[case][3].get("keep", ()))
