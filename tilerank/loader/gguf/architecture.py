"""Translates an architecture of GGUF to Hugging Face: fields of config.json, names of tensors. No torch."""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import ConfigError, show
from .file import GGUFFile
from .header import ArrayValue, Scalar

_MAX_INTEGER = 1 << 40
_MAX_LAYERS = 1 << 12

Names = Mapping[str, str | tuple[str, ...]]
"""Maps names of tensors in a file to names in a layer on the hub.

A key is what follows `blk.N.`, with or without its last part (weight or bias). A value is one name, with `{}` for the
number of the expert if the tensor stacks those of all experts, or the names of several modules whose rows the tensor
concatenates.
"""

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
"""COMMON_NAMES of the architectures whose files call the norm before the MLP post_attention_norm."""
HEAD_NORMS: Names = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
USUAL_ENDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<|end_of_text|>"),
    *("<eos>", "<｜end▁of▁sentence｜>"),
)
"""Tokens that end an answer wherever a vocabulary has them. Files name at most three of a model's ends."""

Change = Literal["plus_one", "negative_exp"]
"""How a file stores a vector w: as 1 + w, or as -exp(w)."""


@dataclass(frozen=True)
class Order:
    """The order of the rows or columns of a tensor in a file: that of the hub with two dimensions transposed.

    From item `first` on, the hub has blocks [outer, inner, width] of items, which the file stores as
    [inner, outer, width].
    """

    outer: int
    inner: int
    width: int = 1
    first: int = 0
    of_columns: bool = False


@dataclass(frozen=True)
class Tower:
    """How the files of an architecture take pictures, by an mmproj file beside them.

    projector: the clip.projector_type of that file. output: a tensor of it whose last dimension is the width of the
    text model. tokens: of the vocabulary, which stand for pictures. config: returns the fields of config.json, for a
    file, its mmproj file and the fields of the text model alone. processor: returns the fields of
    processor_config.json, for an mmproj file. text: what begins names of the text model's tensors on the hub, by what
    begins them in a text model alone. names: returns the names on the hub of the tensors of an mmproj file, as far as
    they are known. orders: returns the orders of rows that differ from those of the hub, by tensor of an mmproj file.
    changes: of stored values, by module in the mmproj file. needed: its tensors that towers of other models with the
    same projector lack. copies: its tensors that the text model has as well.
    """

    projector: str
    output: str
    tokens: tuple[str, ...]
    config: Callable[[GGUFFile, GGUFFile, Mapping[str, Any]], dict[str, Any]]
    processor: Callable[[GGUFFile], dict[str, Any]]
    text: Mapping[str, str]
    names: Callable[[GGUFFile], Mapping[str, str]]
    orders: Callable[[GGUFFile], Mapping[str, Order]] = lambda _: {}
    changes: Mapping[str, Change] = field(default_factory=dict)
    needed: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()


@dataclass(frozen=True)
class Architecture:
    """How the files of an architecture translate to config.json and to the tensors of Hugging Face.

    config: returns the fields for a file. top: names of tensors outside of layers, in addition to the usual ones.
    changes: of stored values, by the keys of `names`. axes: by the same keys, the dimension of one element that a
    tensor has on the hub and a file may omit. orders: returns, for the fields, the orders of rows or columns that
    differ from those of the hub, by module or name in a layer. ends: tokens that end an answer, in addition to those
    that a file names. tower: how it takes pictures; None if files of text alone are read.
    """

    config: Callable[[GGUFFile], dict[str, Any]]
    names: Names
    top: Mapping[str, str] = field(default_factory=dict)
    changes: Mapping[str, Change] = field(default_factory=dict)
    axes: Mapping[str, int] = field(default_factory=dict)
    orders: Callable[[Mapping[str, Any]], Mapping[str, Order]] = lambda _: {}
    ends: tuple[str, ...] = USUAL_ENDS
    tower: Tower | None = None


