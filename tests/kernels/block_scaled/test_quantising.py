"""Int4, fp8 and int8 weights that are quantised, or written from the codes of a checkpoint, on every rung, against the
definitions of the formats."""

from __future__ import annotations

import pytest
import torch
from matrices import inside_nan, randn
from torch import Tensor
from torch.nn import functional

from tests.kernels.block_scaled.forms import BF16, E2M1, F32, F64, FORMATS, Form, assert_close, by_input, filled
from tilerank.kernels import core
from tilerank.kernels.linear import linear
from tilerank.kernels.reference import weight_formats as reference
from tilerank.kernels.weight_formats.block_int8 import BlockInt8
from tilerank.kernels.weight_formats.byte_codes import BlockFormat
from tilerank.kernels.weight_formats.channel_fp8 import ChannelFp8
from tilerank.kernels.weight_formats.fp8 import Fp8
from tilerank.kernels.weight_formats.group_int8 import GroupInt8
from tilerank.kernels.weight_formats.int4 import Int4
from tilerank.kernels.weight_formats.mxfp4 import Mxfp4


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("source", [F32, BF16, torch.float16, F64])
def test_quantise(rung: str, form: Form, source: torch.dtype) -> None:
    """No value is off by more than half a step of the symmetric scale; the mean error is much smaller."""
    n, k = 100, 330
    plain = randn(n, k).to(source)
    weight = form.empty(n, k)
    weight.write(inside_nan(plain.T).T)
    error = weight.unpack().double() - plain.double()
    if isinstance(form, BlockFormat):
        largest = functional.pad(plain.double().abs(), (0, -k % form.block_k, 0, -n % form.block_n))
        by_columns = torch.unflatten(largest, 1, (-1, form.block_k))
        largest = torch.unflatten(by_columns, 0, (-1, form.block_n)).amax((1, 3))
        steps = 448 if isinstance(form, Fp8) else 127
        scale = by_input((largest / steps).repeat_interleave(form.block_n, 0)[:n], form.block_k, k)
        assert error.square().mean().sqrt() < 0.03
        if isinstance(form, BlockInt8):
            assert (error.abs() <= scale / 2 * (1 + 1e-5)).all()
            return
        assert (error.abs() <= torch.maximum(plain.double().abs() * 2.0**-4, scale * 2.0**-10) * (1 + 1e-5)).all()
        return
    group = form.group or k
    groups = torch.unflatten(functional.pad(plain.double(), (0, -k % group)), 1, (-1, group))
    if isinstance(form, ChannelFp8):
        largest = groups.abs().amax(-1, True)
        if form.group:
            covering = (groups / largest * 448).to(torch.float8_e4m3fn).double() * largest / 448
            assert error.square().sum() < 0.8 * (covering - groups).square().sum()
        scale = by_input(largest[..., 0] / 448 * (2 if form.group else 1), group, k)
        assert (error.abs() <= torch.maximum(plain.double().abs() * 2.0**-4, scale * 2.0**-10) * (1 + 1e-5)).all()
        return
    if isinstance(form, Mxfp4):
        # Between 2 and 6 a unit, values are at most a unit apart on either side of the number, above 6 at most 2.
        unit = (groups.abs().amax(-1).log2().floor() - 2).exp2()
        assert (error.abs() <= by_input(unit, 32, k) * 2).all()
        clipped = groups / unit[..., None]
        codes = (clipped.abs()[..., None] - E2M1).abs().argmin(-1)
        assert error.square().sum() < ((E2M1[codes] - clipped.abs()) * unit[..., None]).square().sum()
        return
    if isinstance(form, GroupInt8):
        assert (error.abs() <= by_input(groups.abs().amax(-1) / 254, group, k) * 1.02).all()
        return
    if form.zero_points:
        step = (groups.amax(-1).clamp(min=0) - groups.amin(-1).clamp(max=0)) / 15
    else:
        step = groups.abs().amax(-1) / 7
    covering = (groups / step[..., None]).round() * step[..., None]  # evenly spaced values up to the extremes
    plainest = (groups.abs() * (covering - groups).square()).sum()
    assert (plain.double().abs() * error.square()).sum() < plainest
    assert (error.abs() <= by_input(step, group, k) * 2).all()


