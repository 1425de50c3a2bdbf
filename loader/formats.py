"""In which formats a model's weights are held: as the checkpoint stores them, or as a command asks to quantise them."""

from __future__ import annotations

import torch

from tilerank.kernels.formats import Format, Fp8, Int4, Int8
from tilerank.parallel.layer import WeightFormats

from .config import ModelConfig
from .quantization import DEFAULT_INT4_GROUP, INT4_GROUPS, Quantization, QuantizationConfig, check_agreement

_FP8_BLOCK = (32, 128)  # as fine as the kernels keep scales


def weight_formats(config: ModelConfig, dtype: torch.dtype, quantization: Quantization | None) -> WeightFormats | None:
    """None: floats of `dtype`. `quantization` is what was asked for; a checkpoint that is quantised needs no asking.

    One whose columns share scales across the matrix (act_order) is held as floats: kernels take groups of neighbours,
    and a rank's columns have parts of all groups.

    ConfigError as of `check_agreement`.
    """
    stored = config.quantization
    check_agreement(stored, quantization, str(dtype).removeprefix("torch."))
    if stored is not None:
        if stored.act_order:
            return None
        held = stored_format(stored)
        return WeightFormats(held, held, stored.converts)
    if quantization is None:
        return None
    # The head chooses among all words by small differences, and is read once a step: it keeps eight bits.
    return WeightFormats(_asked_format(quantization), Int8())


def stored_format(config: QuantizationConfig) -> Format:
    """The format of the weights of such a checkpoint, before any cut."""
    if config.layout == "fp8":
        return Fp8(*config.block)
    if config.layout == "int8":
        return Int8()
    # A scale that serves more columns is repeated.
    group = max(size for size in INT4_GROUPS if config.group % size == 0)
    return Int4(group, zero_points=not config.symmetric)


def _asked_format(quantization: Quantization) -> Format:
    if quantization.codes == "int8":
        return Int8()
    if quantization.codes == "fp8":
        return Fp8(*_FP8_BLOCK)
    # Scales are chosen for the least squared error, after which zero points of groups gain little and cost bytes.
    return Int4(quantization.group or DEFAULT_INT4_GROUP, zero_points=False)
