"""What an architecture of GGUF is in the words of Hugging Face: fields of config.json and names. No torch."""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import ConfigError, show
from .file import GGUFFile

_MOST = 1 << 40

Names = Mapping[str, str | tuple[str, ...]]
"""By what follows `blk.N.` in the name of a tensor, with or without its last part (weight or bias): the name in a
layer, in each of its experts (`{}`), or of each of several modules whose rows follow each other."""

COMMON_NAMES: Names = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
POST_NORM: Names = {
    **{name: module for name, module in COMMON_NAMES.items() if name != "ffn_norm"},
    "post_attention_norm": "post_attention_layernorm",
}
"""The names of layers whose second norm is called after what it follows."""
HEAD_NORMS: Names = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
USUAL_ENDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<|end_of_text|>"),
    *("<eos>", "<｜end▁of▁sentence｜>"),
)
"""Tokens that end an answer in every vocabulary that has them, because files name only one or two of a model's ends."""

Change = Literal["plus_one", "negative_exp"]
"""How a file stores a vector w: as 1 + w, or as -exp(w)."""


@dataclass(frozen=True)
class Order:
    """How the rows, or the columns, of a tensor lie in a file.

    From `first` on they come in blocks of outer * inner * width, in which item (o * inner + i) * width + w of the hub
    is item (i * outer + o) * width + w of the file.
    """

    outer: int
    inner: int
    width: int = 1
    first: int = 0
    of_columns: bool = False


@dataclass(frozen=True)
class Architecture:
    """How the files of an architecture become fields of config.json and tensors with names of Hugging Face.

    config: makes the fields from a file. top: names of tensors outside of layers, beside the usual ones. changes, axes:
    by the same names as `names`; axes: where the hub has a dimension of one element that the file may leave out.
    orders: given the fields, by module or name in a layer, those whose rows or columns lie in another order than on the
    hub. ends: tokens that end an answer, beside those that a file names.
    """

    config: Callable[[GGUFFile], dict[str, Any]]
    names: Names
    top: Mapping[str, str] = field(default_factory=dict)
    changes: Mapping[str, Change] = field(default_factory=dict)
    axes: Mapping[str, int] = field(default_factory=dict)
    orders: Callable[[Mapping[str, Any]], Mapping[str, Order]] = lambda _: {}
    ends: tuple[str, ...] = USUAL_ENDS


