"""Int4 and MXFP4 weights with int8 activations, and experts of them, on every rung: equal to exact arithmetic bit for
bit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from matrices import inside_nan, randn
from torch import Tensor
from torch.nn import functional

from tests.kernels.block_scaled.forms import E2M1, quantised
from tilerank.kernels import core
from tilerank.kernels.linear import linear
from tilerank.kernels.moe import moe, softmax_top_k
from tilerank.kernels.ops import silu_mul
from tilerank.kernels.packed_experts import PackedExperts
from tilerank.kernels.weight import Weight
from tilerank.kernels.weight_formats.int4 import Int4
from tilerank.kernels.weight_formats.int4_a8 import Int4A8, Int4A8Weight
from tilerank.kernels.weight_formats.mxfp4 import Mxfp4
from tilerank.kernels.weight_formats.mxfp4_a8 import Mxfp4A8, Mxfp4A8Weight

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64

Form = Int4A8 | Mxfp4A8
FORMS: list[Form] = [Int4A8(32, True), Int4A8(64), Int4A8(64, True), Int4A8(96, True), Int4A8(128), Int4A8(0)]
FORMS += [Int4A8(0, True), Mxfp4A8()]
"""Steps of 32 inputs (groups of 32 and 96) and of 64; groups of several steps; one scale for all inputs."""


@dataclass(frozen=True)
class Parts:
    """The numbers of a weight: integers [n, k], and scales in memory [n, groups], all float64. unit: of the scales."""

    group: int
    levels: Tensor
    scales: Tensor
    unit: float

    def product(self, x: Tensor) -> Tensor:
        """Return the exact float32 result of `linear`, by the definition of the format."""
        step = 32 if (self.group or 64) % 64 else 64
        group = self.group or x.shape[1]
        total = torch.zeros(x.shape[0], len(self.levels))
        for i, levels in enumerate(torch.split(self.levels, step, 1)):
            codes, scales = quantised(x[:, i * step : (i + 1) * step])
            scaled = ((codes @ levels.T) * scales).float()  # 17 and 24 bits: rounded once
            exact = scaled.double() * self.scales[:, i * step // group]
            sums = exact.numpy().astype(np.longdouble) + total.numpy()
            total = torch.from_numpy(sums.astype(np.float32))  # a fused multiply-add
        return total * self.unit


def fill(weight: Weight, seed: int) -> Parts:
    """Write random codes, scales and zero points, and return them."""
    assert isinstance(weight, Int4A8Weight | Mxfp4A8Weight)
    random = torch.Generator().manual_seed(seed)
    n, k, group = weight.n, weight.k, weight.format.group or weight.k
    codes = torch.randint(0, 16, (n, k), generator=random, dtype=torch.uint8)
    if isinstance(weight, Mxfp4A8Weight):
        exponents = torch.randint(115, 125, (n, -(-k // group)), generator=random, dtype=torch.uint8)
        weight.write_codes(codes)
        weight.write_scales(exponents)
        doubles = 2 * E2M1[codes.int() & 7] * (1 - 2.0 * (codes > 7))
        return Parts(group, doubles, (exponents.double() - 127).exp2(), 1 / 2)
    scales = (torch.randn(n, -(-k // group), generator=random) * 0.01).to(torch.float16)
    zeros = torch.full(scales.shape, 8, dtype=torch.uint8)
    weight.write_codes(codes)
    weight.write_scales(scales)
    if weight.format.zero_points:
        zeros = torch.randint(0, 16, zeros.shape, generator=random, dtype=torch.uint8)
        weight.write_zeros(zeros)
    by_input = zeros.double().repeat_interleave(group, 1)[:, :k]
    return Parts(weight.format.group, codes.double() - by_input, scales.double() * 256, 1 / 256)


def filled(form: Form, n: int, k: int) -> tuple[Int4A8Weight | Mxfp4A8Weight, Parts]:
    weight = form.empty(n, k)
    return weight, fill(weight, n + k)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("n, k", [(1, 1), (33, 130), (72, 1100)])
@pytest.mark.parametrize("threads", [1, 3])
def test_product(rung: str, form: Form, n: int, k: int, threads: int) -> None:
    core.start_pool(None, threads, spin=False)
    weight, parts = filled(form, n, k)
    x, bias = randn(41, k, seed=1).to(BF16), randn(n, seed=2)
    expected = parts.product(x)
    for m in range(1, 42) if k == 130 and rung != "reference" else (1, 3, 9, 17, 41):
        assert torch.equal(linear(inside_nan(x[:m]), weight, out_dtype=F32), expected[:m]), f"{m} rows"
    assert torch.equal(linear(x, weight, bias), (expected + bias).to(BF16))
    core.start_pool(None, 1, spin=False)


@pytest.mark.parametrize("form", [Int4A8(32, True), Int4A8(64), Mxfp4A8()], ids=str)
def test_product_larger_than_every_block(form: Form) -> None:
    """More rows than two stripes, more outputs than a band, more inputs than a panel, on the newest rung."""
    weight, parts = filled(form, 400, 600)
    x = randn(530, 600).to(BF16)
    expected = parts.product(x)
    for threads in (1, 4):
        core.start_pool(None, threads, spin=False)
        assert torch.equal(linear(x, weight, out_dtype=F32), expected), f"{threads} threads"
    core.start_pool(None, 1, spin=False)


def test_all_codes_and_zeros(rung: str) -> None:
    """Sums of the largest codes are exact, whatever the zero point."""
    code, zero = torch.arange(256) % 16, torch.arange(256) // 16
    for group in (32, 64):
        weight = Int4A8(group, True).empty(256, group)
        weight.write_codes(code.to(torch.uint8)[:, None].expand(256, group).contiguous())
        weight.write_zeros(zero.to(torch.uint8)[:, None])
        weight.write_scales(torch.full((256, 1), 0.5))
        for m in (1, 5, 20):
            x = torch.full((m, group), 127.0, dtype=BF16)
            x[-1] = -127
            wanted = ((code - zero) * 63.5 * group).expand(m, -1).clone()
            wanted[-1] *= -1
            assert torch.equal(linear(x, weight, out_dtype=F32), wanted)


def test_all_codes_of_mxfp4(rung: str) -> None:
    """Sums of the largest codes are exact, from the smallest power of two to the largest."""
    doubles = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=F64)
    weight = Mxfp4A8().empty(48, 32)
    weight.write_codes(torch.arange(16, dtype=torch.uint8).repeat(3)[:, None].expand(48, 32).contiguous())
    exponents = torch.tensor([0, 127, 235], dtype=torch.uint8).repeat_interleave(16)
    weight.write_scales(exponents[:, None])
    for m in (1, 5, 20):
        x = torch.full((m, 32), 127.0, dtype=BF16)
        x[-1] = -127
        wanted = (doubles.repeat(3) * 127 * 16 * (exponents.double() - 127).exp2()).expand(m, -1).clone()
        wanted[-1] *= -1
        assert torch.equal(linear(x, weight, out_dtype=F32).double(), wanted)


@pytest.mark.parametrize("form", [Int4A8(32), Int4A8(64, True), Mxfp4A8()], ids=str)
def test_zeros_and_non_finite_values(rung: str, form: Form) -> None:
    """A sum of zero has no sign. Infinity and NaN make their row NaN, and what stands beside it is unchanged."""
    weight, _ = filled(form, 40, 130)
    for m in (3, 8, 20):
        x = randn(m, 130, seed=1).to(BF16)
        x[0] = 0
        clean = linear(x, weight, out_dtype=F32)
        assert not clean[0].any() and not clean[0].signbit().any()
        x[1, 5], x[m - 1, 129] = float("inf"), float("nan")
        found = linear(x, weight, out_dtype=F32)
        rest = [row for row in range(m) if row not in (1, m - 1)]
        assert torch.equal(found[rest], clean[rest]) and found[[1, m - 1]].isnan().all()


@pytest.mark.parametrize("form, wide, step", [(Int4A8(64, True), Int4(64, True), 64), (Mxfp4A8(), Mxfp4(), 32)])
def test_error_is_within_the_rounding_of_codes(rung: str, form: Form, wide: Int4 | Mxfp4, step: int) -> None:
    """The weight is that of the format with wide activations; every code of x is off by at most half."""
    plain, x = randn(50, 300, seed=1), randn(20, 300).to(BF16)
    weight, other = form.empty(50, 300), wide.empty(50, 300)
    weight.write(plain)
    other.write(plain)
    assert torch.equal(weight.unpack(), other.unpack())
    values = weight.unpack().double()
    half = torch.cat([part.abs().amax(1, keepdim=True).expand_as(part) for part in torch.split(x.double(), step, 1)], 1)
    bound = half / 254 @ values.abs().T
    error = (linear(x, weight, out_dtype=F32).double() - x.double() @ values.T).abs()
    assert (error <= bound * (1 + 1e-5) + 1e-5).all() and error.max() > 0


def test_epilogue_and_rows_of_many_outputs(rung: str) -> None:
    """Large bf16 results are written in another way; a row has the same bits in every batch."""
    weight, parts = filled(Int4A8(64, True), 320, 200)
    counts = (210, 96, 17) if rung != "reference" else (17,)
    x = randn(counts[0], 200, seed=1).to(BF16)
    sums = parts.product(x)
    gate, up = sums.double().view(-1, 5, 2, 32).unbind(2)
    alone = torch.cat([linear(row, weight, activation="silu_mul") for row in torch.split(x[:17], 1)])
    for m in counts:
        assert torch.equal(linear(x[:m], weight), sums[:m].to(BF16))
        gated = linear(x[:m], weight, activation="silu_mul")
        wanted = (functional.silu(gate[:m]) * up[:m]).flatten(1)
        torch.testing.assert_close(gated.double(), wanted, rtol=2**-8, atol=1e-6)
        assert torch.equal(gated[:17], alone), f"{m} rows"


@pytest.mark.parametrize("form", [Int4A8(32, True), Int4A8(64), Int4A8(0, True), Mxfp4A8()], ids=str)
@pytest.mark.parametrize("hidden, width", [(70, 40), (192, 96)])
@pytest.mark.parametrize("threads", [1, 3])
def test_experts(rung: str, form: Form, hidden: int, width: int, threads: int) -> None:
    """silu(gate) * up stays in fp32 until it is quantised."""
    core.start_pool(None, threads, spin=False)
    experts = 5
    gate_up = PackedExperts.empty(experts, width, hidden, form, parts=2)
    down = PackedExperts.empty(experts, hidden, width, form)
    plain = [
        [
            fill(gate_up.part(expert, 0), expert),
            fill(gate_up.part(expert, 1), 10 + expert),
            fill(down.part(expert), 20 + expert),
        ]
        for expert in range(experts)
    ]
    for m, top_k in ((1, 1), (3, 5), (90, 2)) if rung != "reference" else ((3, 5), (20, 2)):
        x = randn(m, hidden, seed=7).to(BF16)
        logits = randn(m, experts, seed=m) - torch.arange(experts)
        ids, weights = softmax_top_k(logits, top_k, renormalize=True)
        outputs = torch.full((m, top_k, hidden), float("nan"))
        for expert in torch.unique(ids).tolist():
            tokens, choices = torch.where(ids == expert)
            gate, up = (part.product(x[tokens]) for part in plain[expert][:2])
            outputs[tokens, choices] = plain[expert][2].product(silu_mul(torch.cat([gate, up], dim=-1)))
        total = torch.zeros(m, hidden)
        for choice in range(top_k):
            total = total + weights[:, choice, None] * outputs[:, choice]
        assert torch.equal(moe(inside_nan(x), gate_up, down, ids, weights), total.to(BF16)), (m, top_k)
    core.start_pool(None, 1, spin=False)
