"""Rotary position embedding: its configuration, and the table of cosines and sines of every position and frequency."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tilerank.kernels import ops
from tilerank.loader.fields import Fields
from tilerank.parallel.parameters import Layer

ROPE_TYPES = ("default", "llama3", "yarn")

_MAX_THETA = 1e15
_MAX_POSITIONS = 1 << 30
_ORIGINAL = "original_max_position_embeddings"


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
    moved outwards to whole frequencies. amplitude: factor of cosines and sines. score_factor: factor of attention
    scores, which latent attention uses (DeepSeek-V2): (0.1 * mscale_all_dim * ln(factor) + 1)^2.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    amplitude: float = 1.0
    score_factor: float = 1.0


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding; without `scaling` the frequencies are theta^(-2i / dim).

    sections: the frequencies that follow the time, the height and the width of a token, in interleaved M-RoPE
    (Qwen3-VL); None if a token has one position.
    """

    theta: float
    scaling: Llama3Scaling | YarnScaling | None = None
    sections: tuple[int, int, int] | None = None

    @property
    def axes(self) -> int:
        """The number of positions that a token has."""
        return 1 if self.sections is None else len(self.sections)


def read_rope(c: Fields, sectioned_dim: int | None = None) -> RopeConfig:
    """Read both dialects of config.json: `rope_theta` with `rope_scaling` (transformers 4), `rope_parameters` (5).

    Scaling is in rope_parameters or in rope_scaling, theta in rope_parameters or at the top. sectioned_dim: how many
    dimensions of a head are rotated, in a model with interleaved M-RoPE, whose sections are beside the scaling. Raises
    ConfigError.
    """
    scaling = _scaling(c)
    with_theta = scaling if scaling.has("rope_theta") else c
    theta = with_theta.number("rope_theta", 1.0, _MAX_THETA)
    if with_theta is scaling and c.has("rope_theta") and c.number("rope_theta", 1.0, _MAX_THETA) != theta:
        raise c.fail("rope_theta", f"the {theta:g} of {scaling.prefix}rope_theta")
    if sectioned_dim is None:
        return RopeConfig(theta, _read_scaling(c, scaling))
    sections = _read_sections(scaling, sectioned_dim)
    key = "type" if scaling.has("type") and not scaling.has("rope_type") else "rope_type"
    if scaling.has(key) and scaling.text(key) not in ("default", "mrope"):  # both mean no scaling here
        raise scaling.fail(key, "default or mrope")
    return RopeConfig(theta, None, sections)


def read_rotary_dim(c: Fields, head_dim: int, usual_part: float | None = None) -> int:
    """Return how many dimensions of a head are rotated: `partial_rotary_factor` of them, or `usual_part` without it.

    The factor is at the top or beside the scaling. usual_part: None for a family that rotates whole heads.
    """
    key = "partial_rotary_factor"
    found = [(fields, fields.number(key, 0.0, 1.0)) for fields in (c, _scaling(c)) if fields.has(key)]
    for fields, part in found:
        if usual_part is None and part != 1.0:
            raise fields.fail(key, "1 (partial rotary embedding is not supported)")
        if part != found[0][1]:
            raise fields.fail(key, f"the {found[0][1]:g} of {found[0][0].prefix}{key}")
        if (dim := int(head_dim * part)) % 2 or not dim:
            raise fields.fail(key, f"an even number of the {head_dim} dimensions of a head")
    return int(head_dim * (found[0][1] if found else usual_part or 1.0))


def _scaling(c: Fields) -> Fields:
    """Return the object with the scaling of the frequencies; one that scales nothing if there is none."""
    holders = [c.object(key) for key in ("rope_parameters", "rope_scaling") if c.has(key)]
    if len(holders) == 2 and holders[0].values != holders[1].values:
        raise c.fail("rope_scaling", "no such key beside a different rope_parameters")
    return holders[0] if holders else Fields(c.path, {"rope_type": "default"})


def _read_sections(scaling: Fields, dim: int) -> tuple[int, int, int]:
    for key in ("mrope_interleaved", "interleaved"):
        if scaling.has(key) and not scaling.flag(key):
            raise scaling.fail(key, "true (other orders of frequencies are not supported)")
    sizes = scaling.values.get("mrope_section")
    if (
        not isinstance(sizes, list)
        or len(sizes) != 3
        or any(type(size) is not int or size < 0 for size in sizes)
        or sum(sizes) != dim // 2
    ):
        raise scaling.fail("mrope_section", f"the frequencies of three axes, {dim // 2} together")
    return sizes[0], sizes[1], sizes[2]


def _read_scaling(c: Fields, scaling: Fields) -> Llama3Scaling | YarnScaling | None:
    key = "type" if scaling.has("type") and not scaling.has("rope_type") else "rope_type"
    if key == "rope_type" and scaling.prefix == "rope_parameters." and not scaling.has(key):
        return None  # transformers 5: an absent rope_type is the default one
    kind = scaling.text(key)
    if kind not in ROPE_TYPES:
        raise scaling.fail(key, "one of " + ", ".join(ROPE_TYPES))
    if kind == "default":
        return None
    # transformers gives priority to the key at the top where a file has both.
    holder, key = c if c.has(_ORIGINAL) else scaling, _ORIGINAL
    if kind == "yarn":
        if not holder.has(key):
            holder, key = c, "max_position_embeddings"
        return _read_yarn(c, scaling, holder.integer(key, 1, _MAX_POSITIONS))
    low = scaling.number("low_freq_factor", 0.0, 1e6)
    high = scaling.number("high_freq_factor", 0.0, 1e6)
    if not low < high:
        raise scaling.fail("high_freq_factor", f"a number above low_freq_factor ({low:g})")
    original = holder.integer(key, 1, _MAX_POSITIONS)
    return Llama3Scaling(scaling.number("factor", 0.0, 1e6), low, high, original)


