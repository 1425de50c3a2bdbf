"""The configs of public models that `bench make-model` imitates: the fields of config.json that affect the computation.

The vision models have the settings of their processors, too.
"""

from typing import Any

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "dtype": "bfloat16",
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "vocab_size": 151936,
}


def _qwen3_vl(text: dict[str, Any], vision: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    rope = {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "image_token_id": 151655,
        "model_type": "qwen3_vl",
        "text_config": {
            "attention_bias": False,
            "bos_token_id": 151643,
            "dtype": "bfloat16",
            "eos_token_id": 151645,
            "head_dim": 128,
            "hidden_act": "silu",
            "max_position_embeddings": 262144,
            "model_type": "qwen3_vl_text",
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-6,
            "rope_scaling": rope,
            "rope_theta": 5000000,
            "vocab_size": 151936,
            **text,
        },
        "tie_word_embeddings": tied,
        "video_token_id": 151656,
        "vision_config": {
            "hidden_act": "gelu_pytorch_tanh",
            "in_channels": 3,
            "model_type": "qwen3_vl",
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "out_hidden_size": text["hidden_size"],
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            **vision,
        },
        "vision_end_token_id": 151653,
        "vision_start_token_id": 151652,
    }


def _qwen3_5(text: dict[str, Any], vision: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    name = "qwen3_5_moe" if "num_experts" in text else "qwen3_5"
    rope = {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25}
    return {
        "architectures": [f"Qwen3_5{'Moe' if 'num_experts' in text else ''}ForConditionalGeneration"],
        "image_token_id": 248056,
        "model_type": name,
        "text_config": {
            "attention_bias": False,
            "attn_output_gate": True,
            "dtype": "bfloat16",
            "eos_token_id": 248044,
            "full_attention_interval": 4,
            "head_dim": 256,
            "hidden_act": "silu",
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_value_head_dim": 128,
            "mamba_ssm_dtype": "float32",
            "max_position_embeddings": 262144,
            "model_type": f"{name}_text",
            "rms_norm_eps": 1e-6,
            "rope_parameters": rope | {"rope_theta": 10000000, "rope_type": "default"},
            "vocab_size": 248320,
            **text,
        },
        "tie_word_embeddings": tied,
        "video_token_id": 248057,
        "vision_config": {
            "deepstack_visual_indexes": [],
            "hidden_act": "gelu_pytorch_tanh",
            "in_channels": 3,
            "model_type": name,
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "out_hidden_size": text["hidden_size"],
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            **vision,
        },
        "vision_end_token_id": 248054,
        "vision_start_token_id": 248053,
    }


PUBLIC_CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek-v3.1": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 0,
        "dtype": "bfloat16",
        "eos_token_id": 1,
        "first_k_dense_replace": 3,
        "hidden_act": "silu",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
        "vocab_size": 129280,
    },
    "qwen3-0.6b": _QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": _QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": _QWEN3
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "decoder_sparse_step": 1,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "qwen3-vl-2b": _qwen3_vl(
        text={
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_attention_heads": 16,
            "num_hidden_layers": 28,
        },
        vision={"deepstack_visual_indexes": [5, 11, 17], "depth": 24, "hidden_size": 1024, "intermediate_size": 4096},
        tied=True,
    ),
    "qwen3-vl-8b": _qwen3_vl(
        text={
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_attention_heads": 32,
            "num_hidden_layers": 36,
        },
        vision={"deepstack_visual_indexes": [8, 16, 24], "depth": 27, "hidden_size": 1152, "intermediate_size": 4304},
        tied=False,
    ),
    "qwen3.5-2b": _qwen3_5(
        text={
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "linear_num_value_heads": 16,
            "num_attention_heads": 8,
            "num_hidden_layers": 24,
            "num_key_value_heads": 2,
        },
        vision={"depth": 24, "hidden_size": 1024, "intermediate_size": 4096},
        tied=True,
    ),
    "qwen3.5-9b": _qwen3_5(
        text={
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "linear_num_value_heads": 32,
            "num_attention_heads": 16,
            "num_hidden_layers": 32,
            "num_key_value_heads": 4,
        },
        vision={"depth": 27, "hidden_size": 1152, "intermediate_size": 4304},
        tied=False,
    ),
    "qwen3.5-35b-a3b": _qwen3_5(
        text={
            "hidden_size": 2048,
            "linear_num_value_heads": 32,
            "moe_intermediate_size": 512,
            "num_attention_heads": 16,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 40,
            "num_key_value_heads": 2,
            "shared_expert_intermediate_size": 512,
        },
        vision={"depth": 27, "hidden_size": 1152, "intermediate_size": 4304},
        tied=False,
    ),
    "llama-3.2-3b": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 128000,
        "dtype": "bfloat16",
        "eos_token_id": 128001,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 24,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": True,
        "vocab_size": 128256,
    },
}

_PATCHES: dict[str, Any] = {
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "merge_size": 2,
    "patch_size": 16,
    "temporal_patch_size": 2,
}

_QWEN_VL: dict[str, dict[str, Any]] = {
    "preprocessor_config.json": _PATCHES
    | {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
        "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    },
    "video_preprocessor_config.json": _PATCHES
    | {
        "processor_class": "Qwen3VLProcessor",
        "size": {"longest_edge": 25165824, "shortest_edge": 4096},
        "video_processor_type": "Qwen3VLVideoProcessor",
    },
}

PROCESSORS = {"qwen3_vl": _QWEN_VL, "qwen3_5": _QWEN_VL, "qwen3_5_moe": _QWEN_VL}
"""The files of a family's processor, by `model_type`."""
