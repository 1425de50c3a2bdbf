"""The supported architectures of GGUF. No torch."""

from functools import lru_cache
from typing import Any

from ..errors import ConfigError, show
from .architecture import COMMON_NAMES, HEAD_NORMS, Architecture, Keys, Tower, decoder_config, has_biases, paired_heads
from .delta_nets import DELTA_NETS
from .file import GGUFFile
from .gemma import GEMMAS
from .mixtures import MIXTRAL_EXPERTS, MIXTURES
from .towers import PIXTRAL_TOWER, QWEN_TOWER


def _llama(gguf: GGUFFile) -> dict[str, Any]:
    keys = Keys(gguf)
    if experts := keys.integer("expert_count", 0):
        mixture = {"num_local_experts": experts, "num_experts_per_tok": keys.integer("expert_used_count")}
        return decoder_config(gguf, "mixtral") | mixture
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
    "llama": Architecture(_llama, {**COMMON_NAMES, **MIXTRAL_EXPERTS}, orders=paired_heads, tower=PIXTRAL_TOWER),
    "mistral3": Architecture(_mistral3, COMMON_NAMES, orders=paired_heads, tower=PIXTRAL_TOWER),
    "qwen2": Architecture(_qwen2, COMMON_NAMES),
    "qwen3": Architecture(_qwen3, _QWEN3),
    # Without pictures, the three axes of M-RoPE have equal positions: the text model is Qwen3.
    "qwen3vl": Architecture(_qwen3, _QWEN3, tower=QWEN_TOWER),
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


def config_of(gguf: GGUFFile) -> dict[str, Any]:
    """Return the fields of config.json. Raises ConfigError."""
    pictures = tower_of(gguf)
    text = {key: value for key, value in architecture_of(gguf).config(gguf).items() if value is not None}
    if pictures is None:
        return text
    tower, mmproj = pictures
    return tower.config(gguf, mmproj, text)


def tower_of(gguf: GGUFFile) -> tuple[Tower, GGUFFile] | None:
    """Return how a model takes pictures, and its mmproj file; None if it has none. Raises ConfigError for a file of
    another model."""
    if gguf.mmproj is None:
        return None
    if (failure := mismatch(gguf, gguf.mmproj)) is not None:
        raise failure
    tower = architecture_of(gguf).tower
    assert tower is not None
    return tower, gguf.mmproj


def missing_tokens(gguf: GGUFFile, tower: Tower) -> set[str]:
    """Return the tokens for pictures that the vocabulary of a model lacks."""
    key = "tokenizer.ggml.tokens"
    return set(tower.tokens).difference(gguf.texts(key) if gguf.has_items(key) else ())


@lru_cache(maxsize=4)
def mismatch(gguf: GGUFFile, mmproj: GGUFFile) -> ConfigError | None:
    """Return why a model cannot take pictures by an mmproj file; None if it can."""
    if (tower := architecture_of(gguf).tower) is None:
        known = ", ".join(name for name, one in _ARCHITECTURES.items() if one.tower is not None)
        expected = f"one that takes pictures by an mmproj file ({known})"
        return ConfigError(f"{gguf.path}: general.architecture: expected {expected}, found {show(gguf.architecture)}")
    if (kind := mmproj.metadata.get("clip.projector_type")) != tower.projector:
        expected = f"{show(tower.projector)} for {gguf.path}"
        return ConfigError(f"{mmproj.path}: clip.projector_type: expected {expected}, found {show(kind)}")
    if missing := set(tower.needed).difference(mmproj.tensors):
        return ConfigError(f"{mmproj.path}: expected a tensor {min(missing)} for {gguf.path}, found none")
    output, width = mmproj.tensors.get(tower.output), Keys(gguf).integer("embedding_length")
    if output is None or output.shape[-1] != width:
        found = "none" if output is None else str(list(output.shape))
        expected = f"{width} numbers at its end for {gguf.path}"
        return ConfigError(f"{mmproj.path}: tensor {tower.output}: expected {expected}, found {found}")
    if missing := missing_tokens(gguf, tower):
        expected = f"{min(missing)} for pictures, found no such token"
        return ConfigError(f"{gguf.path}: tokenizer.ggml.tokens: expected {expected}")
    return None