def _read_yarn(c: Fields, scaling: Fields, original: int) -> YarnScaling:
    def number(key: str, default: float) -> float:
        """Zero counts as absent, as it does in transformers."""
        return (scaling.number(key, 0.0, 1e6, above=False) if scaling.has(key) else 0.0) or default

    most = c.integer("max_position_embeddings", 1, _MAX_POSITIONS)
    factor = scaling.number("factor", 0.0, 1e6) if scaling.has("factor") else most / original

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    own, all_dim = number("mscale", 0.0), number("mscale_all_dim", 0.0)
    amplitude = mscale(own) / mscale(all_dim) if own and all_dim else mscale(1.0)
    fast, slow = number("beta_fast", 32.0), number("beta_slow", 1.0)
    if not slow < fast:
        raise scaling.fail("beta_slow", f"a number below beta_fast ({fast:g})")
    return YarnScaling(
        factor,
        original,
        beta_fast=fast,
        beta_slow=slow,
        truncate=scaling.flag("truncate") if scaling.has("truncate") else True,
        amplitude=scaling.number("attention_factor", 0.0, 1e6) if scaling.has("attention_factor") else amplitude,
        score_factor=mscale(all_dim) ** 2,
    )


class RopeTable(Layer):
    """Cosines and sines [positions, 2, dim / 2], computed in fp32 and rounded to the activation dtype as transformers
    does. `table` exists after `allocate()`.
    """

    table: Tensor

    def __init__(self, rope: RopeConfig, dim: int, positions: int, dtype: torch.dtype) -> None:
        self._rope = rope
        self._dim = dim
        self._positions = positions
        self._dtype = dtype
        self._axis_of = torch.tensor(axes_of_frequencies(rope.sections, dim // 2))

    def rows(self, positions: Tensor) -> Tensor:
        """positions [axes, t] int64 -> [t, 2, dim / 2], what the layers of a step rotate queries and keys with."""
        return ops.rope_rows(self.table, positions, self._axis_of)

    def nbytes(self) -> int:
        return self._positions * self._dim * self._dtype.itemsize

    def allocate(self) -> None:
        self.table = torch.empty((self._positions, 2, self._dim // 2), dtype=self._dtype)
        frequencies = inverse_frequencies(self._rope, self._dim)
        scaling = self._rope.scaling
        amplitude = scaling.amplitude if isinstance(scaling, YarnScaling) else 1.0
        # In blocks, which bounds the fp32 intermediates of a long context.
        for start in range(0, self._positions, 4096):
            stop = min(start + 4096, self._positions)
            angles = torch.outer(torch.arange(start, stop, dtype=torch.float32), frequencies)
            self.table[start:stop, 0] = angles.cos() * amplitude
            self.table[start:stop, 1] = angles.sin() * amplitude


def inverse_frequencies(rope: RopeConfig, dim: int) -> Tensor:
    """Return [dim / 2] fp32 radians per position: theta^(-2i / dim), rescaled as the config says."""
    inverse = rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    match rope.scaling:
        case None:
            return 1.0 / inverse
        case Llama3Scaling() as scaling:
            return _llama3(1.0 / inverse, scaling)
        case YarnScaling() as scaling:
            return _yarn(inverse, scaling, rope.theta)


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    context = scaling.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = (context / wavelengths - low) / (high - low)
    blended = (1 - kept) * frequencies / scaling.factor + kept * frequencies
    stretched = torch.where(wavelengths > context / low, frequencies / scaling.factor, blended)
    return torch.where(wavelengths < context / high, frequencies, stretched)


def _yarn(inverse: Tensor, scaling: YarnScaling, theta: float) -> Tensor:
    count = len(inverse)

    def frequency_of(turns: float) -> float:
        """Return which frequency turns so many times in the original context."""
        return count * math.log(scaling.original_max_position_embeddings / (turns * 2 * math.pi)) / math.log(theta)

    low, high = frequency_of(scaling.beta_fast), frequency_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * count - 1)
    if low == high:
        high += 0.001
    kept = 1 - ((torch.arange(count, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return 1.0 / (scaling.factor * inverse) * (1 - kept) + 1.0 / inverse * kept


def axes_of_frequencies(sections: tuple[int, int, int] | None, count: int) -> list[int]:
    """Return the axis of each of `count` frequencies: time 0, height 1, width 2 in turn, while their sections last.

    Height has every third frequency below 3 * sections[1], width below 3 * sections[2], and time has the rest.
    """
    if sections is None:
        return [0] * count
    return [i % 3 if i < 3 * sections[i % 3] else 0 for i in range(count)]
