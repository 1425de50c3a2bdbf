"""The formats that a model holds its weights in: the checkpoint's own, or those that a command asks for."""

from __future__ import annotations

import torch

from tilerank.kernels.weight_formats import BlockInt8, Format, Fp8, Int4, Int8
from tilerank.parallel.sharding import WeightFormats

from .quantization_config import DEFAULT_INT4_GROUP, INT4_GROUPS, Quantization, QuantizationConfig, check_agreement

_FP8_BLOCK = (32, 128)  # the smallest number of rows that the kernels have blocks of


def weight_formats(
    stored: QuantizationConfig | None, dtype: torch.dtype, quantization: Quantization | None
) -> WeightFormats | None:
    """Return the formats of a model's weights; None if all are floats of `dtype`.

    stored: how the checkpoint is quantised, if it is. quantization: what the command asks for; a quantised checkpoint
    needs none. A checkpoint whose groups are permuted (act_order) is held as floats, because kernels need groups of
    neighbouring columns and a rank's columns belong to all groups. Raises ConfigError as `check_agreement` does.
    """
    check_agreement(stored, quantization, str(dtype).removeprefix("torch."))
    if stored is not None:
        if stored.act_order:
            return None
        held = stored_format(stored)
        return WeightFormats(held, held, stored.converts)
    if quantization is None:
        return None
    # The head keeps eight bits: small differences between its logits decide, and it is read once a step only.
    return WeightFormats(_asked_format(quantization), Int8())


def stored_format(config: QuantizationConfig) -> Format:
    """Return the format of a quantised checkpoint's weights, before any cut."""
    if config.layout == "fp8":
        return Fp8(*config.block)
    if config.layout == "block_int8":
        return BlockInt8(*config.block)
    if config.layout == "int8":
        return Int8()
    # Larger groups are held as several with the same scale.
    group = max(size for size in INT4_GROUPS if config.group % size == 0)
    return Int4(group, zero_points=not config.symmetric)


def _asked_format(quantization: Quantization) -> Format:
    if quantization.codes == "int8":
        return Int8()
    if quantization.codes == "fp8":
        return Fp8(*_FP8_BLOCK)
    # Scales minimise the squared error; zero points would then gain little accuracy for their bytes.
    return Int4(quantization.group or DEFAULT_INT4_GROUP, zero_points=False)
