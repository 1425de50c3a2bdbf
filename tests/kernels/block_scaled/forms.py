"""Formats with a scale for a block or a group of inputs, for tests, and weights of random codes in them."""

from __future__ import annotations

import torch
from torch import Tensor

from tilerank.kernels.weight_formats.block_int8 import BlockInt8
from tilerank.kernels.weight_formats.byte_codes import BlockFormat, ByteCodesWeight
from tilerank.kernels.weight_formats.channel_fp8 import ChannelFp8
from tilerank.kernels.weight_formats.fp8 import Fp8
from tilerank.kernels.weight_formats.group_int8 import GroupInt8
from tilerank.kernels.weight_formats.int4 import Int4
from tilerank.kernels.weight_formats.mxfp4 import Mxfp4
from tilerank.kernels.weight_formats.output_scaled import OutputScaledFormat, OutputScaledWeight

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64

LONG_GROUPS: list[Form] = [
    Int4(160),
    Int4(448, True),
    Fp8(32, 800),
    BlockInt8(32, 800),
]  # longer than the pieces that are expanded at a time
FORMATS: list[Form] = [Int4(32), Int4(64, True), Int4(128), Int4(128, True), Fp8(32, 32), Fp8(64, 96), Fp8(128, 128)]
FORMATS += [BlockInt8(32, 32), BlockInt8(64, 96), BlockInt8(128, 128)]
FORMATS += [Int4(0), GroupInt8(32, True), GroupInt8(128), GroupInt8(0), ChannelFp8(), ChannelFp8(128), Mxfp4()]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=F64)
Weight = OutputScaledWeight | ByteCodesWeight
Form = OutputScaledFormat | Fp8 | BlockInt8


def filled(form: Form, n: int, k: int, seed: int = 0) -> tuple[Weight, Tensor]:
    """Return a weight of random codes, and its values [n, k] in float64, by definition of the format."""
    generator = torch.Generator().manual_seed(seed)
    weight = form.empty(n, k)
    if isinstance(weight, OutputScaledWeight) and isinstance(form, OutputScaledFormat):
        if isinstance(form, Mxfp4):
            codes = torch.randint(0, 16, (n, k), generator=generator, dtype=torch.uint8)
            exponents = torch.randint(115, 125, (n, -(-k // 32)), generator=generator, dtype=torch.uint8)
            weight.write_codes(codes)
            weight.write_scales(exponents)
            values = E2M1[codes.int() & 7] * (1 - 2.0 * (codes > 7))
            return weight, values * by_input((exponents.double() - 127).exp2(), 32, k)
        group = form.group or k
        groups, count = -(-k // group), 16 if isinstance(form, Int4) else 256
        codes = torch.randint(0, count, (n, k), generator=generator, dtype=torch.uint8)
        scales = torch.randn(n, groups, generator=generator) * 0.01
        scales = scales if isinstance(form, ChannelFp8) else scales.to(torch.float16)
        zeros = torch.full((n, groups), count // 2, dtype=torch.uint8)
        if isinstance(form, ChannelFp8):
            codes[(codes & 127) == 127] = 3  # no NaN; a subnormal
            weight.write_codes(codes.view(torch.float8_e4m3fn))
            weight.write_scales(scales)
            return weight, codes.view(torch.float8_e4m3fn).double() * by_input(scales, group, k)
        weight.write_codes(codes)
        weight.write_scales(scales)
        if form.zero_points:
            zeros = torch.randint(0, count, (n, groups), generator=generator, dtype=torch.uint8)
            weight.write_zeros(zeros)
        values = (codes.double() - by_input(zeros, group, k)) * by_input(scales, group, k)
        return weight, values
    assert isinstance(weight, ByteCodesWeight) and isinstance(form, BlockFormat)
    bits = torch.randint(0, 256, (n, k), generator=generator, dtype=torch.uint8)
    if isinstance(form, Fp8):
        bits[(bits & 127) == 127] = 3  # no NaN; a subnormal
    codes8 = bits.view(form.codes_dtype)
    scale_inv = torch.rand(-(-n // form.block_n), -(-k // form.block_k), generator=generator)
    weight.write_codes(codes8)
    weight.write_scales(scale_inv)
    return weight, codes8.double() * by_input(scale_inv.repeat_interleave(form.block_n, 0)[:n], form.block_k, k)


def by_input(array: Tensor, group: int, k: int) -> Tensor:
    return array.double().repeat_interleave(group, 1)[:, :k]


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of the rows as float64, by definition of the format."""
    largest = x.float().abs().amax(1, keepdim=True).clamp(min=2.0**-100)
    ends = torch.full_like(largest, 127)  # torch rounds number / tensor twice
    inverse, scale = ends / largest, largest / ends
    return (x.double() * inverse.double()).round(), scale.double()  # ties to even


def assert_close(result: Tensor, x: Tensor, values: Tensor, bias: Tensor | None = None, magnitude: float = 1.0) -> None:
    """Check the error bound of sums of k products, with codes up to `magnitude` times the values."""
    x = x.double()
    bias = torch.zeros(values.shape[0]).double() if bias is None else bias.double()
    exact = x @ values.T + bias
    bound = (2 * x.shape[-1] + 8) * 2.0**-24 * (magnitude * (x.abs() @ values.abs().T) + bias.abs() + 1e-3)
    if result.dtype is BF16:
        bound = bound * (1 + 2.0**-8) + exact.abs() * 2.0**-8
    excess = (result.double() - exact).abs() - bound
    assert excess.max() <= 0, f"{excess.max()} over the bound"
