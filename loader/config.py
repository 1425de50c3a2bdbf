"""config.json of a text model -> one typed, validated record.

Absent keys are not replaced by guesses: what the model families disagree on must be in the file. Both dialects are
read: `rope_theta` + `rope_scaling` + `torch_dtype` (transformers 4), `rope_parameters` + `dtype` (transformers 5).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import ConfigError
from .files import is_listed, read_json_object, show
from .padding import resolve_head_dim
from .quantization import QuantizationConfig, read_quantization

DTYPES = ("bfloat16", "float16", "float32")
ROPE_TYPES = ("default", "llama3")

# Bounds well above any published model: they turn an absurd number into a sentence instead of an allocation.
_MAX_WIDTH = 1 << 20
_MAX_VOCABULARY = 1 << 24
_MAX_POSITIONS = 1 << 30
_MAX_EXPERTS = 1 << 14


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3's frequency scaling: wavelengths above original/low are stretched by factor, those below original/high
    are kept, those between blend."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding; `scaling` None is the plain form."""

    theta: float
    scaling: Llama3Scaling | None = None


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts in place of the dense MLP: `top_k` of `count` experts of `width` columns for every token."""

    count: int
    top_k: int
    width: int
    renormalize: bool
    """Whether the weights of the chosen experts are made to add up to one."""
    dense_layers: frozenset[int]
    """Layers that keep a dense MLP, `intermediate_size` wide."""


@dataclass(frozen=True)
class ModelConfig:
    """A text model's config.json; counts are the model's own, before any padding for tensor parallelism."""

    model_type: str
    architectures: tuple[str, ...]
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    dtype: str
    """One of DTYPES: what the weights were published in."""
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    raw: Mapping[str, Any] = field(repr=False, compare=False)
    """The whole of config.json, for what one family alone reads."""
    experts: ExpertsConfig | None = None
    quantization: QuantizationConfig | None = None
    """How the checkpoint stores its projections; None: as floats."""


class Fields:
    """Typed access to one JSON object; every refusal names the file, the key, what was expected and what was found."""

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path = path
        self.values = values
        self.prefix = prefix

    def fail(self, key: str, expected: str) -> ConfigError:
        found = show(self.values[key]) if key in self.values else "no such key"
        return ConfigError(f"{self.path}: {self.prefix}{key}: expected {expected}, found {found}")

    def has(self, key: str) -> bool:
        """JSON null means absent, as it does to transformers."""
        return self.values.get(key) is not None

    def integer(self, key: str, low: int, high: int) -> int:
        value = self.values.get(key)
        if type(value) is not int or not low <= value <= high:
            raise self.fail(key, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, low: float, to: float, *, above: bool = True) -> float:
        """A number above `low`, or from it on, and at most `to`."""
        value: Any = self.values.get(key)
        # Integers of any length are JSON; comparing before converting keeps float() from overflowing.
        numeric = isinstance(value, int | float) and not isinstance(value, bool)
        if not numeric or not low <= value <= to or (above and value == low):
            raise self.fail(key, f"a number {'above' if above else 'from'} {low:g}, at most {to:g}")
        return float(value)

    def text(self, key: str) -> str:
        value = self.values.get(key)
        if type(value) is not str or not value:
            raise self.fail(key, "a string")
        return value

    def flag(self, key: str) -> bool:
        """False when absent, which is the class default of every flag read here."""
        if not self.has(key):
            return False
        value = self.values[key]
        if type(value) is not bool:
            raise self.fail(key, "true or false")
        return value

    def object(self, key: str) -> "Fields":
        value = self.values.get(key)
        if not isinstance(value, dict):
            raise self.fail(key, "an object")
        return Fields(self.path, value, f"{self.prefix}{key}.")

    def ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """A token id or a list of them, duplicates dropped."""
        value = self.values.get(key)
        ids = value if isinstance(value, list) else [value]
        if not all(type(i) is int and 0 <= i < vocab_size for i in ids):
            raise self.fail(key, f"token ids from 0 to {vocab_size - 1}")
        return tuple(dict.fromkeys(ids))


@dataclass(frozen=True)
class SamplingDefaults:
    """How tokens are chosen for who does not say: as the model's makers advise, else by the model's own probabilities.
    top_k 0, top_p 1, min_p 0 and repetition_penalty 1 are off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def read_sampling_defaults(model_dir: Path) -> SamplingDefaults:
    """Those of generation_config.json, whatever it says of do_sample, as other servers take them. ConfigError."""
    c = _generation_config(model_dir)
    bounds = {
        "temperature": (0.0, 100.0),
        "top_p": (0.0, 1.0),
        "min_p": (0.0, 1.0),
        "repetition_penalty": (0.01, 100.0),
    }
    numbers = {key: c.number(key, low, high, above=False) for key, (low, high) in bounds.items() if c.has(key)}
    top_k = max(c.integer("top_k", -1, (1 << 31) - 1), 0) if c.has("top_k") else 0  # -1 is off as well
    return SamplingDefaults(top_k=top_k, **numbers)


