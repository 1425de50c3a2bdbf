"""The supported architectures of GGUF. No torch."""

from typing import Any

from ..errors import ConfigError, show
from .architecture import COMMON_NAMES, HEAD_NORMS, Architecture, Keys, decoder_config, has_biases, paired_heads
from .delta_nets import DELTA_NETS
from .file import GGUFFile
from .gemma import GEMMAS
from .mixtures import MIXTURES


def _llama(gguf: GGUFFile) -> dict[str, Any]:
    keys = Keys(gguf)
    if experts := keys.integer("expert_count", 0):
        raise keys.fail("expert_count", f"0 (Mixtral is not supported), found {experts}")
    biases = {"attention_bias": has_biases(gguf, "attn_q"), "mlp_bias": has_biases(gguf, "ffn_gate")}
    return decoder_config(gguf, "llama") | biases


def _mistral3(gguf: GGUFFile) -> dict[str, Any]:
    keys = Keys(gguf)
    config = decoder_config(gguf, "ministral3")
    rope = {"rope_type": "default"} if config["rope_scaling"] is None else dict(config["rope_scaling"])
    if weight := keys.number("rope.scaling.yarn_log_multiplier", 0.0):
        rope |= {"mscale": 1.0, "mscale_all_dim": weight}
    if beta := keys.number("attention.temperature_scale", 0.0):
        original = keys.integer("rope.scaling.original_context_length", config["max_position_embeddings"])
        rope |= {"llama_4_scaling_beta": beta, "original_max_position_embeddings": original}
    return config | {"rope_scaling": None, "rope_parameters": rope | {"rope_theta": config["rope_theta"]}}


def _qwen2(gguf: GGUFFile) -> dict[str, Any]:
    return decoder_config(gguf, "qwen2")


def _qwen3(gguf: GGUFFile) -> dict[str, Any]:
    return decoder_config(gguf, "qwen3") | {"attention_bias": has_biases(gguf, "attn_q")}


_QWEN3 = {**COMMON_NAMES, **HEAD_NORMS}

_ARCHITECTURES = {
    "llama": Architecture(_llama, COMMON_NAMES, orders=paired_heads),
    "mistral3": Architecture(_mistral3, COMMON_NAMES, orders=paired_heads),
    "qwen2": Architecture(_qwen2, COMMON_NAMES),
    "qwen3": Architecture(_qwen3, _QWEN3),
    # GGUF files run without pictures, so the three axes of M-RoPE have equal positions: the text model is Qwen3.
    "qwen3vl": Architecture(_qwen3, _QWEN3),
    **MIXTURES,
    **DELTA_NETS,
    **GEMMAS,
}


def architecture_of(gguf: GGUFFile) -> Architecture:
    """Return the architecture of a file. Raises ConfigError for one that is not supported."""
    name = gguf.architecture
    if name not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise ConfigError(f"{gguf.path}: general.architecture: expected one of {known}, found {show(name)}")
    return _ARCHITECTURES[name]