def order_of_pairs(head_dim: int) -> Order:
    """Return the order of query and key rows that a file stores as the pairs of a rotation, one after the other.

    The hub has the first elements of all pairs in the first half of a head, the second ones in the other half.
    """
    return Order(2, head_dim // 2)


def paired_heads(config: Mapping[str, Any]) -> Mapping[str, Order]:
    """Return the orders of the text models that store heads in pairs."""
    pairs = order_of_pairs(config["head_dim"])
    return {"self_attn.q_proj": pairs, "self_attn.k_proj": pairs}


class Keys:
    """The hyper-parameters of a file: the metadata `ARCHITECTURE.KEY`, by KEY, or those of another prefix."""

    def __init__(self, gguf: GGUFFile, prefix: str | None = None) -> None:
        self.gguf = gguf
        self._prefix = f"{gguf.architecture}." if prefix is None else prefix
        self._fields = gguf.fields(self._prefix)

    def has(self, key: str) -> bool:
        return self._fields.has(key) or self.gguf.has_items(self._prefix + key)

    def fail(self, key: str, expected: str) -> ConfigError:
        return ConfigError(f"{self.gguf.path}: {self._prefix}{key}: expected {expected}")

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a number. Of an array with one for each layer all must be equal. Raises ConfigError."""
        if self.gguf.has_items(self._prefix + key):
            found = set(self.integers(key))
            if len(found) != 1:
                raise self.fail(key, f"one number for all layers, found {show(sorted(found))}")
            return found.pop()
        return default if default is not None and not self.has(key) else self._fields.integer(key, 0, _MAX_INTEGER)

    def of_layers(self, key: str, layers: int, default: int | None = None) -> list[int]:
        """Return the number of each layer; a file may have one for all. Raises ConfigError."""
        if not self.gguf.has_items(self._prefix + key):
            return [self.integer(key, default)] * layers
        found = self.integers(key)
        if len(found) < layers:
            raise self.fail(key, f"a number for each of the {layers} layers, found {len(found)}")
        return found[:layers]

    def integers(self, key: str) -> list[int]:
        """Return the numbers of a short array. Raises ConfigError for any other, CheckpointError if there is none."""
        items = self._items(key)
        found = [int(item) for item in items if isinstance(item, int) and 0 <= item <= _MAX_INTEGER]
        if len(found) < len(items):
            raise self.fail(key, f"integers from 0 to {_MAX_INTEGER}")
        return found

    def numbers(self, key: str) -> list[float]:
        """Return the numbers of a short array. Raises as `integers`."""
        items = self._items(key)
        found = [item for item in items if isinstance(item, float)]
        if len(found) < len(items):
            raise self.fail(key, "floats")
        return found

    def _items(self, key: str) -> list[Scalar]:
        value = self.gguf.metadata.get(self._prefix + key)
        if isinstance(value, ArrayValue) and value.count > _MAX_LAYERS:
            raise self.fail(key, f"at most {_MAX_LAYERS} items, found {value.count}")
        return self.gguf.items(self._prefix + key)

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

    head_dim, kv_heads: of attention heads. width: of the MLP. If given, they replace the values of the usual keys.
    """
    keys = Keys(gguf)
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    if not heads:
        raise keys.fail("attention.head_count", "1 or more, found 0")
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
    """Return the number of layers, without the draft layers (multi-token prediction) that follow them."""
    blocks, drafts = keys.integer("block_count"), keys.integer("nextn_predict_layers", 0)
    if blocks > _MAX_LAYERS:  # before anything is listed layer by layer
        raise keys.fail("block_count", f"at most {_MAX_LAYERS}, found {blocks}")
    if drafts and drafts >= blocks:
        raise keys.fail("nextn_predict_layers", f"fewer than the {blocks} blocks, found {drafts}")
    return blocks - drafts


def rotated_part(keys: Keys, head_dim: int) -> float:
    """Return the fraction of a head's dimensions that rotary embeddings rotate."""
    return keys.integer("rope.dimension_count", head_dim) / max(head_dim, 1)


def rope_scaling(gguf: GGUFFile, keys: Keys) -> dict[str, Any] | None:
    """Return the field rope_scaling; None if positions are not scaled."""
    context = keys.integer("context_length")
    if "rope_freqs.weight" in gguf.tensors:  # Llama 3's scaling, of which files have only the factors
        factors = floats_of(gguf, "rope_freqs.weight")
        return _longrope(factors, factors, 1.0, context, 1.0)
    kind = keys.text("rope.scaling.type", "none")
    original = keys.integer("rope.scaling.original_context_length", context)
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    if "rope_factors_long.weight" in gguf.tensors:
        short, long = (floats_of(gguf, f"rope_factors_{length}.weight") for length in ("short", "long"))
        return _longrope(
            short, long, max(context / original, 1.0), original, keys.number("rope.scaling.attn_factor", 0.0)
        )
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        betas = {"beta_fast": "rope.scaling.yarn_beta_fast", "beta_slow": "rope.scaling.yarn_beta_slow"}
        return scaling | {name: keys.number(key) for name, key in betas.items() if keys.has(key)}
    raise keys.fail("rope.scaling.type", f"none, linear or yarn, found {show(kind)}")


def _longrope(short: list[float], long: list[float], factor: float, original: int, amplitude: float) -> dict[str, Any]:
    scaling = {"rope_type": "longrope", "short_factor": short, "long_factor": long, "factor": factor}
    scaling["original_max_position_embeddings"] = original
    return scaling | ({"attention_factor": amplitude} if amplitude else {})


def floats_of(gguf: GGUFFile, name: str) -> list[float]:
    """Return the numbers of a small vector in F32. Raises ConfigError for any other tensor."""
    tensor = gguf.tensors.get(name)
    if tensor is None or tensor.type.name != "F32" or len(tensor.shape) != 1:
        found = "none" if tensor is None else f"{tensor.type.name} {list(tensor.shape)}"
        raise ConfigError(f"{gguf.path}: tensor {name}: expected a vector in F32, found {found}")
    return list(struct.unpack(f"<{tensor.shape[0]}f", tensor.header.data(tensor.description)))


def has_biases(gguf: GGUFFile, name: str) -> bool:
    """Return whether any layer has a bias for the projection `name`."""
    return any(tensor.startswith("blk.") and tensor.endswith(f".{name}.bias") for tensor in gguf.tensors)
