"""The table of cosines and sines of every position and frequency of a rotary position embedding."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tilerank.kernels import ops
from tilerank.loader.rope import (
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    ProportionalScaling,
    RopeConfig,
    Sections,
    YarnScaling,
)
from tilerank.parallel.parameters import Layer


@dataclass(frozen=True)
class Rotation:
    """The rotation of the first `dim` dimensions of queries and keys."""

    rope: RopeConfig
    dim: int


class RopeTable(Layer):
    """Cosines and sines [positions, 2, dim / 2], computed in fp32 and rounded to the activation dtype as transformers
    does. `table` exists after `allocate()`.

    positions: those of the longest sequence, which LongRoPE chooses its factors by.
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
        frequencies, amplitude = inverse_frequencies(self._rope, self._dim, self._positions), self._rope.amplitude
        # In blocks, which bounds the fp32 intermediates of a long context.
        for start in range(0, self._positions, 4096):
            stop = min(start + 4096, self._positions)
            angles = torch.outer(torch.arange(start, stop, dtype=torch.float32), frequencies)
            self.table[start:stop, 0] = angles.cos() * amplitude
            self.table[start:stop, 1] = angles.sin() * amplitude


def inverse_frequencies(rope: RopeConfig, dim: int, context_length: int) -> Tensor:
    """Return [dim / 2] fp32 radians per position: theta^(-2i / dim), rescaled as the config says.

    context_length: tokens of the longest sequence.
    """
    inverse = rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    match rope.scaling:
        case None:
            return 1.0 / inverse
        case LinearScaling(factor):
            return 1.0 / inverse / factor
        case Llama3Scaling() as scaling:
            return _llama3(1.0 / inverse, scaling)
        case YarnScaling() as scaling:
            return _yarn(inverse, scaling, rope.theta)
        case ProportionalScaling(head_dim, factor):
            return 1.0 / rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / head_dim) / factor
        case LongScaling() as scaling:
            return 1.0 / (torch.tensor(scaling.factors(context_length)) * inverse)


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


def axes_of_frequencies(sections: Sections | None, count: int) -> list[int]:
    """Return the axis of each of `count` frequencies: time 0, height 1, width 2 in turn, while their sections last.

    Height has every third frequency below 3 * sections[1], width below 3 * sections[2], and time has the rest.
    """
    if sections is None:
        return [0] * count
    return [i % 3 if i < 3 * sections[i % 3] else 0 for i in range(count)]
