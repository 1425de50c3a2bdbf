"""The architectures of GGUF with gated delta nets: Qwen3-Next, and Qwen3.5 with its successors. No torch."""

from collections.abc import Mapping
from typing import Any

from .architecture import (
    HEAD_NORMS,
    POST_NORM,
    Architecture,
    Change,
    Keys,
    Names,
    Order,
    decoder_config,
    rotated_part,
)
from .file import GGUFFile
from .mixtures import EXPERTS, SHARED_EXPERT, SHARED_GATE_AXES, experts_config, shared_width
from .towers import QWEN_TOWER

_FULL, _DELTA_NET = "full_attention", "linear_attention"

_NAMES: Names = {
    **POST_NORM,
    **HEAD_NORMS,
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
}
_GATES = {"ssm_alpha": "linear_attn.in_proj_a", "ssm_beta": "linear_attn.in_proj_b"}
_GROUPED = {"ssm_ba": "linear_attn.in_proj_ba", "ssm_in": "linear_attn.in_proj_qkvz"}
_AXES = SHARED_GATE_AXES | {"ssm_conv1d": 1}
_NORMS = ("attn_norm", "post_attention_norm", "attn_q_norm", "attn_k_norm", "output_norm")
_CHANGES: dict[str, Change] = {**dict.fromkeys(_NORMS, "plus_one"), "ssm_a": "negative_exp"}


def _config(gguf: GGUFFile, model_type: str) -> dict[str, Any]:
    keys = Keys(gguf)
    config = decoder_config(gguf, model_type)
    value_heads = keys.integer("ssm.time_step_rank")
    inner = keys.integer("ssm.inner_size")
    if not value_heads or inner % value_heads:
        raise keys.fail("ssm.inner_size", f"a multiple of the {value_heads} value heads, found {inner}")
    return config | {
        "layer_types": _layer_types(keys, config["num_hidden_layers"]),
        "partial_rotary_factor": rotated_part(keys, config["head_dim"]),
        "linear_num_key_heads": keys.integer("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": keys.integer("ssm.state_size"),
        "linear_value_head_dim": inner // value_heads,
        "linear_conv_kernel_dim": keys.integer("ssm.conv_kernel"),
    }


def _layer_types(keys: Keys, layers: int) -> list[str]:
    """Return the kind of each layer: as the file lists them, or full attention in every `interval`-th layer."""
    listed = "attention.recurrent_layers"
    if keys.has(listed):
        return [_DELTA_NET if is_recurrent else _FULL for is_recurrent in keys.of_layers(listed, layers)]
    interval = max(keys.integer("full_attention_interval", 4), 1)
    return [_DELTA_NET if (layer + 1) % interval else _FULL for layer in range(layers)]


def _mixture(gguf: GGUFFile) -> dict[str, Any]:
    keys = Keys(gguf)
    return experts_config(keys) | {"shared_expert_intermediate_size": shared_width(keys), "norm_topk_prob": True}


def _qwen3_next(gguf: GGUFFile) -> dict[str, Any]:
    return _config(gguf, "qwen3_next") | _mixture(gguf)


def _qwen35(gguf: GGUFFile) -> dict[str, Any]:
    return _config(gguf, "qwen3_5_text")


def _qwen35_moe(gguf: GGUFFile) -> dict[str, Any]:
    return _config(gguf, "qwen3_5_moe_text") | _mixture(gguf)


def _tiled_value_heads(config: Mapping[str, Any]) -> Mapping[str, Order]:
    """Return the orders of value heads: by key heads on the hub [keys, each], tiled in a file [each, keys]."""
    keys, values, dim = (config[f"linear_{part}"] for part in ("num_key_heads", "num_value_heads", "value_head_dim"))
    each = values // max(keys, 1)
    heads, rows = Order(keys, each), Order(keys, each, dim)  # one row for each head, or its dimensions
    after_keys = Order(keys, each, dim, first=2 * keys * config["linear_key_head_dim"])
    orders = {
        "in_proj_z": rows,
        "in_proj_qkv": after_keys,
        "conv1d": after_keys,
        **dict.fromkeys(("in_proj_a", "in_proj_b", "A_log", "dt_bias"), heads),
        "out_proj": Order(keys, each, dim, of_columns=True),
    }
    return {f"linear_attn.{name}": order for name, order in orders.items()}


DELTA_NETS = {
    "qwen3next": Architecture(
        _qwen3_next, {**_NAMES, **_GROUPED, **EXPERTS, **SHARED_EXPERT}, changes=_CHANGES, axes=_AXES
    ),
    "qwen35": Architecture(
        _qwen35,
        {**_NAMES, **_GATES},
        changes=_CHANGES,
        axes=_AXES,
        orders=_tiled_value_heads,
        tower=QWEN_TOWER,
    ),
    "qwen35moe": Architecture(
        _qwen35_moe,
        {**_NAMES, **_GATES, **EXPERTS, **SHARED_EXPERT},
        changes=_CHANGES,
        axes=_AXES,
        orders=_tiled_value_heads,
        tower=QWEN_TOWER,
    ),
}
"""By general.architecture."""
