"""Int4, fp8 and int8 weights with bf16 activations, and experts of them, on every rung, against float64 arithmetic on
dequantised weights."""

from __future__ import annotations

import pytest
import torch
from matrices import inside_nan, randn
from torch import Tensor
from torch.nn import functional

from tilerank.kernels import core
from tilerank.kernels.errors import KernelError
from tilerank.kernels.latent import head_linear
from tilerank.kernels.linear import linear
from tilerank.kernels.moe import moe, softmax_top_k
from tilerank.kernels.packed_experts import PackedExperts
from tilerank.kernels.reference import weight_formats as reference
from tilerank.kernels.weight_formats.block_int8 import BlockInt8
from tilerank.kernels.weight_formats.byte_codes import BlockFormat, ByteCodesWeight
from tilerank.kernels.weight_formats.channel_fp8 import ChannelFp8
from tilerank.kernels.weight_formats.fp8 import Fp8
from tilerank.kernels.weight_formats.group_int8 import GroupInt8
from tilerank.kernels.weight_formats.int4 import Int4
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
FORMATS += [Int4(0), GroupInt8(32, True), GroupInt8(128), GroupInt8(0), ChannelFp8(), ChannelFp8(128)]
Weight = OutputScaledWeight | ByteCodesWeight
Form = OutputScaledFormat | Fp8 | BlockInt8


def filled(form: Form, n: int, k: int, seed: int = 0) -> tuple[Weight, Tensor]:
    """Return a weight of random codes, and its values [n, k] in float64, by definition of the format."""
    generator = torch.Generator().manual_seed(seed)
    weight = form.empty(n, k)
    if isinstance(weight, OutputScaledWeight) and isinstance(form, OutputScaledFormat):
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


@pytest.mark.parametrize("form", FORMATS + LONG_GROUPS, ids=str)
@pytest.mark.parametrize("n, k", [(1, 1), (33, 130), (72, 544), (130, 1100)])
def test_product(rung: str, form: Form, n: int, k: int) -> None:
    core.start_pool(None, 3, spin=False)
    weight, values = filled(form, n, k)
    assert torch.equal(weight.unpack().double(), values.float().double())
    bias = randn(n, seed=1)
    for m in (1, 2, 3, 5, 8, 9, 16, 17, 28, 29, 40, 130) if rung != "reference" else (1, 3):
        x = inside_nan(randn(m, k, seed=2).to(BF16))
        # Sums before the zero is subtracted are larger than the result, up to about 8 times.
        magnitude = 40.0 if isinstance(form, OutputScaledFormat) and form.zero_points else 1.0
        assert_close(linear(x, weight, out_dtype=F32), x, values, None, magnitude)
        assert_close(linear(x, weight, bias), x, values, bias, magnitude)


@pytest.mark.parametrize("form", [Int4(32), Int4(128, True), Fp8(), BlockInt8()], ids=str)
def test_product_larger_than_every_block(form: Form) -> None:
    """More rows than two stripes (384) and more outputs than a band (384); then few rows and a large weight."""
    magnitude = 40.0 if isinstance(form, Int4) and form.zero_points else 1.0
    weight, values = filled(form, 450, 600)
    x = randn(850, 600).to(BF16)
    results = []
    for threads in (1, 2, 4):
        core.start_pool(None, threads, spin=False)
        results.append(linear(x, weight, out_dtype=F32))
    assert_close(results[0], x, values, None, magnitude)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2]), "depends on the threads"
    core.start_pool(None, 1, spin=False)
    weight, values = filled(form, 4300, 2100)
    for m in (1, 16):
        assert_close(linear(x[:m].repeat(1, 4)[:, :2100], weight, out_dtype=F32), x[:m].repeat(1, 4)[:, :2100], values,
                     None, magnitude)  # fmt: skip