def paired_heads(config: Mapping[str, Any]) -> Mapping[str, Order]:
    """Return the orders of queries and keys whose rows lie as adjacent pairs of a rotation; the hub has halves of a
    head."""
    pairs = Order(2, config["head_dim"] // 2)
    return {"self_attn.q_proj": pairs, "self_attn.k_proj": pairs}


class Keys:
    """The hyper-parameters of a file, `architecture.KEY`."""

    def __init__(self, gguf: GGUFFile) -> None:
        self.gguf = gguf
        self._prefix = f"{gguf.architecture}."
        self._fields = gguf.fields(self._prefix)

    def has(self, key: str) -> bool:
        return self._fields.has(key) or self.gguf.has_items(self._prefix + key)

    def fail(self, key: str, expected: str) -> ConfigError:
        return ConfigError(f"{self.gguf.path}: {self._prefix}{key}: expected {expected}")

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a number, or that of all layers where an array has one for each. Raises ConfigError."""
        if self.gguf.has_items(self._prefix + key):
            found = set(self._integers(key))
            if len(found) != 1:
                raise self.fail(key, "one number for all layers")
            return found.pop()
        return default if default is not None and not self.has(key) else self._fields.integer(key, 0, _MOST)

    def of_layers(self, key: str, layers: int, default: int | None = None) -> list[int]:
        """Return the number of each layer, which may be one for all of them. Raises ConfigError."""
        if not self.gguf.has_items(self._prefix + key):
            return [self.integer(key, default)] * layers
        found = self._integers(key)
        if len(found) < layers:
            raise self.fail(key, f"a number for each of the {layers} layers, found {len(found)}")
        return found[:layers]

    def _integers(self, key: str) -> list[int]:
        items = self.gguf.items(self._prefix + key)
        found = [int(item) for item in items if isinstance(item, int) and 0 <= item <= _MOST]
        if len(found) < len(items):
            raise self.fail(key, f"integers from 0 to {_MOST}")
        return found

    def number(self, key: str, default: float | None = None) -> float:
        if default is not None and not self.has(key):
            return default
        return self._fields.number(key, -1e30, 1e30)

    def text(self, key: str, default: str) -> str:
        return self._fields.text(key) if self.has(key) else default

    def flag(self, key: str) -> bool:
        return self._fields.flag(key)


def decoder_config(
    gguf: GGUFFile,
    model_type: str,
    *,
    head_dim: int | None = None,
    kv_heads: int | None = None,
    width: int | None = None,
) -> dict[str, Any]:
    """Return the fields that all text models share.

    head_dim, kv_heads, width: of heads and of the MLP, where the usual keys have other numbers or several.
    """
    keys = Keys(gguf)
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    if not heads:
        raise ConfigError(f"{gguf.path}: attention.head_count: expected 1 or more, found 0")
    if head_dim is None:
        head_dim = keys.integer("attention.key_length", hidden // heads)
    embedding = gguf.tensors.get("token_embd.weight")
    rows = keys.integer("vocab_size") if embedding is None else embedding.shape[0]
    floats = all(tensor.type.name == "F32" for tensor in gguf.tensors.values())
    return {
        "model_type": model_type,
        "vocab_size": rows,
        "hidden_size": hidden,
        "num_hidden_layers": layer_count(keys),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads) if kv_heads is None else kv_heads,
        "head_dim": head_dim,
        "intermediate_size": keys.integer("feed_forward_length", 0) if width is None else width,
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "rope_scaling": rope_scaling(gguf, keys),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "dtype": "float32" if floats else "bfloat16",
    }


def layer_count(keys: Keys) -> int:
    """Return the number of layers, without those after the last that predict several tokens at once."""
    blocks, drafts = keys.integer("block_count"), keys.integer("nextn_predict_layers", 0)
    if drafts and drafts >= blocks:
        raise keys.fail("nextn_predict_layers", f"fewer than the {blocks} blocks, found {drafts}")
    return blocks - drafts


def rotated_part(keys: Keys, head_dim: int) -> float:
    """Return which part of a head positions rotate."""
    return keys.integer("rope.dimension_count", head_dim) / max(head_dim, 1)


def rope_scaling(gguf: GGUFFile, keys: Keys) -> dict[str, Any] | None:
    """Return the scaling of positions; None if there is none."""
    context = keys.integer("context_length")
    if "rope_freqs.weight" in gguf.tensors:  # Llama 3's scaling, stored as its factors alone
        factors = floats_of(gguf, "rope_freqs.weight")
        return _long(factors, factors, 1.0, context, 1.0)
    kind, original = (
        keys.text("rope.scaling.type", "none"),
        keys.integer("rope.scaling.original_context_length", context),
    )
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    if "rope_factors_long.weight" in gguf.tensors:
        short, long = (floats_of(gguf, f"rope_factors_{length}.weight") for length in ("short", "long"))
        return _long(short, long, max(context / original, 1.0), original, keys.number("rope.scaling.attn_factor", 0.0))
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        betas = {"beta_fast": "rope.scaling.yarn_beta_fast", "beta_slow": "rope.scaling.yarn_beta_slow"}
        return scaling | {name: keys.number(key) for name, key in betas.items() if keys.has(key)}
    raise ConfigError(f"{gguf.path}: rope.scaling.type: expected none, linear or yarn, found {show(kind)}")


def _long(short: list[float], long: list[float], factor: float, original: int, amplitude: float) -> dict[str, Any]:
    scaling = {"rope_type": "longrope", "short_factor": short, "long_factor": long, "factor": factor}
    scaling["original_max_position_embeddings"] = original
    return scaling | ({"attention_factor": amplitude} if amplitude else {})


def floats_of(gguf: GGUFFile, name: str) -> list[float]:
    """Return the numbers of a small tensor in F32. Raises ConfigError for another type."""
    tensor = gguf.tensors.get(name)
    if tensor is None or tensor.type.name != "F32" or len(tensor.shape) != 1:
        raise ConfigError(f"{gguf.path}: tensor {name}: expected a vector in F32")
    return list(struct.unpack(f"<{tensor.shape[0]}f", tensor.header.data(tensor.description)))


def has_biases(gguf: GGUFFile, name: str) -> bool:
    """Return whether any layer has a bias of this projection."""
    return any(tensor.startswith("blk.") and tensor.endswith(f".{name}.bias") for tensor in gguf.tensors)
