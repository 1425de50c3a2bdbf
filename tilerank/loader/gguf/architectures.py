"""The architectures of GGUF that are families of ours."""

from typing import Any

from ..errors import ConfigError, show
from .architecture import COMMON_NAMES, HEAD_NORMS, Architecture, Keys, decoder_config, has_biases
from .file import GGUFFile

_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}


def _llama(gguf: GGUFFile) -> dict[str, Any]:
    if Keys(gguf).integer("expert_count", 0):
        raise ConfigError(f"{gguf.path}: llama.expert_count: expected 0 (Mixtral is not supported)")
    biases = {"attention_bias": has_biases(gguf, "attn_q"), "mlp_bias": has_biases(gguf, "ffn_gate")}
    return decoder_config(gguf, "llama") | biases


def _qwen2(gguf: GGUFFile) -> dict[str, Any]:
    return decoder_config(gguf, "qwen2")


def _qwen3(gguf: GGUFFile) -> dict[str, Any]:
    return decoder_config(gguf, "qwen3") | {"attention_bias": has_biases(gguf, "attn_q")}


def _qwen3_moe(gguf: GGUFFile) -> dict[str, Any]:
    keys = Keys(gguf)
    count, used = keys.integer("expert_count"), keys.integer("expert_used_count")
    width = keys.integer("expert_feed_forward_length", keys.integer("feed_forward_length", 0) // max(used, 1))
    return decoder_config(gguf, "qwen3_moe") | {
        "attention_bias": has_biases(gguf, "attn_q"),
        "num_experts": count,
        "num_experts_per_tok": used,
        "moe_intermediate_size": width,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
    }


def _gemma3(gguf: GGUFFile) -> dict[str, Any]:
    keys = Keys(gguf)
    config = decoder_config(gguf, "gemma3_text")
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    pattern = "gemma3.attention.sliding_window_pattern"
    if gguf.has_items(pattern):
        slides = [bool(item) for item in gguf.numbers(pattern)]
    else:
        every = keys.integer("attention.sliding_window_pattern", 6)
        slides = [bool((layer + 1) % every) if every else False for layer in range(layers)]
    # The 27B divides scores by sqrt(hidden / heads) instead of sqrt(head_dim); no key of the file says so.
    scored = config["hidden_size"] // heads if layers == 62 else config["head_dim"]
    return config | {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scored,
        "sliding_window": keys.integer("attention.sliding_window"),
        "layer_types": ["sliding_attention" if one else "full_attention" for one in slides],
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10000.0),
    }


_ARCHITECTURES = {
    "llama": Architecture(
        _llama,
        COMMON_NAMES,
        {"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"},
    ),
    "qwen2": Architecture(_qwen2, COMMON_NAMES),
    "qwen3": Architecture(_qwen3, COMMON_NAMES | HEAD_NORMS),
    "qwen3moe": Architecture(_qwen3_moe, COMMON_NAMES | HEAD_NORMS | _EXPERTS),
    "gemma3": Architecture(
        _gemma3,
        COMMON_NAMES
        | HEAD_NORMS
        | {
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        norms_plus_one=True,
    ),
}


def architecture_of(gguf: GGUFFile) -> Architecture:
    """Return what is known of the architecture of a file. Raises ConfigError for one that does not run."""
    name = gguf.architecture
    if name not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise ConfigError(f"{gguf.path}: general.architecture: expected one of {known}, found {show(name)}")
    return _ARCHITECTURES[name]
