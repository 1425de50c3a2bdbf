"""The Gemma architectures of GGUF. No torch."""

from typing import Any

from ..errors import ConfigError, show
from .architecture import (
    HEAD_NORMS,
    POST_NORM,
    USUAL_ENDS,
    Architecture,
    Change,
    Keys,
    Names,
    decoder_config,
    floats_of,
    layer_count,
)
from .file import GGUFFile
from .towers import GEMMA3_TOWER

_FULL, _SLIDING = "full_attention", "sliding_attention"
_PATTERN = "attention.sliding_window_pattern"
_UNROTATED = 1e29
"""rope_freqs divides frequencies. A factor of at least this much leaves a dimension without rotation."""

_NAMES: Names = {
    **POST_NORM,
    **HEAD_NORMS,
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NORMS = (*("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm"), *HEAD_NORMS, "output_norm")
_PLUS_ONE: dict[str, Change] = dict.fromkeys(_NORMS, "plus_one")


def _gemma3(gguf: GGUFFile) -> dict[str, Any]:
    keys = Keys(gguf)
    config = decoder_config(gguf, "gemma3_text")
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    if gguf.has_items(f"gemma3.{_PATTERN}"):
        slides = [bool(slide) for slide in keys.of_layers(_PATTERN, layers)]
    else:
        every = keys.integer(_PATTERN, 6)
        slides = [bool((layer + 1) % every) if every else False for layer in range(layers)]
    # Gemma 3 27B, the one with 62 layers, divides scores by sqrt(hidden / heads) instead of sqrt(head_dim). Files
    # have no key for it.
    scalar = config["hidden_size"] // heads if layers == 62 else config["head_dim"]
    return config | {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": keys.integer("attention.sliding_window"),
        "layer_types": [_SLIDING if slide else _FULL for slide in slides],
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10000.0),
    }


def _gemma4(gguf: GGUFFile) -> dict[str, Any]:
    keys = Keys(gguf)
    layers, heads = layer_count(keys), keys.integer("attention.head_count")
    slides = [bool(slide) for slide in keys.of_layers(_PATTERN, layers)]
    kv_heads = keys.of_layers("attention.head_count_kv", layers, heads)
    sliding_kv_heads = {kv_heads[i] for i in range(layers) if slides[i]} or {kv_heads[0]}
    if len(sliding_kv_heads) > 1:
        found = show(sorted(sliding_kv_heads))
        raise keys.fail("attention.head_count_kv", f"one number for all layers with a sliding window, found {found}")
    full_dim, dim = keys.integer("attention.key_length"), keys.integer("attention.key_length_swa")
    shared = keys.integer("attention.shared_kv_layers", 0)
    width, is_doubled = _widths(keys, layers, shared)
    config = decoder_config(gguf, "gemma4_text", head_dim=dim, kv_heads=sliding_kv_heads.pop(), width=width)
    rotated = keys.integer("rope.dimension_count_swa", dim) / max(dim, 1)
    inputs = gguf.tensors.get("per_layer_token_embd.weight")
    return (
        config
        | _experts(keys)
        | {
            "hidden_activation": "gelu_pytorch_tanh",
            "layer_types": [_SLIDING if slide else _FULL for slide in slides],
            "per_layer_config": {
                str(i): {"head_dim": full_dim, "num_key_value_heads": kv_heads[i]}
                for i in range(layers)
                if not slides[i]
            },
            "attention_k_eq_v": any(
                not slides[i]
                and f"blk.{i}.attn_k.weight" in gguf.tensors
                and f"blk.{i}.attn_v.weight" not in gguf.tensors
                for i in range(layers)
            ),
            "sliding_window": keys.integer("attention.sliding_window"),
            "num_kv_shared_layers": shared,
            "use_double_wide_mlp": is_doubled,
            "hidden_size_per_layer_input": keys.integer("embedding_length_per_layer_input", 0),
            "vocab_size_per_layer_input": config["vocab_size"] if inputs is None else inputs.shape[0],
            "final_logit_softcapping": keys.number("final_logit_softcapping", 0.0) or None,
            "rope_scaling": None,
            "rope_parameters": {
                _FULL: {
                    "rope_type": "proportional",
                    "rope_theta": config["rope_theta"],
                    "partial_rotary_factor": _rotated_part(gguf),
                },
                _SLIDING: {
                    "rope_type": "default",
                    "rope_theta": keys.number("rope.freq_base_swa", 10000.0),
                    "partial_rotary_factor": rotated,
                },
            },
        }
    )


def _widths(keys: Keys, layers: int, shared: int) -> tuple[int, bool]:
    """Return the width of the first MLP, and whether the MLPs of the last `shared` layers are twice as wide."""
    key = "feed_forward_length"
    widths = keys.of_layers(key, layers)
    usual, is_doubled = widths[0], widths[-1] != widths[0]
    if widths != [usual] * (layers - shared) + [usual * (1 + is_doubled)] * shared:
        raise keys.fail(key, f"one width, or twice that in the last {shared} layers, found {show(widths)}")
    return usual, is_doubled


def _experts(keys: Keys) -> dict[str, Any]:
    """Return the fields of the mixture of experts that a layer may have beside its MLP."""
    count = keys.integer("expert_count", 0)
    if not count:
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        "num_experts": count,
        "top_k_experts": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
    }


def _rotated_part(gguf: GGUFFile) -> float:
    """Return the fraction of dimensions that layers with full attention rotate: those whose factor is 1."""
    name = "rope_freqs.weight"
    factors = floats_of(gguf, name)
    rotated = sum(factor == 1.0 for factor in factors)
    if not rotated or factors[:rotated] != [1.0] * rotated or any(factor < _UNROTATED for factor in factors[rotated:]):
        expected = f"factors 1, then {_UNROTATED:g} or more"
        raise ConfigError(f"{gguf.path}: tensor {name}: expected {expected}, found {show(factors)}")
    return rotated / len(factors)


GEMMAS = {
    "gemma3": Architecture(_gemma3, _NAMES, changes=_PLUS_ONE, tower=GEMMA3_TOWER),
    "gemma4": Architecture(
        _gemma4,
        {
            **_NAMES,
            "layer_output_scale.weight": "layer_scalar",
            "inp_gate": "per_layer_input_gate",
            "proj": "per_layer_projection",
            "post_norm": "post_per_layer_input_norm",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
            "ffn_gate_inp": "router.proj",
            "ffn_gate_inp.scale": "router.scale",
            "ffn_down_exps.scale": "router.per_expert_scale",
            "ffn_gate_up_exps": ("experts.{}.gate_proj", "experts.{}.up_proj"),
            "ffn_gate_exps": "experts.{}.gate_proj",
            "ffn_up_exps": "experts.{}.up_proj",
            "ffn_down_exps": "experts.{}.down_proj",
        },
        top={
            "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
            "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
            "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
        },
        ends=(*USUAL_ENDS, "<turn|>", "<|tool_response>"),
    ),
}
"""By general.architecture."""
