"""Rotary position embedding as config.json spells it, and the context that its scaling extends. Imports no torch."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from .fields import Fields

_MAX_THETA = 1e15
_MAX_POSITIONS = 1 << 30
_MAX_FACTOR = 1e6
_CONTEXT = "max_position_embeddings"
_PART = "partial_rotary_factor"
_ORIGINAL = "original_max_position_embeddings"

FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"
"""The kinds of layers of self-attention, by what a token attends to: all tokens before it, or those in a window."""

_OLD_LONGROPE = ("su", "yarn")
"""The types under which the first files of Phi-3 have LongRoPE."""
_THETAS = {FULL_ATTENTION: "rope_theta", SLIDING_ATTENTION: "rope_local_base_freq"}

Sections = tuple[int, int, int]
"""How many frequencies follow the time, the height and the width of a token in interleaved M-RoPE (Qwen3-VL)."""


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation (Chen et al., arXiv 2306.15595): all frequencies are divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's frequency scaling: wavelengths above original / low_freq_factor are stretched by `factor`, those
    below original / high_freq_factor are kept, and those between are blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al., arXiv 2309.00071).

    Frequencies that turn more than `beta_fast` times in `original_max_position_embeddings` tokens are kept, those that
    turn less than `beta_slow` times are divided by `factor`, and those between are blended; `truncate`: the borders are
    moved outwards to whole frequencies.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class LongScaling:
    """LongRoPE (Ding et al., arXiv 2402.13753): each frequency is divided by a factor of its own.

    The factors are `short` if no sequence may be longer than `original_max_position_embeddings`, and otherwise `long`,
    for short sequences as well. transformers changes them when a sequence grows and computes its keys again; a server
    cannot, because its cached keys are rotated already.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_max_position_embeddings: int

    def factors(self, context_length: int) -> tuple[float, ...]:
        """Return the factors for sequences of up to `context_length` tokens."""
        return self.long if context_length > self.original_max_position_embeddings else self.short


@dataclass(frozen=True)
class ProportionalScaling:
    """The frequencies of a whole head of `head_dim` dimensions, divided by `factor`, of which a part is used (Gemma 4).

    The first frequencies are theta^(-2i / head_dim), and the dimensions of the others are not rotated.
    """

    head_dim: int
    factor: float


