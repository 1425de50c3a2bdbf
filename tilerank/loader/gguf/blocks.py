"""The values that the blocks of GGUF files mean."""

from __future__ import annotations

from torch import Tensor

from tilerank.kernels.reference.weight_formats import E2M1, powers_of_two
from tilerank.kernels.weight_formats.gguf import GGUF_TYPES
from tilerank.kernels.weight_formats.gguf_blocks import decode


def dequantise(type: str, blocks: Tensor) -> Tensor:
    """Return the values [r, k] of blocks [r, blocks, bytes] in fp32, each rounded once."""
    found = decode(type, blocks)

    def by_value(scales: Tensor, factors: Tensor | None) -> Tensor:
        numbers = powers_of_two(scales) if type == "MXFP4" else scales.float()
        if factors is not None:
            numbers = numbers.repeat_interleave(factors.shape[1] // numbers.shape[1], 1) * factors.float()
        return numbers.repeat_interleave(found.codes.shape[1] // numbers.shape[1], 1)

    values = by_value(found.scales, found.subscales) * (
        E2M1[found.codes.int()] if type == "MXFP4" else GGUF_TYPES[type].numbers(found.codes)
    )
    return values if found.minimums is None else values + by_value(found.minimums, found.subminimums)
