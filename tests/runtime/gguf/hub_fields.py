"""Makes the metadata of a GGUF file from a config.json, with the keys of llama.cpp's converter."""

from collections.abc import Callable
from typing import Any

Fields = dict[str, Any]


def _deepseek_experts(c: Fields) -> Fields:
    return {
        "expert_shared_count": c["n_shared_experts"],
        "leading_dense_block_count": c["first_k_dense_replace"],
        "expert_count": c["n_routed_experts"],
        "expert_weights_scale": float(c["routed_scaling_factor"]),
        "expert_weights_norm": c["norm_topk_prob"],
        "expert_gating_func": 2,
        "expert_group_count": c["n_group"],
        "expert_group_used_count": c["topk_group"],
    }


def _yarn(rope: Fields) -> Fields:
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(rope["factor"]),
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        "rope.scaling.yarn_beta_fast": float(rope["beta_fast"]),
        "rope.scaling.yarn_beta_slow": float(rope["beta_slow"]),
    }


def _delta_net(c: Fields) -> Fields:
    return {
        "ssm.conv_kernel": c["linear_conv_kernel_dim"],
        "ssm.state_size": c["linear_key_head_dim"],
        "ssm.group_count": c["linear_num_key_heads"],
        "ssm.time_step_rank": c["linear_num_value_heads"],
        "ssm.inner_size": c["linear_num_value_heads"] * c["linear_value_head_dim"],
        "full_attention_interval": c["full_attention_interval"],
        "rope.dimension_count": c["head_dim"] // 4,
    }


def _deepseek(c: Fields) -> Fields:
    """Return the keys of a new file; those of an old one for a model without q_lora_rank (Moonlight)."""
    nope, rope, latent = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["kv_lora_rank"]
    if c["q_lora_rank"] is None:
        heads = {"head_count_kv": c["num_attention_heads"], "key_length": nope + rope, "value_length": c["v_head_dim"]}
    else:
        heads = {"head_count_kv": 1, "key_length": latent + rope, "value_length": latent}
        heads |= {"key_length_mla": nope + rope, "value_length_mla": c["v_head_dim"], "q_lora_rank": c["q_lora_rank"]}
    return (
        _deepseek_experts(c)
        | _yarn(c["rope_scaling"])
        | {f"attention.{key}": value for key, value in heads.items()}
        | {
            "rope.scaling.yarn_log_multiplier": 0.1 * c["rope_scaling"]["mscale_all_dim"],
            "attention.kv_lora_rank": latent,
            "rope.dimension_count": rope,
        }
    )


def _gemma4(c: Fields) -> Fields:
    slides, shared = [kind == "sliding_attention" for kind in c["layer_types"]], c["num_kv_shared_layers"]
    fields: Fields = {
        "attention.sliding_window": c["sliding_window"],
        "attention.sliding_window_pattern": slides,
        "attention.shared_kv_layers": shared,
        "attention.key_length": c["global_head_dim"],
        "attention.value_length": c["global_head_dim"],
        "attention.key_length_swa": c["head_dim"],
        "attention.value_length_swa": c["head_dim"],
        "rope.dimension_count": c["global_head_dim"],
        "rope.dimension_count_swa": c["head_dim"],
        "rope.freq_base": c["rope_parameters"]["full_attention"]["rope_theta"],
        "rope.freq_base_swa": c["rope_parameters"]["sliding_attention"]["rope_theta"],
        "embedding_length_per_layer_input": c["hidden_size_per_layer_input"],
        "final_logit_softcapping": c["final_logit_softcapping"],
    }
    if c["attention_k_eq_v"]:
        counts = c["num_key_value_heads"], c["num_global_key_value_heads"]
        fields["attention.head_count_kv"] = [counts[0] if slide else counts[1] for slide in slides]
    if c["use_double_wide_mlp"]:
        width, layers = c["intermediate_size"], len(slides)
        fields["feed_forward_length"] = [width * (1 + (i >= layers - shared)) for i in range(layers)]
    return fields


_FIELDS: dict[str, Callable[[Fields], Fields]] = {
    "llama": lambda c: {"expert_count": c.get("num_local_experts", 0)},
    "qwen3vl": lambda _: {"rope.dimension_sections": [6, 5, 5, 0], "n_deepstack_layers": 3},
    "qwen3vlmoe": lambda _: {"rope.dimension_sections": [6, 5, 5, 0], "n_deepstack_layers": 3},
    "mistral3": lambda c: (
        _yarn(c["rope_parameters"])
        | {
            "rope.freq_base": c["rope_parameters"]["rope_theta"],
            "rope.scaling.yarn_log_multiplier": c["rope_parameters"]["mscale_all_dim"],
            "attention.temperature_scale": c["rope_parameters"]["llama_4_scaling_beta"],
        }
    ),
    "gemma3": lambda c: {
        "attention.sliding_window": c["sliding_window"],
        "attention.sliding_window_pattern": c["sliding_window_pattern"],
        "rope.freq_base_swa": float(c["rope_local_base_freq"]),
        "rope.scaling.type": "linear",
        "rope.scaling.factor": c["rope_scaling"]["factor"],
    },
    "glm4moe": lambda c: (
        _deepseek_experts(c)
        | {
            "rope.dimension_count": c["head_dim"] // 2,
            "block_count": c["num_hidden_layers"] + 1,
            "nextn_predict_layers": 1,
        }
    ),
    "minimax-m2": lambda c: {
        "expert_count": c["num_local_experts"],
        "expert_feed_forward_length": c["intermediate_size"],
        "expert_gating_func": 2,
        "rope.dimension_count": c["rotary_dim"],
    },
    "gpt-oss": lambda c: (
        _yarn(c["rope_scaling"])
        | {
            "expert_count": c["num_local_experts"],
            "expert_feed_forward_length": c["intermediate_size"],
            "attention.sliding_window": c["sliding_window"],
        }
    ),
    "deepseek2": _deepseek,
    "qwen3next": _delta_net,
    "qwen35": lambda c: _delta_net(c) | {"rope.dimension_sections": [2, 1, 1, 0]},
    "qwen35moe": lambda c: _delta_net(c) | {"rope.dimension_sections": [2, 1, 1, 0]},
    "gemma4": _gemma4,
}
_FOR_PICTURES = (
    *("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    *("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),
    *("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
)
_RENAMED = {
    "intermediate_size": "feed_forward_length",
    "num_key_value_heads": "attention.head_count_kv",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "top_k_experts": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "head_dim": "attention.key_length",
}


def metadata_of(architecture: str, c: Fields) -> Fields:
    """Return the metadata of a file. c: the fields of the language model in config.json."""
    theta = c.get("rope_theta") or c.get("rope_parameters", {}).get("rope_theta", 0)
    fields: Fields = {
        "block_count": c["num_hidden_layers"],
        "context_length": c["max_position_embeddings"],
        "embedding_length": c["hidden_size"],
        "attention.head_count": c["num_attention_heads"],
        "attention.layer_norm_rms_epsilon": c["rms_norm_eps"],
        "rope.freq_base": float(theta),
    }
    fields |= {new: c[key] for key, new in _RENAMED.items() if c.get(key)}
    if architecture in _FIELDS:
        fields |= _FIELDS[architecture](c)
    vocabulary = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*(f"t{i}" for i in range(c["vocab_size"] - len(_FOR_PICTURES))), *_FOR_PICTURES],
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.bos_token_id": 2,
    }
    return {"general.architecture": architecture} | {f"{architecture}.{k}": v for k, v in fields.items()} | vocabulary
