"""What an architecture of GGUF is in the words of Hugging Face: fields of config.json and names. No torch."""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import ConfigError
from .file import GGUFFile

_MOST = 1 << 40

COMMON_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


@dataclass(frozen=True)
class Architecture:
    """How the files of an architecture become fields of config.json and tensors with names of Hugging Face.

    config: makes the fields from a file. names: the module of a layer, or of each of its experts (`{}`), for each name
    after `blk.N.`. paired_rows: for each module whose rows lie as adjacent pairs of a rotation, head by head, the field
    that counts its heads; other rows lie as halves of a head, as families of Hugging Face have them. norms_plus_one:
    the weights of norms are stored plus one.
    """

    config: Callable[[GGUFFile], dict[str, Any]]
    names: Mapping[str, str]
    paired_rows: Mapping[str, str] = field(default_factory=dict)
    norms_plus_one: bool = False


class Keys:
    """The hyper-parameters of a file, `architecture.KEY`."""

    def __init__(self, gguf: GGUFFile) -> None:
        self.gguf = gguf
        self._prefix = f"{gguf.architecture}."
        self._fields = gguf.fields(self._prefix)

    def has(self, key: str) -> bool:
        return self._fields.has(key) or self.gguf.has_items(self._prefix + key)

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a number, or that of all layers where an array has one for each. Raises ConfigError."""
        if self.gguf.has_items(self._prefix + key):
            found = set(self.gguf.numbers(self._prefix + key))
            if len(found) != 1:
                raise ConfigError(f"{self.gguf.path}: {self._prefix}{key}: expected one number for all layers")
            return int(found.pop())
        return default if default is not None and not self.has(key) else self._fields.integer(key, 0, _MOST)

    def number(self, key: str, default: float | None = None) -> float:
        if default is not None and not self.has(key):
            return default
        return self._fields.number(key, -1e30, 1e30)

    def text(self, key: str, default: str) -> str:
        return self._fields.text(key) if self.has(key) else default

    def flag(self, key: str) -> bool:
        return self._fields.flag(key)


def decoder_config(gguf: GGUFFile, model_type: str) -> dict[str, Any]:
    """Return the fields that all text models share."""
    keys = Keys(gguf)
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    if not heads:
        raise ConfigError(f"{gguf.path}: attention.head_count: expected 1 or more, found 0")
    head_dim = keys.integer("attention.key_length", hidden // heads)
    embedding = gguf.tensors.get("token_embd.weight")
    rows = keys.integer("vocab_size") if embedding is None else embedding.shape[0]
    floats = all(tensor.type.name == "F32" for tensor in gguf.tensors.values())
    return {
        "model_type": model_type,
        "vocab_size": rows,
        "hidden_size": hidden,
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": keys.integer("feed_forward_length", 0),
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "rope_scaling": rope_scaling(gguf, keys),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "dtype": "float32" if floats else "bfloat16",
    }


def rope_scaling(gguf: GGUFFile, keys: Keys) -> dict[str, Any] | None:
    """Return the scaling of positions; None if there is none."""
    context = keys.integer("context_length")
    if "rope_freqs.weight" in gguf.tensors:  # Llama 3's scaling, stored as its factors alone
        factors = _floats(gguf, "rope_freqs.weight")
        return _long(factors, factors, 1.0, context, 1.0)
    kind, original = (
        keys.text("rope.scaling.type", "none"),
        keys.integer("rope.scaling.original_context_length", context),
    )
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    if "rope_factors_long.weight" in gguf.tensors:
        short, long = (_floats(gguf, f"rope_factors_{length}.weight") for length in ("short", "long"))
        return _long(short, long, max(context / original, 1.0), original, keys.number("rope.scaling.attn_factor", 0.0))
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        betas = {"beta_fast": "rope.scaling.yarn_beta_fast", "beta_slow": "rope.scaling.yarn_beta_slow"}
        return scaling | {name: keys.number(key) for name, key in betas.items() if keys.has(key)}
    raise ConfigError(f"{gguf.path}: rope.scaling.type: expected none, linear or yarn, found {kind}")


def _long(short: list[float], long: list[float], factor: float, original: int, amplitude: float) -> dict[str, Any]:
    scaling = {"rope_type": "longrope", "short_factor": short, "long_factor": long, "factor": factor}
    scaling["original_max_position_embeddings"] = original
    return scaling | ({"attention_factor": amplitude} if amplitude else {})


def _floats(gguf: GGUFFile, name: str) -> list[float]:
    """Return the numbers of a small tensor in F32. Raises ConfigError for another type."""
    tensor = gguf.tensors.get(name)
    if tensor is None or tensor.type.name != "F32" or len(tensor.shape) != 1:
        raise ConfigError(f"{gguf.path}: tensor {name}: expected a vector in F32")
    return list(struct.unpack(f"<{tensor.shape[0]}f", tensor.header.data(tensor.description)))


def has_biases(gguf: GGUFFile, name: str) -> bool:
    """Return whether any layer has a bias of this projection."""
    return any(tensor.startswith("blk.") and tensor.endswith(f".{name}.bias") for tensor in gguf.tensors)
