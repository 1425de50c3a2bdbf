"""The formats that a model holds its weights in: the checkpoint's own, or those that a command asks for."""

from __future__ import annotations

import torch

from tilerank.kernels.weight_formats import (
    BlockInt8,
    ChannelFp8,
    Format,
    Fp8,
    Gguf,
    GgufA8,
    GroupInt8,
    Int4,
    Int4A8,
    Int8,
    Mxfp4,
    Mxfp4A8,
    Nvfp4,
    TokenInt8,
)
from tilerank.parallel.sharding import WeightFormats

from .quantization_config import (
    DEFAULT_ACTIVATION_BITS,
    DEFAULT_INT4_GROUP,
    DEFAULT_INT4_ZERO_POINTS,
    INT4_GROUPS,
    ActivationBits,
    Quantization,
    QuantizationConfig,
    Scheme,
    check_agreement,
)

_FP8_GROUP = 128  # of what is quantised while loading
_FP8_BLOCK = (32, 128)  # the smallest number of rows that the kernels have blocks of
_INT4: dict[ActivationBits, type[Int4]] = {8: Int4A8, 16: Int4}
_MXFP4: dict[ActivationBits, type[Mxfp4]] = {8: Mxfp4A8, 16: Mxfp4}
_GGUF: dict[ActivationBits, type[Gguf]] = {8: GgufA8, 16: Gguf}


def weight_formats(
    stored: QuantizationConfig | None,
    dtype: torch.dtype,
    quantization: Quantization | None,
    activation_bits: ActivationBits = DEFAULT_ACTIVATION_BITS,
) -> WeightFormats | None:
    """Return the formats of a model's weights; None if all are floats of `dtype`.

    stored: how the checkpoint is quantised, if it is. quantization: what the command asks for; a quantised checkpoint
    needs none. activation_bits: of the activations that weights of int4, of MXFP4 and of GGUF files are multiplied
    with.
    Raises ConfigError as `check_agreement` does.
    """
    check_agreement(stored, quantization, str(dtype).removeprefix("torch."), activation_bits)
    if stored is not None and stored.scheme.layout == "gguf" and dtype is torch.float32:
        return None  # as floats, without a rounding
    if stored is not None:
        config = stored

        def held(module: str) -> Format | None:
            scheme = config.scheme_of(module)
            return None if scheme is None else stored_format(scheme, activation_bits)

        main = stored_format(config.scheme, activation_bits)
        return None if main is None else WeightFormats(main, main, held)
    if quantization is None:
        return None
    # The head keeps eight bits: small differences between its logits decide, and it is read once a step only. So do
    # projections to values, which cause a quarter of the error of 4 bits with few of the weights
    # (docs/quantisation.md).
    values = Int8() if quantization.codes in ("int4", "mxfp4") else None
    return WeightFormats(_asked_format(quantization, activation_bits), Int8(), values=values)


def stored_format(scheme: Scheme, activation_bits: ActivationBits = DEFAULT_ACTIVATION_BITS) -> Format | None:
    """Return the format in which weights of a scheme are held, before any cut; None: as floats.

    Floats, if groups are permuted (act_order): kernels need groups of neighbouring columns, and a rank's columns belong
    to all groups.
    """
    if scheme.act_order:
        return None
    rows, columns = scheme.block
    if scheme.layout == "fp8":
        return Fp8(rows, columns) if rows and columns else ChannelFp8() if rows else Fp8(*_FP8_BLOCK)
    if scheme.layout == "int8":
        return BlockInt8(rows, columns) if rows and columns else TokenInt8()
    if scheme.layout == "mxfp4" or scheme.type == "MXFP4":
        return _MXFP4[activation_bits]()
    if scheme.layout == "nvfp4":
        return Nvfp4()
    if scheme.layout == "gguf":
        return _GGUF[activation_bits](scheme.type, columns)
    # Larger groups are held as several with the same scale, unless there is one alone.
    group = max(size for size in INT4_GROUPS if columns % size == 0) if columns else 0
    return (_INT4[activation_bits] if scheme.bits == 4 else GroupInt8)(group, zero_points=not scheme.symmetric)


def _asked_format(quantization: Quantization, activation_bits: ActivationBits) -> Format:
    if quantization.codes == "int8":
        return Int8()
    if quantization.codes == "fp8":
        return ChannelFp8(_FP8_GROUP)
    if quantization.codes == "mxfp4":
        return _MXFP4[activation_bits]()
    zero_points = quantization.zero_points
    return _INT4[activation_bits](
        quantization.group or DEFAULT_INT4_GROUP, DEFAULT_INT4_ZERO_POINTS if zero_points is None else zero_points
    )