Scaling = LinearScaling | Llama3Scaling | YarnScaling | LongScaling | ProportionalScaling


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding; without `scaling` the frequencies are theta^(-2i / dim).

    sections: None if a token has one position. amplitude: factor of cosines and sines. score_factor: factor of
    attention scores, which latent attention uses (DeepSeek-V2): (0.1 * mscale_all_dim * ln(factor) + 1)^2.
    """

    theta: float
    scaling: Scaling | None = None
    sections: Sections | None = None
    amplitude: float = 1.0
    score_factor: float = 1.0

    @property
    def axes(self) -> int:
        """The number of positions that a token has."""
        return 1 if self.sections is None else len(self.sections)


def read_rope(c: Fields, dim: int, sections: Sections | None = None) -> RopeConfig:
    """Read both dialects of config.json: `rope_theta` with `rope_scaling` (transformers 4), `rope_parameters` (5).

    Scaling is in rope_parameters or in rope_scaling, theta in rope_parameters or at the top. dim: how many dimensions
    of a head are rotated. sections: of a model with interleaved M-RoPE, where the file names none; None: of a model
    without. Raises ConfigError.
    """
    scaling = _scaling(c)
    if scaling.has(FULL_ATTENTION) or scaling.has(SLIDING_ATTENTION):
        raise c.fail(scaling.prefix.split(".")[-2], "one rotary embedding for all layers")
    with_theta = scaling if scaling.has("rope_theta") else c
    theta = with_theta.number("rope_theta", 1.0, _MAX_THETA)
    if with_theta is scaling and c.has("rope_theta") and c.number("rope_theta", 1.0, _MAX_THETA) != theta:
        raise c.fail("rope_theta", f"the {theta:g} of {scaling.prefix}rope_theta")
    if sections is not None:
        sections = _read_sections(scaling, dim // 2, sections)
    return _rope(c, scaling, theta, dim, sections)


def read_layer_rope(c: Fields, dim: int, kind: str) -> RopeConfig:
    """Read the rotary embedding of the layers of a kind, in a model with one for each kind (Gemma 3).

    Both dialects: the older one has `rope_theta` and `rope_scaling` of the full layers and `rope_local_base_freq` of
    those with a window, which is `rope_theta` in files without it (OLMo 3); the newer one has an object for each kind
    in rope_parameters. Raises ConfigError.
    """
    key, parameters, older = _THETAS[kind], "rope_parameters", "rope_scaling"
    if not c.has(key):
        key = "rope_theta"
    if not c.has(parameters):
        scaled = c.has(older) and kind == FULL_ATTENTION
        scaling = c.object(older) if scaled else Fields(c.path, {"rope_type": "default"})
        return _rope(c, scaling, c.number(key, 1.0, _MAX_THETA), dim)
    nested = c.object(parameters)
    if unknown := [name for name in nested.values if name not in _THETAS]:
        raise nested.fail(unknown[0], f"no such key beside {' and '.join(_THETAS)}")
    scaling = nested.object(kind)
    with_theta, key = (scaling, "rope_theta") if scaling.has("rope_theta") else (c, key)
    return _rope(c, scaling, with_theta.number(key, 1.0, _MAX_THETA), dim)


def _rope(c: Fields, scaling: Fields, theta: float, dim: int, sections: Sections | None = None) -> RopeConfig:
    read, amplitude = _READERS[_kind(scaling)](c, scaling, dim // 2)
    return RopeConfig(theta, read, sections, amplitude, _score_factor(c, scaling))


def read_layer_rotary_dim(c: Fields, head_dim: int, kind: str) -> int:
    """Return how many dimensions of a head the layers of a kind rotate, in the newer dialect of `read_layer_rope`."""
    scaling = c.object("rope_parameters").object(kind)
    if not scaling.has(_PART):
        return head_dim
    part = scaling.number(_PART, 0.0, 1.0)
    if _kind(scaling) != "proportional" and part != 1.0:
        raise scaling.fail(_PART, "1 beside this type (partial rotary embedding is not supported)")
    return max(int(part * head_dim) // 2 * 2, 2)


def read_rotary_dim(c: Fields, head_dim: int, usual_part: float | None = None) -> int:
    """Return how many dimensions of a head are rotated: `partial_rotary_factor` of them, or `usual_part` without it.

    The factor is at the top or beside the scaling. usual_part: None for a family that rotates whole heads.
    """
    found = [(fields, fields.number(_PART, 0.0, 1.0)) for fields in (c, _scaling(c)) if fields.has(_PART)]
    for fields, part in found:
        if usual_part is None and part != 1.0:
            raise fields.fail(_PART, "1 (partial rotary embedding is not supported)")
        if part != found[0][1]:
            raise fields.fail(_PART, f"the {found[0][1]:g} of {found[0][0].prefix}{_PART}")
        if (dim := int(head_dim * part)) % 2 or not dim:
            raise fields.fail(_PART, f"an even number of the {head_dim} dimensions of a head")
    return int(head_dim * (found[0][1] if found else usual_part or 1.0))


def read_context_length(c: Fields) -> int:
    """Return how many tokens a sequence may have: max_position_embeddings, or more if the scaling extends them.

    Linear scaling and YaRN extend the original context to `factor` times its length. Model cards say to add them to
    config.json and leave max_position_embeddings as it is; other files state the extended length there already.
    """
    stated, scaling = c.integer(_CONTEXT, 1, _MAX_POSITIONS), _scaling(c)
    # The scaling of the full layers alone says nothing of those with a window.
    if c.has(_THETAS[SLIDING_ATTENTION]) or _kind(scaling) not in ("linear", "yarn"):
        return stated
    return max(stated, min(int(_original(c, scaling) * _factor(c, scaling)), _MAX_POSITIONS))


def long_factors_note(c: Fields, context_length: int) -> str | None:
    """Return what a server with this context says of the factors of LongRoPE, in one sentence; None without them."""
    scaling = _scaling(c)
    if _kind(scaling) != "longrope":
        return None
    original = _original(c, scaling)
    chosen = "long_factor" if context_length > original else "short_factor"
    return (
        f"positions are scaled by {chosen} of longrope, because the context of {context_length:,} tokens is "
        f"{'longer' if context_length > original else 'not longer'} than the original {original:,}"
    )


def _scaling(c: Fields) -> Fields:
    """Return the object with the scaling of the frequencies; one that scales nothing if there is none."""
    holders = [c.object(key) for key in ("rope_parameters", "rope_scaling") if c.has(key)]
    if len(holders) == 2 and holders[0].values != holders[1].values:
        raise c.fail("rope_scaling", "no such key beside a different rope_parameters")
    return holders[0] if holders else Fields(c.path, {"rope_type": "default"})


def _kind(scaling: Fields) -> str:
    """Return the type of the scaling, one of _READERS. `type` is the older name of the key."""
    key = "type" if scaling.has("type") and not scaling.has("rope_type") else "rope_type"
    with_sections = scaling.has("mrope_section")
    if not scaling.has(key) and (with_sections or "rope_parameters." in scaling.prefix):
        return "default"
    kind = scaling.text(key)
    if kind == "mrope" and with_sections:
        return "default"
    if kind in _OLD_LONGROPE and scaling.has("long_factor"):
        return "longrope"
    if kind not in _READERS:
        raise scaling.fail(key, "one of " + ", ".join(_READERS))
    return kind


def _original(c: Fields, scaling: Fields) -> int:
    """Return the tokens of the context before it was extended."""
    # transformers gives priority to the key at the top where a file has both.
    for holder in (c, scaling):
        if holder.has(_ORIGINAL):
            return holder.integer(_ORIGINAL, 1, _MAX_POSITIONS)
    return c.integer(_CONTEXT, 1, _MAX_POSITIONS)


def _factor(c: Fields, scaling: Fields) -> float:
    """Return how many times longer the extended context is."""
    if scaling.has("factor"):
        return scaling.number("factor", 0.0, _MAX_FACTOR)
    return c.integer(_CONTEXT, 1, _MAX_POSITIONS) / _original(c, scaling)


def _number(scaling: Fields, key: str, default: float) -> float:
    """Return a number for which zero counts as absent, as it does in transformers."""
    return (scaling.number(key, 0.0, _MAX_FACTOR, above=False) if scaling.has(key) else 0.0) or default


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


def _score_factor(c: Fields, scaling: Fields) -> float:
    weight = _number(scaling, "mscale_all_dim", 0.0)
    return _mscale(_factor(c, scaling), weight) ** 2 if weight and _kind(scaling) != "default" else 1.0


def _read_sections(scaling: Fields, count: int, usual: Sections) -> Sections:
    """Return the sections of `count` frequencies, those of the file or else `usual`."""
    for key in ("mrope_interleaved", "interleaved"):
        if scaling.has(key) and not scaling.flag(key):
            raise scaling.fail(key, "true (other orders of frequencies are not supported)")
    sizes = scaling.values["mrope_section"] if scaling.has("mrope_section") else list(usual)
    if (
        not isinstance(sizes, list)
        or len(sizes) != 3
        or any(type(size) is not int or size < 0 for size in sizes)
        or sum(sizes) != count
    ):
        raise scaling.fail("mrope_section", f"the frequencies of three axes, {count} together")
    return sizes[0], sizes[1], sizes[2]


_Read = tuple[Scaling | None, float]
"""A scaling and its amplitude."""


def _read_default(c: Fields, scaling: Fields, count: int) -> _Read:
    return None, 1.0


def _read_linear(c: Fields, scaling: Fields, count: int) -> _Read:
    return LinearScaling(scaling.number("factor", 0.0, _MAX_FACTOR)), 1.0


def _read_dynamic(c: Fields, scaling: Fields, count: int) -> _Read:
    """Dynamic NTK scaling changes nothing in sequences of up to max_position_embeddings tokens, the longest here."""
    scaling.number("factor", 0.0, _MAX_FACTOR)
    return None, 1.0


def _read_llama3(c: Fields, scaling: Fields, count: int) -> _Read:
    low = scaling.number("low_freq_factor", 0.0, _MAX_FACTOR)
    high = scaling.number("high_freq_factor", 0.0, _MAX_FACTOR)
    if not low < high:
        raise scaling.fail("high_freq_factor", f"a number above low_freq_factor ({low:g})")
    return Llama3Scaling(scaling.number("factor", 0.0, _MAX_FACTOR), low, high, _original(c, scaling)), 1.0


def _read_yarn(c: Fields, scaling: Fields, count: int) -> _Read:
    factor = _factor(c, scaling)
    own, all_dim = _number(scaling, "mscale", 0.0), _number(scaling, "mscale_all_dim", 0.0)
    amplitude = _mscale(factor, own) / _mscale(factor, all_dim) if own and all_dim else _mscale(factor, 1.0)
    fast, slow = _number(scaling, "beta_fast", 32.0), _number(scaling, "beta_slow", 1.0)
    if slow > fast:
        raise scaling.fail("beta_slow", f"at most beta_fast ({fast:g})")
    truncate = scaling.flag("truncate") if scaling.has("truncate") else True
    return YarnScaling(factor, _original(c, scaling), fast, slow, truncate), _amplitude(scaling, amplitude)


def _read_longrope(c: Fields, scaling: Fields, count: int) -> _Read:
    factor, original = _factor(c, scaling), _original(c, scaling)
    amplitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    short, long = (_read_factors(scaling, key, count) for key in ("short_factor", "long_factor"))
    return LongScaling(short, long, original), _amplitude(scaling, amplitude)


def _read_proportional(c: Fields, scaling: Fields, count: int) -> _Read:
    factor = scaling.number("factor", 0.0, _MAX_FACTOR) if scaling.has("factor") else 1.0
    return ProportionalScaling(2 * count, factor), 1.0


def _read_factors(scaling: Fields, key: str, count: int) -> tuple[float, ...]:
    values = scaling.values.get(key)
    numbers = isinstance(values, list) and all(
        isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= _MAX_FACTOR for value in values
    )
    if not isinstance(values, list) or not numbers or len(values) != count:
        raise scaling.fail(key, f"{count} numbers above 0, one for each frequency")
    return tuple(float(value) for value in values)


def _amplitude(scaling: Fields, usual: float) -> float:
    key = "attention_factor"
    return scaling.number(key, 0.0, _MAX_FACTOR) if scaling.has(key) else usual


_READERS: dict[str, Callable[[Fields, Fields, int], _Read]] = {
    "default": _read_default,
    "linear": _read_linear,
    "dynamic": _read_dynamic,
    "llama3": _read_llama3,
    "yarn": _read_yarn,
    "longrope": _read_longrope,
    "proportional": _read_proportional,
}
"""What reads the scaling of each type, given the fields of the model, those of the scaling, and how many frequencies
there are."""
