"""In which formats a model's weights are held: as the checkpoint stores them, or as a command asks to quantise them."""

from __future__ import annotations

import torch

from tilerank.kernels.formats import Format, Int8
from tilerank.parallel.layer import WeightFormats

from .config import ModelConfig
from .errors import ConfigError
from .quantization import Quantization, QuantizationConfig, check_agreement


def weight_formats(config: ModelConfig, dtype: torch.dtype, quantization: Quantization | None) -> WeightFormats | None:
    """None: floats of `dtype`. `quantization` is what was asked for; a checkpoint that is quantised needs no asking.

    ConfigError as of `check_agreement`.
    """
    stored = config.quantization
    check_agreement(stored, quantization, str(dtype).removeprefix("torch."))
    if stored is not None:
        held = stored_format(stored)
        return WeightFormats(held, held, stored.converts)
    if quantization is None:
        return None
    # The head chooses among all words by small differences, and is read once a step: it keeps eight bits.
    return WeightFormats(_asked_format(quantization), Int8())


def stored_format(config: QuantizationConfig) -> Format:
    """The format of the weights of such a checkpoint, before any cut."""
    return _asked_format(Quantization(config.codes))


def _asked_format(quantization: Quantization) -> Format:
    if quantization.codes == "int8":
        return Int8()
    raise ConfigError(f"quantization: expected int8, found {quantization.codes}, which is not supported yet")
