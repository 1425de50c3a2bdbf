"""Int4, fp8 and int8 weights with bf16 activations, and experts of them, on every rung, against float64 arithmetic on
dequantised weights."""

from __future__ import annotations

import pytest
import torch
from matrices import inside_nan, randn
from torch.nn import functional

from tests.kernels.block_scaled.forms import BF16, E2M1, F32, F64, FORMATS, LONG_GROUPS, Form, assert_close, filled
from tilerank.kernels import core
from tilerank.kernels.errors import KernelError
from tilerank.kernels.latent import head_linear
from tilerank.kernels.linear import linear
from tilerank.kernels.moe import moe, softmax_top_k
from tilerank.kernels.packed_experts import PackedExperts
from tilerank.kernels.weight_formats.block_int8 import BlockInt8
from tilerank.kernels.weight_formats.channel_fp8 import ChannelFp8
from tilerank.kernels.weight_formats.fp8 import Fp8
from tilerank.kernels.weight_formats.group_int8 import GroupInt8
from tilerank.kernels.weight_formats.int4 import Int4
from tilerank.kernels.weight_formats.mxfp4 import Mxfp4
from tilerank.kernels.weight_formats.output_scaled import OutputScaledFormat


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
    [Int4(32), Int4(64, True), Int4(160), Mxfp4(), Fp8(64, 96), BlockInt8(64, 96), GroupInt8(64, True), ChannelFp8()],
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
        exact = (functional.gelu(sums[:, :, 0], approximate="tanh") * sums[:, :, 1]).flatten(1)
        result = linear(x, weight, bias, activation="gelu_tanh_mul", out_dtype=F32)
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


def test_all_mxfp4_codes_and_exponents(rung: str) -> None:
    """Every code times 1 is exact with every kind of exponent: values of 0 are subnormal, those of 254 overflow from 2
    on, as floats do."""
    exponents = torch.tensor([0, 1, 2, 126, 127, 128, 253, 254]).repeat_interleave(16)
    codes = torch.arange(16).repeat(8)
    weight = Mxfp4().empty(128, 64)
    weight.write_codes(codes.to(torch.uint8)[:, None].clone(), 0, 37)
    weight.write_scales(torch.full((128, 1), 127, dtype=torch.uint8))
    weight.write_scales(exponents.to(torch.uint8)[:, None], 0, 1)
    values = (E2M1[codes & 7] * (1 - 2.0 * (codes > 7)) * (exponents.double() - 127).exp2()).float()
    assert values[1] == 2.0**-128 and values[-8 - 4].isinf() and torch.equal(weight.unpack()[:, 37], values)
    for m in (1, 3, 8, 9, 16, 20):
        x = torch.zeros(m, 64, dtype=BF16)
        x[:, 37] = 1
        assert torch.equal(linear(x, weight, out_dtype=F32), values.expand(m, -1))


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


@pytest.mark.parametrize(
    "form",
    [Int4(32), Int4(64, True), Mxfp4(), Fp8(32, 64), BlockInt8(32, 64), GroupInt8(32), ChannelFp8(), ChannelFp8(64)],
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
