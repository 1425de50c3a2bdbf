"""Values that transformers takes from the configuration class where a published config.json leaves them out.

Released files of these models were written without the keys whose value is that of the class: the file of Gemma-3-4b
names six of the keys of its language model.
"""

from collections.abc import Mapping
from typing import Any

_GEMMA3_TEXT = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}

_GEMMA4_TEXT = {
    "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "sliding_window": 512,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "tie_word_embeddings": True,
}

_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": _GEMMA3_TEXT,
    "minimax_m2": {"bos_token_id": 200034, "eos_token_id": 200020, "rope_theta": 5e6},
    "smollm3": {"tie_word_embeddings": True},
    "gemma4_text": _GEMMA4_TEXT,
    "gemma4": {"text_config": _GEMMA4_TEXT},
    "gemma3": {"text_config": _GEMMA3_TEXT, "mm_tokens_per_image": 256, "image_token_index": 262144},
}
"""By `model_type`."""


def with_class_defaults(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of config.json with those of the class of its `model_type` that it does not name."""
    model_type = values.get("model_type")
    defaults = _DEFAULTS.get(model_type) if isinstance(model_type, str) else None
    return values if defaults is None else _filled(values, defaults)


def _filled(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    filled = dict(values)
    for key, default in defaults.items():
        found = values.get(key)
        if key not in values:
            filled[key] = default
        elif isinstance(found, Mapping) and isinstance(default, Mapping):
            filled[key] = _filled(found, default)
    return filled
