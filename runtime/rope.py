"""Rotary position embedding: the angle of every position and frequency, as tables of cosines and sines."""

import math

import torch
from torch import Tensor

from tilerank.loader.config import Llama3Scaling, RopeConfig
from tilerank.parallel.layer import Layer


class RotaryTable(Layer):
    """cos and sin [positions, dim / 2]: computed in fp32, then rounded to the activation dtype, as transformers does.

    They exist after `allocate()`.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, rope: RopeConfig, dim: int, positions: int, dtype: torch.dtype) -> None:
        self._rope = rope
        self._dim = dim
        self._positions = positions
        self._dtype = dtype

    def nbytes(self) -> int:
        return self._positions * self._dim * self._dtype.itemsize

    def allocate(self) -> None:
        shape = (self._positions, self._dim // 2)
        self.cos, self.sin = torch.empty(shape, dtype=self._dtype), torch.empty(shape, dtype=self._dtype)
        frequencies = inverse_frequencies(self._rope, self._dim)
        # In blocks, so that the fp32 intermediates of a long context never matter.
        for start in range(0, self._positions, 4096):
            stop = min(start + 4096, self._positions)
            angles = torch.outer(torch.arange(start, stop, dtype=torch.float32), frequencies)
            self.cos[start:stop] = angles.cos()
            self.sin[start:stop] = angles.sin()


def inverse_frequencies(rope: RopeConfig, dim: int) -> Tensor:
    """[dim / 2] fp32 radians per position: theta^(-2i / dim), rescaled as the config says."""
    frequencies = 1.0 / rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    return frequencies if rope.scaling is None else _llama3(frequencies, rope.scaling)


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended (Llama 3.1)."""
    context = scaling.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = (context / wavelengths - low) / (high - low)
    blended = (1 - kept) * frequencies / scaling.factor + kept * frequencies
    stretched = torch.where(wavelengths > context / low, frequencies / scaling.factor, blended)
    return torch.where(wavelengths < context / high, frequencies, stretched)
