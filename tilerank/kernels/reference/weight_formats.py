"""Products and quantisation of the weight formats in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .ops import quantise_rows


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x[m, k] @ weight[n, k].T in fp32."""
    weight32 = weight.float()
    rows = x.float()
    out = torch.empty(rows.shape[0], weight.shape[0])
    for row, result in zip(rows, out, strict=True):
        # One product per row: a GEMM library chooses its blocking, hence its order of summation, by the batch size.
        torch.mv(weight32, row.clone(), out=result)
    return out


def product_int8(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """Return quantised x[m, k] @ (codes[n, k] * scales[n]).T: exact sums, then one scaling in fp32."""
    rows, row_scales = quantise_rows(x.float())
    sums = rows.double() @ codes.double().T  # below 2^53, hence exact in any order
    return (sums + 0.0).float() * (row_scales[:, None] * scales)  # + 0: integers have no negative zero


def quantise_int4(x: Tensor, group: int, zero_points: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise x[r, k] float32 in groups of inputs: x ~ (code - zero) * scale.

    Returns codes [r, k rounded up to groups] uint8, scales [r, groups] float32, which times 256 are exact in float16,
    and zeros [r, groups] uint8. Nine scales (and zeros) near the one that just covers the extreme values are tried,
    each refined to the best for its codes; the one with the least squared error is used.
    """
    r, k = x.shape
    x = F.pad(x, (0, -k % group)).view(r, -(-k // group), group)
    least, most = x.amin(-1).clamp(max=0.0), x.amax(-1).clamp(min=0.0)
    gain = torch.zeros(x.shape[:2])
    scales, zeros = torch.zeros(x.shape[:2]), torch.full(x.shape[:2], 8.0)
    for step in range(-3, 6):
        if zero_points:
            inverse = (15 + 0.4 * step) / (most - least)
            zero = (-least * inverse - 0.2 * step).round().clamp(0, 15)
        else:
            inverse = -(8 + 0.3 * step) / torch.where(-least > most, least, most)
            zero = torch.full_like(least, 8.0)
        levels = torch.clamp((x * inverse[..., None]).round(), -zero[..., None], 15 - zero[..., None])
        products, squares = (x * levels).sum(-1), (levels * levels).sum(-1)
        better = (squares > 0) & (products * products > gain * squares)
        gain = torch.where(better, products * products / squares, gain)
        scales, zeros = torch.where(better, products / squares, scales), torch.where(better, zero, zeros)
    scales = (scales.clamp(-65504 / 256, 65504 / 256) * 256).to(torch.float16).float() / 256
    levels = torch.where(scales[..., None] == 0, 0.0, x / scales[..., None]).round()
    codes = torch.clamp(levels + zeros[..., None], 0, 15)
    finite = x.isfinite().all(-1)
    codes = torch.where(finite[..., None], codes, 8.0)
    return codes.flatten(1).to(torch.uint8), torch.where(finite, scales, float("nan")), zeros.to(torch.uint8)


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