@pytest.mark.parametrize("group", [32, 128])
def test_fp8_in_groups_is_quantised_to_the_same_bits_on_every_rung(rung: str, group: int) -> None:
    core.start_pool(None, 3, spin=False)
    n, k = 70, 2 * group + 37
    plain = randn(n, k) * 10.0 ** torch.linspace(-34, 36, n)[:, None]
    plain[3], plain[4, 5], plain[5, 60:], plain[6] = 0.0, torch.inf, 1.0, plain[6].abs()
    weight, importance = ChannelFp8(group).empty(n, k), randn(k).square()
    weight.write(plain, importance=importance)
    codes, scales = reference.quantise_channel_fp8(plain, group, importance)
    expected = ChannelFp8(group).empty(n, k)
    expected.write_codes(codes)
    expected.write_scales(scales)
    assert torch.equal(weight.unpack().nan_to_num(7), expected.unpack().nan_to_num(7))
    assert torch.equal(weight.scales.nan_to_num(7), expected.scales.nan_to_num(7))


def test_mxfp4_is_quantised_to_the_same_bits_on_every_rung(rung: str) -> None:
    """By hand where the exponents are those of OCP; otherwise as the reference does, whatever the magnitudes."""
    plain = randn(70, 101) * 10.0 ** torch.linspace(-44, 37, 70)[:, None]
    plain[3], plain[4, 5], plain[5, 60:], plain[6] = 0.0, torch.inf, 1.0, plain[6].abs()
    plain[7, :8] = torch.tensor([6.0, -5, 3.5, -2.5, 0.25, 0.75, 1.75, -0.0]) / 4
    plain[7, 8:32], plain[8, 32:64] = 0, -6
    weight = Mxfp4().empty(70, 101)
    weight.write(plain)
    codes, exponents = reference.quantise_mxfp4(plain)
    expected = Mxfp4().empty(70, 101)
    expected.write_codes(codes[:, :101])
    expected.write_scales(exponents)
    assert torch.equal(weight.unpack().nan_to_num(7), expected.unpack().nan_to_num(7))
    assert torch.equal(weight.scales, expected.scales)
    found = weight.unpack()
    assert (found[7, :8] * 4).tolist() == [6, -4, 4, -2, 0, 1, 2, 0] and (found[8, 32:64] == -6).all()
    assert found[4, :32].isnan().all() and not found[3].any() and (found[5, 64:96] == 1).all()


@pytest.mark.parametrize("importance", [None, torch.arange(64.0) ** 2], ids=["alike", "weighed"])
@pytest.mark.parametrize("zero_points", [False, True])
def test_quantise_is_close_to_the_best_of_many_scales(rung: str, zero_points: bool, importance: Tensor | None) -> None:
    plain = randn(16, 64)
    weight = Int4(32, zero_points).empty(16, 64)
    weight.write(plain, importance=importance)
    groups = torch.unflatten(plain, 1, (2, 32))
    weights = groups.abs() if importance is None else importance.view(2, 32)
    found = (weights * (torch.unflatten(weight.unpack(), 1, (2, 32)) - groups).square()).sum(-1)
    best = torch.full((16, 2), float("inf"))
    for scale in torch.linspace(-0.6, 0.6, 601):
        if scale == 0:
            continue
        for zero in range(16) if zero_points else (8,):
            level = (groups / scale).round().clamp(-zero, 15 - zero)
            best = torch.minimum(best, (weights * (level * scale - groups).square()).sum(-1))
    assert found.mean() < 1.1 * best.mean()


