"""The blocks of GGUF files, taken apart: codes, scales and minimums.

    value = scale * subscale * number(code) + minimum * subminimum

Scales and minimums are fp16 and have one for each block; types of 256 values have factors of both for each group of 16
or 32 as well. Subtrahends of the files are minimums here, with the other sign.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import KernelError


@dataclass(frozen=True)
class Blocks:
    """The parts of rows [r, k] of blocks.

    codes: [r, k] uint8. scales: [r, blocks] fp16; of MXFP4 exponents, uint8. minimums: as scales. subscales,
    subminimums: [r, groups] int8.
    """

    codes: Tensor
    scales: Tensor
    subscales: Tensor | None = None
    minimums: Tensor | None = None
    subminimums: Tensor | None = None


def _halves(blocks: Tensor, at: int) -> Tensor:
    """Return the fp16 numbers at byte `at` of each block, [r, blocks]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)[..., 0]


def _nibbles(packed: Tensor, run: int) -> Tensor:
    """Return codes of 4 bits: of every `run` bytes the lower ones, then the upper ones."""
    runs = torch.unflatten(packed, -1, (-1, 1, run))
    return torch.cat([runs & 15, runs >> 4], -2).flatten(-3)


def _planes(packed: Tensor, run: int, bits: int) -> Tensor:
    """Return codes of 1 or 2 bits: of every `run` bytes the lowest bits, then those above them."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    return (torch.unflatten(packed, -1, (-1, 1, run)) >> shifts & (1 << bits) - 1).flatten(-3)


def _rows(parts: Tensor) -> Tensor:
    return parts.flatten(1)


def _in_32(blocks: Tensor, begin: int, high: int | None = None) -> Tensor:
    """Return the codes of blocks of 32. high: the byte at which the fifth bits begin, in the order of the values."""
    codes = _nibbles(blocks[..., begin : begin + 16], 16)
    if high is not None:
        bits = blocks[..., high : high + 4, None] >> torch.arange(8, dtype=torch.uint8) & 1
        codes = codes | bits.flatten(-2) << 4
    return _rows(codes)


def _q4_0(blocks: Tensor) -> Blocks:
    return Blocks(_in_32(blocks, 2), _halves(blocks, 0))


def _q4_1(blocks: Tensor) -> Blocks:
    return Blocks(_in_32(blocks, 4), _halves(blocks, 0), minimums=_halves(blocks, 2))


def _q5_0(blocks: Tensor) -> Blocks:
    return Blocks(_in_32(blocks, 6, 2), _halves(blocks, 0))


def _q5_1(blocks: Tensor) -> Blocks:
    return Blocks(_in_32(blocks, 8, 4), _halves(blocks, 0), minimums=_halves(blocks, 2))


def _q8_0(blocks: Tensor) -> Blocks:
    return Blocks(_rows(blocks[..., 2:]), _halves(blocks, 0))


def _q2_k(blocks: Tensor) -> Blocks:
    codes, factors = _planes(blocks[..., 16:80], 32, 2), blocks[..., :16]
    subscales, subminimums = (_rows(part).view(torch.int8) for part in (factors & 15, factors >> 4))
    return Blocks(_rows(codes), _halves(blocks, 80), subscales, -_halves(blocks, 82), subminimums)


def _q3_k(blocks: Tensor) -> Blocks:
    codes = _planes(blocks[..., 32:96], 32, 2) | _planes(blocks[..., :32], 32, 1) << 2
    subscales = _nibbles(blocks[..., 96:104], 8) | _planes(blocks[..., 104:108], 4, 2) << 4
    return Blocks(_rows(codes), _halves(blocks, 108), _rows(subscales).view(torch.int8) - 32)


def _factors_of_6_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the subscales and subminimums [r, groups] of Q4_K and Q5_K from their 12 bytes."""
    first, second, third = torch.unflatten(packed, -1, (3, 4)).unbind(-2)
    subscales = torch.cat([first & 63, (third & 15) | (first >> 6) << 4], -1)
    subminimums = torch.cat([second & 63, (third >> 4) | (second >> 6) << 4], -1)
    return _rows(subscales).view(torch.int8), _rows(subminimums).view(torch.int8)


def _q4_k(blocks: Tensor) -> Blocks:
    subscales, subminimums = _factors_of_6_bits(blocks[..., 4:16])
    codes = _nibbles(blocks[..., 16:144], 32)
    return Blocks(_rows(codes), _halves(blocks, 0), subscales, -_halves(blocks, 2), subminimums)


def _q5_k(blocks: Tensor) -> Blocks:
    subscales, subminimums = _factors_of_6_bits(blocks[..., 4:16])
    codes = _nibbles(blocks[..., 48:176], 32) | _planes(blocks[..., 16:48], 32, 1) << 4
    return Blocks(_rows(codes), _halves(blocks, 0), subscales, -_halves(blocks, 2), subminimums)


def _q6_k(blocks: Tensor) -> Blocks:
    codes = _nibbles(blocks[..., :128], 64) | _planes(blocks[..., 128:192], 32, 2) << 4
    subscales = _rows(blocks[..., 192:208]).view(torch.int8)
    return Blocks(_rows(codes), _halves(blocks, 208), subscales)


def _iq4_xs(blocks: Tensor) -> Blocks:
    low = torch.stack([blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4], -1).flatten(-2)
    high = (blocks[..., 2:4, None] >> torch.arange(0, 8, 2, dtype=torch.uint8) & 3).flatten(-2)
    subscales = _rows(low | high << 4).view(torch.int8) - 32
    return Blocks(_rows(_nibbles(blocks[..., 8:], 16)), _halves(blocks, 0), subscales)


def _mxfp4(blocks: Tensor) -> Blocks:
    return Blocks(_in_32(blocks, 1), blocks[..., 0])


_DECODERS: dict[str, Callable[[Tensor], Blocks]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _q4_0,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}


def decode(type: str, blocks: Tensor) -> Blocks:
    """Take blocks [r, blocks, bytes] uint8 of a type apart. Raises KernelError for scales that are not finite."""
    found = _DECODERS[type](blocks)
    scales = [found.scales] if found.minimums is None else [found.scales, found.minimums]
    for numbers in scales:
        damaged = numbers == 255 if type == "MXFP4" else ~numbers.isfinite()
        if damaged.any():
            row, block = damaged.nonzero()[0].tolist()
            raise KernelError(f"expected finite scales, found {float(numbers[row, block])} in row {row}, block {block}")
    return found
