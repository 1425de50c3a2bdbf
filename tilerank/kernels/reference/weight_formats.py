"""Products and quantisation of the weight formats in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .ops import quantise_rows

INT8_GROUP = 64
"""Inputs of x that share a scale in products with int8 weights."""


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x[m, k] @ weight[n, k].T in fp32."""
    weight32 = weight.float()
    rows = x.float()
    out = torch.empty(rows.shape[0], weight.shape[0])
    for row, result in zip(rows, out, strict=True):
        # One product per row: a GEMM library chooses its blocking, hence its order of summation, by the batch size.
        torch.mv(weight32, row.clone(), out=result)
    return out


def product_token_int8(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """Return quantised x[m, k] @ (codes[n, k] * scales[n]).T: exact sums, then one scaling in fp32."""
    rows, row_scales = quantise_rows(x.float())
    sums = rows.double() @ codes.double().T  # below 2^53, hence exact in any order
    return (sums + 0.0).float() * (row_scales[:, None] * scales)  # + 0: integers have no negative zero


def product_int8(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """Return x[m, k], quantised in groups of 64 inputs, @ (codes[n, k] * scales[n]).T.

    The exact sums of the groups are multiplied with the scales of x and added in fp32, group by group, then scaled.
    """
    m, k = x.shape
    rows, row_scales = quantise_rows(F.pad(x.float(), (0, -k % INT8_GROUP)).view(-1, INT8_GROUP))
    groups, by_group = rows.double().view(m, -1, INT8_GROUP), row_scales.view(m, -1, 1)
    total = torch.zeros(m, codes.shape[0])
    for group, of_codes in enumerate(torch.split(codes.double(), INT8_GROUP, 1)):
        sums = groups[:, group, : of_codes.shape[1]] @ of_codes.T
        total = fma(sums, by_group[:, group], total)
    return total * scales


def product_groups(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    group: int,
    step: int,
    minimums: Tensor | None = None,
) -> Tensor:
    """Return x[m, k], quantised in steps of inputs, @ ((codes[n, k] - zeros) * scales + minimums).T.

    scales, zeros, minimums: [n, groups]. The exact sums of a step are multiplied with the scale of x, then with that of
    the weight's group, and added in fp32, step by step; after each, so is the sum of the codes of x with the minimum.
    """
    m, k = x.shape
    rows, row_scales = quantise_rows(F.pad(x.float(), (0, -k % step)).view(-1, step))
    steps, by_step = rows.double().view(m, -1, step), row_scales.view(m, -1, 1)
    total = torch.zeros(m, codes.shape[0])
    for i, of_codes in enumerate(torch.split(codes.double(), step, 1)):
        at = i * step // group
        numbers = of_codes if zeros is None else of_codes - zeros[:, at, None]
        sums = (steps[:, i, : numbers.shape[1]] @ numbers.T).float()
        total = fma(sums * by_step[:, i], scales[:, at], total)
        if minimums is not None:
            total = fma(steps[:, i].sum(1, keepdim=True).float() * by_step[:, i], minimums[:, at], total)
    return total


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return a * b + c, rounded once to float32; a * b must be exact in float64.

    The sum in float64 is rounded to odd where it is not exact, so that rounding it again is right.
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    rest = total - product
    error = (product - (total - rest)) + (addend - rest)  # Knuth's two-sum
    even = total.view(torch.int64) % 2 == 0
    towards = torch.where(error > 0, torch.inf, -torch.inf).double()
    return torch.where((error != 0) & error.isfinite() & even, total.nextafter(towards), total).float()


def quantise_int4(
    x: Tensor, group: int, zero_points: bool, importance: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise x[r, k] float32 in groups of inputs: x ~ (code - zero) * scale.

    Returns codes [r, k rounded up to groups] uint8, scales [r, groups] float32, which times 256 are exact in float16,
    and zeros [r, groups] uint8. Nine scales (and zeros) near the one that just covers the extreme values are tried,
    each refined to the best for its codes; the one with the least sum of w (x - value)^2 is used. w is `importance`,
    [k] float32, or without it |x|: plain squares clip large weights, which shrinks the sums that they decide.
    """
    r, k = x.shape
    x = F.pad(x, (0, -k % group)).view(r, -(-k // group), group)
    finite = x.isfinite().all(-1)
    x = torch.where(finite[..., None], x, 0.0)
    least, most = x.amin(-1).clamp(max=0.0), x.amax(-1).clamp(min=0.0)
    largest = torch.maximum(-least, most)
    is_zero = largest < 1e-30
    unit = torch.where(is_zero, 1.0, largest)
    relative = torch.where(is_zero[..., None], 0.0, x / unit[..., None])
    weights = relative.abs() if importance is None else _by_group(importance, group)
    weighted = weights * relative
    first, last = least / unit, most / unit
    gain, scales, zeros = torch.zeros(x.shape[:2]), torch.zeros(x.shape[:2]), torch.full(x.shape[:2], 8.0)
    for step in range(-3, 6):
        if zero_points:
            extra = step / 2
            inverse = torch.full_like(first, 15 + extra) / (last - first)
            zero = (-first * inverse - extra / 2).round().clamp(0, 15)
        else:
            inverse = torch.where(-least > most, 8 + step / 4, -8 - step / 4)
            zero = torch.full_like(first, 8.0)
        levels = torch.clamp((relative * inverse[..., None]).round(), -zero[..., None], 15 - zero[..., None])
        found = _ordered_sum(weighted * levels)
        norm = _ordered_sum(weights * (levels * levels))
        better = (norm > 0) & (found * found > gain * norm)
        gain = torch.where(better, found * found / norm, gain)
        scales, zeros = torch.where(better, found / norm, scales), torch.where(better, zero, zeros)
    scales = ((scales * unit).clamp(-65504 / 256, 65504 / 256) * 256).to(torch.float16).float() / 256
    inverse = torch.where(scales == 0, 0.0, torch.ones_like(scales) / scales)
    levels = torch.clamp((x * inverse[..., None]).round(), -zeros[..., None], 15 - zeros[..., None])
    codes = (levels + zeros[..., None]).flatten(1)
    return codes.to(torch.uint8), torch.where(finite, scales, torch.nan), zeros.to(torch.uint8)


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""The values of the codes of E2M1."""


def powers_of_two(exponents: Tensor) -> Tensor:
    """Return 2^(e - 127) of exponents uint8 (E8M0), NaN for 255."""
    bits = exponents.int()
    powers = torch.where(bits == 0, 2.0**-127, (bits << 23).view(torch.float32))
    return torch.where(bits == 255, torch.nan, powers)


def quantise_mxfp4(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise rows[r, k] float32 in blocks of 32 inputs: x ~ E2M1[code] * 2^(e - 127).

    Returns codes [r, k rounded up to blocks] uint8 and exponents [r, blocks] uint8. Of the exponent that OCP gives, by
    which the largest magnitude of a block is from 4 to below 8 and one from 6 on is clipped to 6, and of the next one,
    that with the smaller sum of squared errors is used. A block with an infinity or NaN has the exponent 255.
    """
    r, k = rows.shape
    x = F.pad(rows, (0, -k % 32)).view(r, -(-k // 32), 32)
    finite = x.isfinite().all(-1)
    x = torch.where(finite[..., None], x, 0.0)
    least = (x.abs().amax(-1).view(torch.int32) >> 23) - 2  # biased; the largest is below 8 * 2^least
    best, codes = torch.full_like(least, 255), torch.zeros_like(x, dtype=torch.uint8)
    error = torch.full(least.shape, torch.inf)
    for step in (0, 1):
        exponents = (least + step).clamp(min=0)
        steps = x * powers_of_two((254 - exponents).to(torch.uint8))[..., None]
        found = _e2m1_codes(steps)
        difference = steps - E2M1[found.int()]
        squares = _ordered_sum(difference * difference) * 4**step  # in units of the first exponent's scale
        better = finite & (squares < error)
        error, best = torch.where(better, squares, error), torch.where(better, exponents, best)
        codes = torch.where(better[..., None], found, codes)
    return codes.flatten(1), best.to(torch.uint8)


def _e2m1_codes(x: Tensor) -> Tensor:
    """Return the codes of the nearest values, of two equally near that with the even code; magnitudes above 6 are 6."""
    magnitude = x.abs().clamp(max=6)
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    rounded = (magnitude / step).round() * step
    code = torch.searchsorted(E2M1[:8], rounded.contiguous())
    return (code + 8 * x.signbit()).to(torch.uint8)


def _by_group(importance: Tensor, group: int) -> Tensor:
    """Return the importance of columns as [groups, group], with zeros in columns that only pad."""
    return F.pad(importance, (0, -len(importance) % group)).view(-1, group)


def _ordered_sum(x: Tensor) -> Tensor:
    """Return the sums of x[.., n] in the order of csrc/block_scaled/pack_block_scaled.cpp: 16 sums of every 16th
    number, then their halves."""
    parts = torch.zeros(*x.shape[:-1], 16)
    for piece in torch.unflatten(F.pad(x, (0, -x.shape[-1] % 16)), -1, (-1, 16)).unbind(-2):
        parts = parts + piece
    while parts.shape[-1] > 1:
        half = parts.shape[-1] // 2
        parts = parts[..., :half] + parts[..., half:]
    return parts[..., 0]


def quantise_channel_fp8(x: Tensor, group: int, importance: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantise x[r, k] float32 in groups of inputs: x ~ code * scale.

    Returns codes [r, k] float8_e4m3fn and scales [r, groups] float32. The largest magnitude becomes 448 / (1 + i / 16),
    for the i from 0 to 15 with the least sum of importance * error^2, in which codes below 2^-6 count as if they had
    all their bits. importance: [k] float32, 1 by default.
    """
    r, k = x.shape
    of_columns = _by_group(torch.ones(k) if importance is None else importance, group)
    x = F.pad(x, (0, -k % group)).view(r, -(-k // group), group)
    finite = x.isfinite().all(-1)
    x = torch.where(finite[..., None], x, 0.0)
    largest = x.abs().amax(-1)
    is_zero = largest < 1e-30
    relative = torch.where(is_zero[..., None], 0.0, x / torch.where(is_zero, 1.0, largest)[..., None])
    least, best = torch.full_like(largest, torch.inf), torch.full_like(largest, 448)
    for step in range(16):
        wider = torch.full_like(largest, 1 + step / 16)
        factor = torch.full_like(largest, 448) / wider
        scaled = relative * factor[..., None]
        split = scaled * 1048577.0  # Veltkamp: of 24 bits, the upper 4 remain
        errors = (split - (split - scaled)) - scaled
        error = _ordered_sum(of_columns * (errors * errors)) * (wider * wider)
        best, least = torch.where(error < least, factor, best), torch.minimum(error, least)
    codes = (relative * best[..., None]).flatten(1)[:, :k].to(torch.float8_e4m3fn)
    return codes, torch.where(finite, torch.where(is_zero, 0.0, largest / best), torch.nan)


def quantise_fp8(x: Tensor, block_n: int, block_k: int) -> tuple[Tensor, Tensor]:
    """Quantise x[r, k] float32 in blocks of block_n x block_k: x ~ code * scale.

    Returns codes [r, k] float8_e4m3fn and scales [row blocks, column blocks].
    """
    steps, scales = _in_blocks(x, block_n, block_k, 448)
    return steps.to(torch.float8_e4m3fn), scales


def quantise_block_int8(x: Tensor, block_n: int, block_k: int) -> tuple[Tensor, Tensor]:
    """Quantise as `quantise_fp8`, to codes [r, k] int8 from -127 to 127."""
    steps, scales = _in_blocks(x, block_n, block_k, 127)
    return steps.round().to(torch.int8), scales


def _in_blocks(x: Tensor, block_n: int, block_k: int, most: int) -> tuple[Tensor, Tensor]:
    """Return x / scale, [r, k] from -most to most, and the scales that map the largest magnitude of a block to `most`.

    A block with an infinity or NaN becomes zeros with a scale of NaN; one too small to divide by becomes zeros.
    """
    r, k = x.shape
    padded = F.pad(x, (0, -k % block_k, 0, -r % block_n))
    padded = padded.view(-(-r // block_n), block_n, -(-k // block_k), block_k)
    largest = padded.abs().amax((1, 3))
    finite = largest.isfinite()
    inverse = torch.where(finite & (largest > 1e-35), most / largest, 0.0)
    steps = torch.where(finite[:, None, :, None], padded * inverse[:, None, :, None], 0.0).clamp(-most, most)
    return steps.flatten(0, 1).flatten(1)[:r, :k], torch.where(finite, largest / most, float("nan"))