@pytest.mark.parametrize(
    "form",
    [Int4(32), Int4(64, True), Int4(160), Fp8(64, 96), BlockInt8(64, 96), GroupInt8(64, True), ChannelFp8()],
    ids=str,
)
@pytest.mark.parametrize("n, k", [(40, 70), (70, 1344)])
def test_a_row_has_the_same_bits_in_every_batch(rung: str, form: Form, n: int, k: int) -> None:
    counts = (2, 3, 4, 7, 8, 9, 14, 15, 16, 17, 33, 70, 253, 300) if rung != "reference" else (2, 20)
    x, (weight, _), bias = randn(counts[-1], k).to(BF16), filled(form, n, k), randn(n, seed=2)
    x[1] *= 2.0**125  # sums overflow equally, whatever the other rows hold
    alone = torch.cat([linear(row[None], weight, bias) for row in x])
    for m in counts:
        torch.testing.assert_close(linear(x[:m], weight, bias), alone[:m], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(linear(x[counts[-1] // 2 :], weight, bias), alone[counts[-1] // 2 :])


@pytest.mark.parametrize("form", [Int4(64, True), Fp8(64, 64), BlockInt8(64, 64), GroupInt8(64), ChannelFp8()], ids=str)
def test_epilogue(rung: str, form: Form) -> None:
    n, k = 192, 160
    weight, values = filled(form, n, k)
    bias = randn(n, seed=1)
    for m in (3, 24):
        x = (randn(m, k, seed=2) / values.square().sum(1).max().sqrt()).to(BF16)
        sums = (x.double() @ values.T + bias.double()).view(m, -1, 2, 32)
        exact = (functional.silu(sums[:, :, 0]) * sums[:, :, 1]).flatten(1)
        result = linear(x, weight, bias, activation="silu_mul", out_dtype=F32)
        torch.testing.assert_close(result.double(), exact, rtol=1e-4, atol=1e-4)


def test_all_fp8_codes(rung: str) -> None:
    """Every code times 1 is exact, subnormals included; a NaN affects only its own output."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    weight = Fp8(32, 32).empty(256, 64)
    weight.write_codes(codes[:, None].clone(), 0, 5)
    weight.write_scales(torch.ones(8, 2))
    for m in (1, 3, 8, 9, 16, 20):
        x = torch.zeros(m, 64, dtype=BF16)
        x[:, 5] = 1
        result = linear(x, weight, out_dtype=F32)
        torch.testing.assert_close(result, codes.float().expand(m, -1), rtol=0, atol=0, equal_nan=True)
        assert result[0].isnan().sum() == 2
    assert torch.equal(weight.unpack()[:, 5].nan_to_num(7), codes.float().nan_to_num(7))


def test_all_int8_codes(rung: str) -> None:
    """Every code times 1 is exact, -128 included."""
    codes = torch.arange(-128, 128, dtype=torch.int8)
    weight = BlockInt8(32, 32).empty(256, 64)
    weight.write_codes(codes[:, None].clone(), 0, 5)
    weight.write_scales(torch.ones(8, 2))
    for m in (1, 3, 8, 9, 16, 20):
        x = torch.zeros(m, 64, dtype=BF16)
        x[:, 5] = 1
        assert torch.equal(linear(x, weight, out_dtype=F32), codes.float().expand(m, -1))
    assert torch.equal(weight.unpack()[:, 5], codes.float())


def test_all_int4_codes_and_zeros(rung: str) -> None:
    weight = Int4(32, True).empty(256, 32)
    code, zero = torch.arange(256) % 16, torch.arange(256) // 16
    weight.write_codes(code.to(torch.uint8)[:, None].clone(), 0, 3)
    weight.write_zeros(zero.to(torch.uint8)[:, None])
    weight.write_scales(torch.full((256, 1), 0.5, dtype=BF16))
    for m in (1, 3, 8, 9, 16, 20):
        x = torch.zeros(m, 32, dtype=BF16)
        x[:, 3] = 1
        assert torch.equal(linear(x, weight, out_dtype=F32), ((code - zero) * 0.5).expand(m, -1))


@pytest.mark.parametrize("form", [Int4(32), Int4(32, zero_points=True), Fp8(32, 32), BlockInt8(32, 32)], ids=str)
def test_writing_nothing_changes_nothing(rung: str, form: Form) -> None:
    weight = form.empty(33, 64)
    weight.write(torch.ones(33, 64))
    before = weight.unpack()
    weight.write(torch.zeros(0, 64))
    weight.write(torch.zeros(33, 0), 0, 32)
    assert torch.equal(weight.unpack(), before) and before.min() > 0.9


@pytest.mark.parametrize("form", [Int4(32), Fp8(32, 32), BlockInt8(32, 32)], ids=str)
@pytest.mark.parametrize("m", [3, 8, 20])
def test_infinite_and_nan_inputs_stay_in_their_row(rung: str, form: Form, m: int) -> None:
    weight = form.empty(33, 64)
    weight.write(torch.ones(33, 64))
    x = torch.ones(m, 64, dtype=BF16)
    x[1, 5], x[m - 1, 7] = float("inf"), float("nan")
    result = linear(x, weight, out_dtype=F32)
    rest = [r for r in range(m) if r not in (1, m - 1)]
    assert torch.allclose(result[rest], torch.tensor(64.0), rtol=1e-2)
    assert result[1].eq(float("inf")).all() and result[m - 1].isnan().all()


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
    weight = ChannelFp8(group).empty(n, k)
    weight.write(plain)
    codes, scales = reference.quantise_channel_fp8(plain, group)
    expected = ChannelFp8(group).empty(n, k)
    expected.write_codes(codes)
    expected.write_scales(scales)
    assert torch.equal(weight.unpack().nan_to_num(7), expected.unpack().nan_to_num(7))
    assert torch.equal(weight.scales.nan_to_num(7), expected.scales.nan_to_num(7))


@pytest.mark.parametrize("zero_points", [False, True])
def test_quantise_is_close_to_the_best_of_many_scales(rung: str, zero_points: bool) -> None:
    plain = randn(16, 64)
    weight = Int4(32, zero_points).empty(16, 64)
    weight.write(plain)
    groups = torch.unflatten(plain, 1, (2, 32))
    found = (groups.abs() * (torch.unflatten(weight.unpack(), 1, (2, 32)) - groups).square()).sum(-1)
    best = torch.full((16, 2), float("inf"))
    for scale in torch.linspace(-0.6, 0.6, 601):
        if scale == 0:
            continue
        for zero in range(16) if zero_points else (8,):
            level = (groups / scale).round().clamp(-zero, 15 - zero)
            best = torch.minimum(best, (groups.abs() * (level * scale - groups).square()).sum(-1))
    assert found.mean() < 1.1 * best.mean()


@pytest.mark.parametrize("form", [Int4(32), Int4(64, True), Int4(128), Int4(160, True)], ids=str)
def test_int4_is_quantised_to_the_same_bits_on_every_rung(rung: str, form: Int4) -> None:
    """Whatever the magnitudes; ranks of different machines could otherwise hold different weights."""
    core.start_pool(None, 3, spin=False)
    n, k = 70, 2 * form.group + 37
    plain = randn(n, k) * 10.0 ** torch.linspace(-34, 36, n)[:, None]
    plain[3], plain[4, 5], plain[5, 60:], plain[6] = 0.0, torch.inf, 1.0, plain[6].abs()
    weight = form.empty(n, k)
    weight.write(plain)
    codes, scales, zeros = reference.quantise_int4(plain, form.group, form.zero_points)
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


@pytest.mark.parametrize(
    "form",
    [Int4(32), Int4(64, True), Fp8(32, 64), BlockInt8(32, 64), GroupInt8(32), ChannelFp8(), ChannelFp8(64)],
    ids=str,
)
@pytest.mark.parametrize("hidden, width", [(70, 40), (192, 96)])
def test_experts(rung: str, form: Form, hidden: int, width: int) -> None:
    core.start_pool(None, 3, spin=False)
    experts = 5
    gate_up = PackedExperts.empty(experts, width, hidden, form, parts=2)
    down = PackedExperts.empty(experts, hidden, width, form)
    for expert in range(experts):
        for part in (0, 1):
            gate_up.write(randn(width, hidden, seed=expert * 2 + part) / 8, expert, part=part)
        down.write(randn(hidden, width, seed=100 + expert) / 8, expert)
    for m in (1, 24, 90) if rung != "reference" else (1, 5):
        x = randn(m, hidden, seed=7).to(BF16)
        ids, weights = softmax_top_k(randn(m, experts, seed=m), 3, renormalize=True)
        if m == 90:
            ids[:, 0] = 4  # one expert with many rows
        result = moe(x, gate_up, down, ids, weights)
        exact = torch.zeros(m, hidden, dtype=F64)
        for token in range(m):
            for expert, weight in zip(ids[token].tolist(), weights[token].double(), strict=True):
                gate, up = (gate_up.unpack(expert, part).double() @ x[token].double() for part in (0, 1))
                middle = (functional.silu(gate) * up).to(BF16).double()
                exact[token] += weight * (down.unpack(expert).double() @ middle)
        # A middle value that rounds the other way is off by half a unit of bf16.
        torch.testing.assert_close(result.double(), exact, rtol=2.0**-7, atol=2e-3)
        alone = torch.cat([moe(x[i : i + 1], gate_up, down, ids[i : i + 1], weights[i : i + 1]) for i in range(m)])
        assert torch.equal(result, alone), "depends on the batch"


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: Int4(48).empty(32, 32), "group: expected a multiple of 32, found 48"),
        (lambda: Fp8(16, 32).empty(32, 32), "block_n: expected a multiple of 32, found 16"),
        (lambda: Int4(32).empty(0, 32), "positive sizes"),
        (lambda: Int4(32).empty(32, 64).write(torch.ones(1, 8), 0, 8), "starts at a scale block"),
        (lambda: Fp8(32, 32).empty(64, 64).write(torch.ones(8, 8), 8), "starts at a scale block"),
        (lambda: Int4(32).empty(32, 64).write(torch.ones(8, 65)), r"inside \[32, 64\], found \[8, 65\]"),
        (lambda: Int4(32).empty(32, 64).write_zeros(torch.ones(8, 2, dtype=torch.uint8)), "without"),
        (lambda: Int4(32).empty(32, 64).write_scales(torch.full((8, 2), 300.0)), "magnitudes up to 255.* found 300"),
        (lambda: Int4(32).empty(32, 64).write_codes(torch.ones(8, 2)), "expected uint8, found torch.float32"),
        (lambda: Fp8().empty(32, 64).write_codes(torch.ones(8, 2)), "expected float8_e4m3fn, found torch.float32"),
        (lambda: Fp8().empty(32, 64).write_scales(torch.ones(2, 1)), r"inside \[1, 1\], found \[2, 1\]"),
        (lambda: Fp8().empty(32, 64).embedding(torch.tensor([1])), "embedding table, found Fp8"),
        (lambda: BlockInt8().empty(32, 64).write_codes(torch.ones(8, 2)), "expected int8, found torch.float32"),
        (lambda: BlockInt8(32, 48).empty(32, 64), "BlockInt8: block_k: expected a multiple of 32, found 48"),
        (lambda: linear(torch.ones(1, 64), Int4(32).empty(32, 64)), "x: expected dtype bfloat16, found float32"),
    ],
)
def test_wrong_arguments(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(KernelError, match=message):
        call()


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_nbytes_is_what_is_allocated(rung: str, form: Form) -> None:
    weight = form.empty(512, 512)  # every array fills whole cache lines
    held = [weight.values, weight.scales, getattr(weight, "zeros", None)]
    assert form.nbytes(512, 512) == sum(array.nbytes for array in held if array is not None)
    if rung != "reference" and form == Int4(128):
        assert form.nbytes(512, 512) == 512 * 512 // 2 + 512 * 4 * 2


@pytest.mark.parametrize("form", [Int4(32, True), Int4(0), GroupInt8(32, True), ChannelFp8()], ids=str)
@pytest.mark.parametrize("n, k", [(128, 512), (40, 64)])
def test_a_matrix_for_every_head(rung: str, form: Form, n: int, k: int) -> None:
    """As latent attention holds the values of kv_b_proj."""
    weight = PackedExperts.empty(3, n, k, form)
    for head in range(3):
        weight.write(randn(n, k, seed=head), head)
    for m in (1, 3, 40) if rung != "reference" else (1, 3):
        x = randn(m, 3, k, seed=7).to(BF16)
        found = head_linear(x, weight)
        for head in range(3):
            assert_close(found[:, head], x[:, head], weight.unpack(head).double(), None, 40.0)
