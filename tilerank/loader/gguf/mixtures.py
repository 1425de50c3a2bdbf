"""The architectures of GGUF with mixtures of experts. No torch."""

from typing import Any

from .architecture import (
    COMMON_NAMES,
    HEAD_NORMS,
    POST_NORM,
    USUAL_ENDS,
    Architecture,
    Keys,
    Names,
    decoder_config,
    has_biases,
    rotated_part,
)
from .file import GGUFFile
from .towers import QWEN_TOWER

_SIGMOID = 2  # a value of expert_gating_func

EXPERTS: Names = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_up_exps": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
}
MIXTRAL_EXPERTS: Names = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    "ffn_gate_up_exps": ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
}
SHARED_EXPERT = {
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
SHARED_GATE_AXES = {"ffn_gate_inp_shexp": 0}
"""The gate of the shared expert is a vector in files and a matrix of one row on the hub."""
_DEEPSEEK_EXPERTS: Names = {
    **EXPERTS,
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}


def experts_config(keys: Keys) -> dict[str, Any]:
    """Return the fields of a mixture of experts, with the names that Qwen gives them."""
    used, dense = keys.integer("expert_used_count"), keys.integer("feed_forward_length", 0)
    return {
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": used,
        "moe_intermediate_size": keys.integer("expert_feed_forward_length", dense // max(used, 1)),
        "decoder_sparse_step": 1,
    }


def shared_width(keys: Keys) -> int:
    """Return the width of Qwen's shared expert."""
    return keys.integer("expert_shared_feed_forward_length", keys.integer("feed_forward_length", 0))


def _qwen2_moe(gguf: GGUFFile) -> dict[str, Any]:
    keys = Keys(gguf)
    shared = {"shared_expert_intermediate_size": shared_width(keys), "norm_topk_prob": False}
    return decoder_config(gguf, "qwen2_moe") | experts_config(keys) | shared


def _qwen3_moe(gguf: GGUFFile) -> dict[str, Any]:
    biases = {"attention_bias": has_biases(gguf, "attn_q"), "norm_topk_prob": True}
    return decoder_config(gguf, "qwen3_moe") | experts_config(Keys(gguf)) | biases


def _check_sigmoid(gguf: GGUFFile, keys: Keys) -> None:
    """Raise ConfigError unless routers compute sigmoids and have a bias (exp_probs_b) for choosing experts.

    Older files have no key for sigmoids; there the bias stands for them.
    """
    key = "expert_gating_func"
    biased = any(name.endswith(".exp_probs_b.bias") for name in gguf.tensors)
    found = keys.integer(key, _SIGMOID if biased else 0)
    if found != _SIGMOID or not biased:
        raise keys.fail(key, f"{_SIGMOID} (sigmoid) and tensors exp_probs_b, found {found if biased else 'none'}")


def _deepseek_experts_config(gguf: GGUFFile, keys: Keys) -> dict[str, Any]:
    """Return the fields of a mixture of experts, with the names that DeepSeek gives them."""
    _check_sigmoid(gguf, keys)
    return {
        "n_routed_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "n_shared_experts": keys.integer("expert_shared_count", 0),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "norm_topk_prob": keys.flag("expert_weights_norm"),
        "routed_scaling_factor": keys.number("expert_weights_scale", 0.0) or 1.0,
        "first_k_dense_replace": keys.integer("leading_dense_block_count", 0),
        "n_group": max(keys.integer("expert_group_count", 1), 1),
        "topk_group": max(keys.integer("expert_group_used_count", 1), 1),
    }


def _glm4_moe(gguf: GGUFFile) -> dict[str, Any]:
    keys = Keys(gguf)
    config = decoder_config(gguf, "glm4_moe")
    return (
        config
        | _deepseek_experts_config(gguf, keys)
        | {
            "attention_bias": has_biases(gguf, "attn_q"),
            "use_qk_norm": any(name.endswith(".attn_q_norm.weight") for name in gguf.tensors),
            "partial_rotary_factor": rotated_part(keys, config["head_dim"]),
        }
    )


def _minimax_m2(gguf: GGUFFile) -> dict[str, Any]:
    keys = Keys(gguf)
    _check_sigmoid(gguf, keys)
    ids = gguf.fields("tokenizer.ggml.").values
    return decoder_config(gguf, "minimax_m2", width=keys.integer("expert_feed_forward_length")) | {
        "num_local_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "rotary_dim": keys.integer("rope.dimension_count"),
        "bos_token_id": ids.get("bos_token_id"),
        "eos_token_id": ids.get("eos_token_id"),
    }


def _gpt_oss(gguf: GGUFFile) -> dict[str, Any]:
    keys = Keys(gguf)
    config = decoder_config(gguf, "gpt_oss", width=keys.integer("expert_feed_forward_length"))
    scaling = config["rope_scaling"]
    if scaling is not None and scaling["rope_type"] == "yarn":
        scaling = scaling | {"truncate": False}  # always so in gpt-oss; files have no key for it
    return config | {
        "attention_bias": True,
        "rope_scaling": scaling,
        "sliding_window": keys.integer("attention.sliding_window"),
        "num_local_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
    }


def _deepseek2(gguf: GGUFFile) -> dict[str, Any]:
    keys = Keys(gguf)
    config = decoder_config(gguf, "deepseek_v3", kv_heads=keys.integer("attention.head_count"))
    scaling, key = config["rope_scaling"], "rope.scaling.yarn_log_multiplier"
    if scaling is not None and (weight := 10 * keys.number(key, 0.0)):  # files store mscale_all_dim / 10
        scaling = scaling | {"mscale": weight, "mscale_all_dim": weight}
    # Newer files have the dimensions of absorbed (latent) heads under the usual keys, those of the heads under _mla.
    key_dim, value_dim = (
        keys.integer(f"attention.{part}_length_mla", keys.integer(f"attention.{part}_length"))
        for part in ("key", "value")
    )
    rotated = keys.integer("rope.dimension_count")
    if rotated >= key_dim:
        raise keys.fail("rope.dimension_count", f"fewer than the {key_dim} dimensions of a head, found {rotated}")
    return (
        config
        | _deepseek_experts_config(gguf, keys)
        | {
            "rope_scaling": scaling,
            "q_lora_rank": keys.integer("attention.q_lora_rank", 0) or None,
            "kv_lora_rank": keys.integer("attention.kv_lora_rank"),
            "qk_nope_head_dim": key_dim - rotated,
            "qk_rope_head_dim": rotated,
            "v_head_dim": value_dim,
            "attention_bias": has_biases(gguf, "attn_output"),
        }
    )


MIXTURES = {
    "qwen2moe": Architecture(_qwen2_moe, {**COMMON_NAMES, **EXPERTS, **SHARED_EXPERT}, axes=SHARED_GATE_AXES),
    "qwen3moe": Architecture(_qwen3_moe, {**COMMON_NAMES, **HEAD_NORMS, **EXPERTS}),
    # As for qwen3vl, the text model is Qwen3-MoE.
    "qwen3vlmoe": Architecture(_qwen3_moe, {**COMMON_NAMES, **HEAD_NORMS, **EXPERTS}, tower=QWEN_TOWER),
    "glm4moe": Architecture(
        _glm4_moe,
        {**POST_NORM, **HEAD_NORMS, **_DEEPSEEK_EXPERTS},
        ends=(*USUAL_ENDS, "<|user|>", "<|observation|>"),
    ),
    "minimax-m2": Architecture(
        _minimax_m2,
        {
            **COMMON_NAMES,
            **HEAD_NORMS,
            **MIXTRAL_EXPERTS,
            "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias",
        },
        ends=(*USUAL_ENDS, "[e~["),
    ),
    "gpt-oss": Architecture(
        _gpt_oss,
        {
            **POST_NORM,
            **EXPERTS,
            "attn_sinks.weight": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
            "ffn_gate_exps.bias": "mlp.experts.gate_proj_bias",
            "ffn_up_exps.bias": "mlp.experts.up_proj_bias",
            "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
        },
        ends=("<|return|>", "<|call|>", "<|endoftext|>"),  # without <|end|>, which ends a message, not the answer
    ),
    "deepseek2": Architecture(
        _deepseek2,
        {
            **COMMON_NAMES,
            **_DEEPSEEK_EXPERTS,
            "attn_q_a": "self_attn.q_a_proj",
            "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_q_b": "self_attn.q_b_proj",
            "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm",
            "attn_kv_b": "self_attn.kv_b_proj",
            "attn_k_b": "self_attn.k_b_proj",
            "attn_v_b": "self_attn.v_b_proj",
        },
    ),
}
"""By general.architecture."""