@pytest.mark.parametrize("form", [Int4(32), Int4(64, True), Int4(128), Int4(160, True)], ids=str)
def test_int4_is_quantised_to_the_same_bits_on_every_rung(rung: str, form: Int4) -> None:
    """Whatever the magnitudes; ranks of different machines could otherwise hold different weights."""
    core.start_pool(None, 3, spin=False)
    n, k = 70, 2 * form.group + 37
    plain = randn(n, k) * 10.0 ** torch.linspace(-34, 36, n)[:, None]
    plain[3], plain[4, 5], plain[5, 60:], plain[6] = 0.0, torch.inf, 1.0, plain[6].abs()
    weight, importance = form.empty(n, k), None if form.zero_points else randn(k).square()
    weight.write(plain, importance=importance)
    codes, scales, zeros = reference.quantise_int4(plain, form.group, form.zero_points, importance)
    finite = by_input(scales, form.group, k).isfinite()
    assert torch.equal((weight.codes() + 8)[finite], codes[:, :k][finite].to(torch.int8))
    expected = form.empty(n, k)
    expected.write_scales(scales)
    assert torch.equal(weight.scales.nan_to_num(7), expected.scales.nan_to_num(7))
    if form.zero_points:
        expected.write_zeros(zeros)
        assert weight.zeros is not None and expected.zeros is not None and torch.equal(weight.zeros, expected.zeros)


@pytest.mark.parametrize("form", [Int4(64), Int4(64, True), Fp8(64, 64), BlockInt8(64, 64)], ids=str)
def test_rectangles(rung: str, form: Form) -> None:
    """Rectangles written in any order give the same weight; what is not written stays zero."""
    core.start_pool(None, 3, spin=False)
    plain = randn(200, 700)
    whole, pieces = form.empty(200, 700), form.empty(200, 700)
    whole.write(plain)
    for top, bottom in ((64, 128), (128, 200), (0, 64)):
        for left, right in ((64, 640), (640, 700), (0, 64)):
            pieces.write(plain[top:bottom, left:right], top, left)
    assert torch.equal(whole.unpack(), pieces.unpack())
    part = form.empty(200, 700)
    part.write(plain[:70, :100], 64, 128)
    expected = torch.zeros(200, 700, dtype=torch.bool)
    expected[64:134, 128:228] = True
    assert not part.unpack()[~expected].any()
    x = torch.ones(3, 700, dtype=BF16)
    assert_close(linear(x, part, out_dtype=F32), x, part.unpack().double(), None, 40.0)


@pytest.mark.parametrize("form", [Int4(32, True), Fp8(32, 32), BlockInt8(32, 32)], ids=str)
def test_non_finite_and_zero_blocks(rung: str, form: Form) -> None:
    plain = torch.zeros(64, 96)
    plain[40, 70], plain[3, 1] = float("inf"), float("nan")
    weight = form.empty(64, 96)
    weight.write(plain)
    result = weight.unpack()
    assert result[40, 64:].isnan().all() and result[3, :32].isnan().all()
    assert not result[:32, 32:].any() and not result[32:, :64].any()


def test_codes_of_checkpoints_in_rectangles(rung: str) -> None:
    weight, _ = filled(Int4(32, True), 70, 130)
    again = Int4(32, True).empty(70, 130)
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (70, 130), generator=generator, dtype=torch.uint8)
    scales = (torch.randn(70, 5, generator=generator) * 0.01).to(torch.float16)
    zeros = torch.randint(0, 16, (70, 5), generator=generator, dtype=torch.uint8)
    for top, bottom in ((33, 70), (0, 33)):
        for left, right in ((77, 130), (0, 5), (5, 77)):
            again.write_codes(codes[top:bottom, left:right], top, left)
        for left, right in ((2, 5), (0, 2)):
            again.write_scales(scales[top:bottom, left:right], top, left)
            again.write_zeros(zeros[top:bottom, left:right], top, left)
    assert torch.equal(weight.unpack(), again.unpack())


@pytest.mark.parametrize("dtype", [torch.float16, BF16])
def test_scales_of_checkpoints_are_exact(rung: str, dtype: torch.dtype) -> None:
    """All scales from 2^-22, the smallest with all bits, to 255."""
    scales = (2.0 ** torch.linspace(-22, 7.99, 64) * torch.tensor([1.0, -1.0]).repeat(32)).to(dtype)
    weight = Int4(32).empty(64, 32)
    weight.write_codes(torch.full((64, 32), 9, dtype=torch.uint8))
    weight.write_scales(scales[:, None])
    assert torch.equal(weight.unpack()[:, 0], scales.float())