def read_model_type(model_dir: Path) -> str:
    """Returns `model_type` alone, so that an unknown family is refused as such and not for the keys it lacks."""
    return Fields(model_dir / "config.json", _read(model_dir)).text("model_type")


def load_config(model_dir: Path) -> ModelConfig:
    """Reads and checks config.json (and the token ids of generation_config.json, which win) of a dense text model.

    Raises ConfigError, naming the file, the key, what was expected and what was found.
    """
    values = _read(model_dir)
    c = Fields(model_dir / "config.json", values)
    model_type = c.text("model_type")
    _refuse_unsupported(c)
    hidden_size = c.integer("hidden_size", 1, _MAX_WIDTH)
    num_layers = c.integer("num_hidden_layers", 1, 1 << 12)
    num_heads = c.integer("num_attention_heads", 1, 1 << 14)
    num_kv_heads = c.integer("num_key_value_heads", 1, num_heads)
    if num_heads % num_kv_heads:
        raise c.fail("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
    vocab_size = c.integer("vocab_size", 1, _MAX_VOCABULARY)
    max_position_embeddings = c.integer("max_position_embeddings", 1, _MAX_POSITIONS)
    eos_token_ids, bos_token_id = _special_ids(model_dir, c, vocab_size)
    return ModelConfig(
        model_type=model_type,
        architectures=_architectures(c),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(c, hidden_size, num_heads),
        intermediate_size=c.integer("intermediate_size", 1, _MAX_WIDTH * 8),
        vocab_size=vocab_size,
        rms_norm_eps=c.number("rms_norm_eps", 0.0, 1.0),
        max_position_embeddings=max_position_embeddings,
        rope=_rope(c, max_position_embeddings),
        attention_bias=c.flag("attention_bias"),
        mlp_bias=c.flag("mlp_bias"),
        tie_word_embeddings=c.flag("tie_word_embeddings"),
        dtype=_dtype(c),
        eos_token_ids=eos_token_ids,
        bos_token_id=bos_token_id,
        raw=values,
        experts=_experts(c, num_layers) if model_type.endswith("_moe") else None,
        quantization=read_quantization(c.object("quantization_config")) if c.has("quantization_config") else None,
    )


def _read(model_dir: Path) -> dict[str, Any]:
    try:
        found = "a directory" if model_dir.is_dir() else "a file" if model_dir.exists() else "nothing"
    except OSError as failure:  # no permission to look, or a name too long
        raise ConfigError(f"{model_dir}: cannot be read: {failure.strerror}") from failure
    if found != "a directory":
        raise ConfigError(f"{model_dir}: expected a model directory, found {found}")
    return read_json_object(model_dir, "config.json", ConfigError)


def _refuse_unsupported(c: Fields) -> None:
    """Features that would change the result if they were ignored."""
    for key in ("text_config", "thinker_config"):
        if c.has(key):
            raise c.fail(key, "no such key (multimodal models are not supported yet)")
    if c.flag("use_sliding_window"):
        raise c.fail("use_sliding_window", "false (sliding-window attention is not supported)")
    if c.has("is_causal") and not c.flag("is_causal"):
        raise c.fail("is_causal", "true (attention to later tokens is not supported)")
    if c.has("hidden_act") and c.values["hidden_act"] != "silu":
        raise c.fail("hidden_act", "'silu'")
    if c.has("layer_types"):
        types = c.values["layer_types"]
        if not isinstance(types, list) or any(kind != "full_attention" for kind in types):
            raise c.fail("layer_types", "a list of 'full_attention' only")
        if len(types) != c.integer("num_hidden_layers", 1, 1 << 12):
            raise c.fail("layer_types", f"one entry for each of the {c.values['num_hidden_layers']} layers")


def _architectures(c: Fields) -> tuple[str, ...]:
    if not c.has("architectures"):
        return ()
    names = c.values["architectures"]
    if not isinstance(names, list) or any(type(name) is not str for name in names):
        raise c.fail("architectures", "a list of strings")
    return tuple(names)


def _head_dim(c: Fields, hidden_size: int, num_heads: int) -> int:
    """`head_dim` must be checked where it is given, and the division exact where it is not, before resolving."""
    explicit = {key: c.integer(key, 1, 1 << 12) for key in ("qk_head_dim", "head_dim") if c.has(key)}
    if not explicit and hidden_size % num_heads:
        raise c.fail("hidden_size", f"a multiple of num_attention_heads ({num_heads}), there being no head_dim")
    head_dim = resolve_head_dim({**explicit, "hidden_size": hidden_size}, num_heads, is_text_config=True)
    if head_dim is None or head_dim % 2:
        key = next(iter(explicit), "hidden_size")
        raise c.fail(key, f"an even head size (rotary embedding turns pairs), not {head_dim}")
    return head_dim


def _dtype(c: Fields) -> str:
    key = "dtype" if c.has("dtype") else "torch_dtype"
    name = c.text(key)
    if name not in DTYPES:
        raise c.fail(key, "one of " + ", ".join(DTYPES))
    return name


def _rope(c: Fields, max_position_embeddings: int) -> RopeConfig:
    """The scaling keys live in rope_parameters or in rope_scaling; theta in rope_parameters or at the top."""
    holders = [c.object(key) for key in ("rope_parameters", "rope_scaling") if c.has(key)]
    if len(holders) == 2 and holders[0].values != holders[1].values:
        raise c.fail("rope_scaling", "no such key beside a different rope_parameters")
    scaling = holders[0] if holders else Fields(c.path, {"rope_type": "default"})
    with_theta = scaling if scaling.has("rope_theta") else c
    theta = with_theta.number("rope_theta", 1.0, 1e15)
    if with_theta is scaling and c.has("rope_theta") and c.number("rope_theta", 1.0, 1e15) != theta:
        raise c.fail("rope_theta", f"the {theta:g} of {scaling.prefix}rope_theta")
    for fields in (c, scaling):
        if fields.has("partial_rotary_factor") and fields.number("partial_rotary_factor", 0.0, 1.0) != 1.0:
            raise fields.fail("partial_rotary_factor", "1 (partial rotary embedding is not supported)")
    return RopeConfig(theta, _scaling(c, scaling, max_position_embeddings))


def _scaling(c: Fields, scaling: Fields, max_position_embeddings: int) -> Llama3Scaling | None:
    key = "type" if scaling.has("type") and not scaling.has("rope_type") else "rope_type"
    if key == "rope_type" and scaling.prefix == "rope_parameters." and not scaling.has(key):
        return None  # transformers 5: an absent rope_type is the default one
    kind = scaling.text(key)
    if kind not in ROPE_TYPES:
        raise scaling.fail(key, "one of " + ", ".join(ROPE_TYPES))
    if kind == "default":
        return None
    low = scaling.number("low_freq_factor", 0.0, 1e6)
    high = scaling.number("high_freq_factor", 0.0, 1e6)
    if not low < high:
        raise scaling.fail("high_freq_factor", f"a number above low_freq_factor ({low:g})")
    # transformers gives priority to the key at the top where a file has both.
    holder = c if c.has("original_max_position_embeddings") else scaling
    original = holder.integer("original_max_position_embeddings", 1, _MAX_POSITIONS)
    return Llama3Scaling(scaling.number("factor", 0.0, 1e6), low, high, original)


def _experts(c: Fields, num_layers: int) -> ExpertsConfig:
    """The keys of Qwen's mixtures; a layer is sparse if its number, from 1, is a multiple of decoder_sparse_step."""
    key = "num_experts" if c.has("num_experts") else "num_local_experts"  # what transformers 5 writes
    count = c.integer(key, 1, _MAX_EXPERTS)
    if c.has("num_local_experts") and c.integer("num_local_experts", 1, _MAX_EXPERTS) != count:
        raise c.fail("num_local_experts", f"the {count} of num_experts")
    step = c.integer("decoder_sparse_step", 1, 1 << 12) if c.has("decoder_sparse_step") else 1
    listed = c.values["mlp_only_layers"] if c.has("mlp_only_layers") else []
    if not isinstance(listed, list) or any(type(i) is not int or not 0 <= i < num_layers for i in listed):
        raise c.fail("mlp_only_layers", f"a list of layers from 0 to {num_layers - 1}")
    return ExpertsConfig(
        count=count,
        top_k=c.integer("num_experts_per_tok", 1, count),
        width=c.integer("moe_intermediate_size", 1, _MAX_WIDTH),
        renormalize=c.flag("norm_topk_prob"),
        dense_layers=frozenset(i for i in range(num_layers) if i in listed or (i + 1) % step),
    )


def _special_ids(model_dir: Path, c: Fields, vocab_size: int) -> tuple[tuple[int, ...], int | None]:
    """(end-of-sequence ids, beginning-of-sequence id): generation_config.json, config.json where that is silent."""
    sources = (_generation_config(model_dir), c)
    eos = next((s.ids("eos_token_id", vocab_size) for s in sources if s.has("eos_token_id")), ())
    bos = next((s.integer("bos_token_id", 0, vocab_size - 1) for s in sources if s.has("bos_token_id")), None)
    return eos, bos


def _generation_config(model_dir: Path) -> Fields:
    """Without fields if there is no such file."""
    name = "generation_config.json"
    values = read_json_object(model_dir, name, ConfigError) if is_listed(model_dir, name) else {}
    return Fields(model_dir / name, values)
