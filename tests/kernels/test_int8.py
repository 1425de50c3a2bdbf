"""Int8 weights and experts on every rung: equal to exact arithmetic bit for bit, within the error of quantisation."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from matrices import inside_nan, randn
from torch import Tensor
from torch.nn import functional

from tilerank.kernels import core
from tilerank.kernels.errors import KernelError
from tilerank.kernels.linear import linear
from tilerank.kernels.moe import moe, softmax_top_k
from tilerank.kernels.ops import silu_mul
from tilerank.kernels.packed_experts import PackedExperts
from tilerank.kernels.weight_formats.int8 import Int8, Int8Weight
from tilerank.kernels.weight_formats.token_int8 import TokenInt8

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


GROUP = 64
"""Inputs of x that share a scale in products with Int8."""


@pytest.fixture(params=[Int8(), TokenInt8()], ids=["int8", "token-int8"])
def form(request: pytest.FixtureRequest) -> Int8:
    found: Int8 = request.param
    return found


def packed(plain: Tensor, form: Int8) -> Int8Weight:
    weight = form.empty(*plain.shape)
    weight.write(plain)
    return weight


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of the rows as float64, by definition of the format."""
    largest = x.float().abs().amax(1, keepdim=True).clamp(min=2.0**-100)
    ends = torch.full_like(largest, 127)  # torch rounds number / tensor twice
    inverse, step = ends / largest, largest / ends
    return (x.double() * inverse.double()).round(), step.double()  # ties to even


def product(x: Tensor, weight: Tensor, form: Int8) -> Tensor:
    """Return the exact float32 result of `linear`."""
    outputs, output_steps = quantised(weight)
    if isinstance(form, TokenInt8):
        rows, row_steps = quantised(x)
        sums = (rows @ outputs.T).float()  # integers below 2^53: exact before the single rounding
        return sums * (row_steps.float() * output_steps.float().T)
    total = torch.zeros(x.shape[0], weight.shape[0])
    for group, codes in zip(torch.split(x, GROUP, 1), torch.split(outputs, GROUP, 1), strict=True):
        rows, row_steps = quantised(group)
        exact = (rows @ codes.T).numpy().astype(np.longdouble) * row_steps.numpy()  # 21 and 24 bits
        total = torch.from_numpy((exact + total.numpy()).astype(np.float32))  # a fused multiply-add
    return total * output_steps.float().T


@pytest.mark.parametrize("n, k", [(1, 1), (3, 17), (32, 64), (33, 130), (130, 33), (72, 1100), (260, 320)])
@pytest.mark.parametrize("threads", [1, 3])
def test_product(rung: str, form: Int8, n: int, k: int, threads: int) -> None:
    core.start_pool(None, threads, spin=False)
    plain, x = randn(n, k), randn(130, k, seed=1).to(BF16)
    weight, expected = packed(plain, form), product(x, plain, form)
    every = k in (130, 1100) and rung != "reference"
    for m in range(1, 41) if every else (1, 3, 16, 17, 40):
        assert torch.equal(linear(inside_nan(x[:m]), weight, out_dtype=F32), expected[:m]), f"{m} rows"
    assert torch.equal(linear(inside_nan(x), weight), expected.to(BF16))
    bias = randn(n, seed=2)
    assert torch.equal(linear(x, weight, bias, out_dtype=F32), expected + bias)


def test_a_sum_of_zero_has_no_sign(rung: str, form: Int8) -> None:
    """Sums are integers, for any number of rows."""
    weight = packed(-torch.ones(40, 1), form)
    for m in (1, 2, 13, 40):
        assert not linear(torch.zeros(m, 1, dtype=BF16), weight, out_dtype=F32).signbit().any(), f"{m} rows"


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("k", [1100, 4000])
def test_product_larger_than_every_block(form: Int8, threads: int, k: int) -> None:
    """More rows than two stripes and more outputs than a band; inputs in one panel (1100) and in several (4000)."""
    core.start_pool(None, threads, spin=False)
    x, plain = randn(850, k).to(BF16), randn(450, k, seed=1).to(BF16)
    assert torch.equal(linear(x, packed(plain, form), out_dtype=F32), product(x, plain, form))
    core.start_pool(None, 1, spin=False)


@given(
    m=st.integers(1, 50),
    n=st.integers(1, 100),
    k=st.integers(1, 300),
    exponent=st.integers(-120, 100),
    seed=st.integers(0, 1 << 20),
)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_product_of_any_size_and_magnitude(
    rung: str, form: Int8, m: int, n: int, k: int, exponent: int, seed: int
) -> None:
    x = (randn(m, k, seed=seed) * 2.0 ** (torch.arange(m) % 7 * 3)[:, None] * 2.0**exponent).to(BF16)
    plain = randn(n, k, seed=seed + 1)
    assert torch.equal(linear(x, packed(plain, form), out_dtype=F32), product(x, plain, form))


def test_error_is_within_the_rounding_of_codes(rung: str, form: Int8) -> None:
    """Every code is off by at most half: |x w - (x + dx)(w + dw)| <= |x| dw + dx |w| + dx dw."""
    x, plain = randn(20, 300).to(BF16), randn(50, 300, seed=1)
    step_x, step_w = (t.double().abs().amax(1, keepdim=True) / 127 for t in (x, plain))
    half_x, half_w = step_x.expand(20, 300) / 2, step_w.expand(50, 300) / 2
    bound = x.double().abs() @ half_w.T + half_x @ plain.double().abs().T + half_x @ half_w.T
    error = (linear(x, packed(plain, form), out_dtype=F32).double() - x.double() @ plain.double().T).abs()
    assert (error <= bound * (1 + 1e-5)).all()
    assert error.max() > 0 and (packed(plain, form).unpack() - plain).abs().max() <= half_w.max() * (1 + 1e-5)


def test_sums_near_the_limit_of_int32_are_exact(rung: str) -> None:
    """The most inputs, all at an end of their range: 2^17 * 127 * 128 is just below 2^31."""
    k = 1 << 17
    weight = TokenInt8().empty(2, k)
    weight.write_codes(torch.tensor([[-128], [127]], dtype=torch.int8).expand(2, k), torch.ones(2))
    x = torch.tensor([[127.0], [-127.0]]).expand(2, k).to(BF16)
    found = linear(x, weight, out_dtype=F32)
    assert found.tolist() == [[-(2.0**24) * 127, 2.0**17 * 127 * 127], [2.0**24 * 127, -(2.0**17) * 127 * 127]]
    with pytest.raises(KernelError, match="at most 131072 inputs"):
        Int8().empty(1, k + 1)


@pytest.mark.parametrize("m", [3, 16, 40])
def test_epilogue(rung: str, form: Int8, m: int) -> None:
    x, plain, bias = randn(m, 70).to(BF16), randn(192, 70, seed=1), randn(192, seed=2)
    sums = product(x, plain, form) + bias
    found = linear(x, packed(plain, form), bias, activation="gelu", out_dtype=F32)
    assert torch.allclose(found, functional.gelu(sums), atol=1e-5, rtol=1e-5)
    gate, up = sums.view(m, 3, 2, 32).unbind(2)
    found = linear(x, packed(plain, form), bias, activation="silu_mul", out_dtype=F32)
    assert torch.allclose(found, (functional.silu(gate) * up).flatten(1), atol=1e-5, rtol=1e-5)
    found = linear(x, packed(plain, form), bias, activation="gelu_tanh_mul", out_dtype=F32)
    exact = (functional.gelu(gate, approximate="tanh") * up).flatten(1)
    assert torch.allclose(found, exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("k", [100, 1300])
def test_results_without_an_epilogue_of_many_rows(rung: str, form: Int8, k: int, threads: int) -> None:
    """Large bf16 results without bias have code of their own, with non-temporal stores."""
    if rung == "reference":
        pytest.skip("writes in one way")
    core.start_pool(None, threads, spin=False)
    plain, x = randn(320, k), randn(210, k, seed=1).to(BF16)
    weight, sums = packed(plain, form), product(x, plain, form)
    assert torch.equal(linear(x, weight), sums.to(BF16))
    gated = linear(x, weight, activation="silu_mul")
    gate, up = sums.double().view(-1, 5, 2, 32).unbind(2)
    torch.testing.assert_close(gated.double(), (functional.silu(gate) * up).flatten(1), rtol=2**-8, atol=1e-6)
    alone = torch.cat([linear(row, weight, activation="silu_mul") for row in torch.split(x, 1)])
    assert torch.equal(gated, alone), "depends on the number of rows"
    core.start_pool(None, 1, spin=False)


def test_zeros_and_non_finite_values(rung: str, form: Int8) -> None:
    """Zero rows give zeros; infinity and NaN in x make their row NaN, in a weight their output."""
    plain = randn(40, 70)
    plain[5] = 0
    for m in (7, 40):
        x = randn(m, 70, seed=1).to(BF16)
        x[2] = 0
        clean = linear(x, packed(plain, form))
        assert not clean[2].any() and not clean[:, 5].any() and clean[0, :5].all()
        x[3, 69], x[4, 0], x[6, 33] = float("nan"), float("inf"), float("-inf")
        found = linear(x, packed(plain, form))
        kept = [row for row in range(m) if row not in (3, 4, 6)]
        assert torch.equal(found[kept], clean[kept]) and found[[3, 4, 6]].isnan().all()
    plain[7, 1], plain[8, 2] = float("nan"), float("inf")
    weight = packed(plain, form)
    assert weight.unpack().isnan().any(1).nonzero().flatten().tolist() == [7, 8]
    assert linear(x[:1], weight).isnan().nonzero()[:, 1].tolist() == [7, 8]


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_rows(rung: str, form: Int8, threads: int) -> None:
    """Around row tiles (5 and 13) and stripes (100 and 259), next to non-finite rows."""
    core.start_pool(None, threads, spin=False)
    plain, x = randn(70, 200), randn(521, 200, seed=1).to(BF16)
    x[2::37, 150] = float("inf")
    weight, expected = packed(plain, form), product(x, plain, form)
    numbers = x.isfinite().all(1)
    for m in (4, 5, 6, 12, 13, 14, 25, 26, 27, 51, 52, 64, 65, 99, 100, 101, 258, 259, 260, 261, 519, 520, 521):
        found = linear(x[:m], weight, out_dtype=F32)
        assert torch.equal(found[numbers[:m]], expected[:m][numbers[:m]]), f"{m} rows"
        assert found[~numbers[:m]].isnan().all(), f"{m} rows"


@pytest.mark.parametrize("source", [F32, BF16, torch.float16, F64, torch.float8_e4m3fn])
def test_write(rung: str, source: torch.dtype) -> None:
    """Any dtype and strides, rows in any order."""
    plain = randn(117, 71).to(source)
    every_other = torch.zeros(234, 213, dtype=source)
    every_other[::2, ::3] = plain
    codes, steps = quantised(plain.float())
    expected = codes.float() * steps.float()
    for rows in (plain, plain.T.contiguous().T, every_other[::2, ::3]):
        core.start_pool(None, 3, spin=False)
        weight = Int8().empty(117, 71)
        for top, bottom in ((40, 45), (0, 40), (45, 117)):
            weight.write(rows[top:bottom], top)
        assert torch.equal(weight.unpack(), expected)


def test_write_codes(rung: str) -> None:
    """The codes and scales of a checkpoint are kept exactly, -128 included; what is not written is zero."""
    codes = torch.randint(-128, 128, (50, 133), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    scales = randn(50, seed=1).abs()
    weight = Int8().empty(70, 133)
    weight.write_codes(codes[30:], scales[30:], 30)
    weight.write_codes(codes[:30].T.contiguous().T, scales[:30])
    expected = functional.pad(codes.float() * scales[:, None], (0, 0, 0, 20))
    assert torch.equal(weight.unpack(), expected)
    x, _ = quantised(randn(3, 133, seed=2))
    x[:, ::GROUP] = 127  # gives every group the scale 1
    exact = (x @ codes.double().T).float() * scales
    assert torch.equal(linear(x.to(BF16), weight, out_dtype=F32), functional.pad(exact, (0, 20)))


def test_quantising_a_quantised_weight_changes_nothing(rung: str) -> None:
    """Quantising dequantised weights again changes no code."""
    weight = packed(randn(40, 90), Int8())
    again = packed(weight.unpack(), Int8())
    assert torch.equal(again.codes, weight.codes)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (33, 31), (64, 64), (70, 1100)])
def test_embedding(rung: str, n: int, k: int) -> None:
    table = packed(randn(n, k), Int8())
    ids = torch.tensor([n - 1, 0, n // 2, -1, n, 2**40, -(2**63)])
    found = table.embedding(ids + 5, first_row=5)
    assert torch.equal(found[:3], table.unpack().to(BF16)[ids[:3]])
    assert not found[3:].any()
    assert table.embedding(ids[:0]).shape == (0, k)


def test_nbytes_is_what_is_allocated(rung: str) -> None:
    weight = Int8().empty(33, 65)
    assert Int8().nbytes(33, 65) == weight.codes.nbytes + weight.scales.nbytes
    assert Int8().nbytes(33, 65) == (33 * (65 + 4) if rung == "reference" else 64 * (128 + 4))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda w: linear(torch.zeros(2, 8), w), "linear: x: expected dtype bfloat16, found float32"),
        (lambda w: w.write(torch.zeros(2, 8), 3), r"whole rows inside \[4, 8\], found \[2, 8\] at row 3"),
        (lambda w: w.write(torch.zeros(2, 2), 0, 6), r"found \[2, 2\] at row 0, column 6"),
        (lambda w: w.write(torch.zeros(2, 8, dtype=torch.int8)), "matrix of floats"),
        (lambda w: w.write_codes(torch.zeros(2, 8), torch.zeros(2)), "matrix of int8"),
        (lambda w: w.write_codes(torch.tensor(0, dtype=torch.int8), torch.zeros(2)), r"matrix of int8, found \[\]"),
        (lambda w: w.write_codes(torch.zeros(2, 8, dtype=torch.int8), torch.zeros(3)), r"scales: expected shape \[2\]"),
        (lambda w: w.write_codes(torch.zeros(2, 7, dtype=torch.int8), torch.zeros(2)), r"found \[2, 7\]"),
        (lambda w: w.embedding(torch.zeros(2, dtype=torch.int32)), "ids: expected dtype int64"),
        (lambda w: Int8().empty(0, 8), "positive sizes"),
    ],
)
def test_wrong_arguments(rung: str, call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(KernelError, match=message):
        call(Int8().empty(4, 8))


class Experts:
    """Random experts, plain and packed."""

    def __init__(self, form: Int8, experts: int, hidden: int, width: int) -> None:
        self.form = form
        self.experts, self.hidden, self.width = experts, hidden, width
        self.plain_gate_up = randn(experts, 2, width, hidden) * 1.5 * hidden**-0.5
        self.plain_down = randn(experts, hidden, width, seed=1) * 1.5 * width**-0.5
        self.gate_up = PackedExperts.empty(experts, width, hidden, form, parts=2)
        self.down = PackedExperts.empty(experts, hidden, width, form)
        for expert in range(experts):
            for part in (0, 1):
                rows = self.plain_gate_up[expert, part]
                self.gate_up.write(rows[: width // 2], expert, part=part)
                self.gate_up.write(rows[width // 2 :], expert, part=part, row=width // 2)
            self.down.write(self.plain_down[expert], expert)

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return moe(x, self.gate_up, self.down, ids, weights)

    def expected(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Compute the expected result; only silu comes from the rung, because its last bit may decide a rounding."""
        outputs = torch.full((*ids.shape, self.hidden), float("nan"))
        for expert in torch.unique(ids).tolist():
            tokens, choices = torch.where(ids == expert)
            gate, up = (product(x[tokens], self.plain_gate_up[expert, part], self.form) for part in (0, 1))
            outputs[tokens, choices] = product(
                silu_mul(torch.cat([gate, up], dim=-1)), self.plain_down[expert], self.form
            )
        total = torch.zeros(x.shape)
        for choice in range(ids.shape[1]):
            total = total + weights[:, choice, None] * outputs[:, choice]
        return total.to(BF16)

    def routed(self, m: int, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return x, ids and weights of m tokens; the first experts are chosen more often."""
        logits = randn(m, self.experts, seed=3) - torch.arange(self.experts) * (4 / self.experts)
        return (randn(m, self.hidden, seed=2).to(BF16), *softmax_top_k(logits, top_k, renormalize=True))


@pytest.mark.parametrize("hidden, width", [(1, 1), (40, 70), (130, 33), (96, 80), (544, 48)])
@pytest.mark.parametrize("threads", [1, 3])
def test_experts(rung: str, form: Int8, hidden: int, width: int, threads: int) -> None:
    core.start_pool(None, threads, spin=False)
    experts = Experts(form, 7, hidden, width)
    for m, top_k in ((1, 1), (1, 7), (3, 2), (17, 3), (70, 2)):
        x, ids, weights = experts.routed(m, top_k)
        assert torch.equal(experts(inside_nan(x), ids, weights), experts.expected(x, ids, weights)), (m, top_k)


@pytest.mark.parametrize("hidden, width, m", [(2200, 100, 450), (64, 3200, 420)])
def test_more_rows_of_an_expert_than_every_block(form: Int8, hidden: int, width: int, m: int) -> None:
    """Stripes and panels of both projections, whole rows and partial ones."""
    experts = Experts(form, 3, hidden, width)
    x = randn(m, hidden, seed=2).to(BF16)
    ids = torch.stack([torch.zeros(m), torch.arange(m) % 7 == 3], dim=1).int()  # and most of the second choices
    weights = randn(m, 2, seed=3)
    found = experts(x, ids, weights)
    assert torch.equal(found, experts.expected(x, ids, weights))
    core.start_pool(None, 4, spin=False)
    assert torch.equal(found, experts(x, ids, weights)), "depends on the number of threads"
    core.start_pool(None, 1, spin=False)


def test_a_token_has_the_same_bits_in_every_batch(rung: str, form: Int8) -> None:
    experts = Experts(form, 5, 70, 45)
    x, ids, weights = experts.routed(150, 2)
    alone = torch.cat([experts(x[i : i + 1], ids[i : i + 1], weights[i : i + 1]) for i in range(150)])
    for m in (2, 16, 17, 33, 81, 150):
        assert torch.equal(experts(x[:m], ids[:m], weights[:m]), alone[:m]), f"{m} rows"
    assert torch.equal(experts(x[77:], ids[77:], weights[77:]), alone[77:])


def test_non_finite_values_stay_in_their_token(rung: str, form: Int8) -> None:
    experts = Experts(form, 3, 64, 32)
    x, ids, weights = experts.routed(20, 2)
    clean = experts(x, ids, weights)
    x[3, 1], x[9, 5] = float("nan"), float("inf")
    found = experts(x, ids, weights)
    kept = [row for row in range(20) if row not in (3, 9)]
    assert torch.equal(found[kept], clean[kept]) and found[[3, 9]].isnan().all()


def test_experts_written_from_codes_are_unchanged(rung: str) -> None:
    experts = PackedExperts.empty(3, 45, 70, Int8(), parts=2)
    codes = torch.randint(-128, 128, (3, 2, 45, 70), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    scales = randn(3, 2, 45, seed=1).abs()
    for expert in range(3):
        for part in (0, 1):
            weight = experts.part(expert, part)
            assert isinstance(weight, Int8Weight)
            weight.write_codes(codes[expert, part], scales[expert, part])
    for expert in range(3):
        for part in (0, 1):
            assert torch.equal(experts.unpack(expert, part), codes[expert, part] * scales[expert, part, :, None])


def test_experts_of_two_formats_are_refused(rung: str) -> None:
    from tilerank.kernels.weight_formats import Float

    x, ids = torch.zeros(2, 64, dtype=BF16), torch.zeros(2, 1, dtype=torch.int32)
    gate_up = PackedExperts.empty(3, 32, 64, Int8(), parts=2)
    down = PackedExperts.empty(3, 64, 32, Float(BF16))
    with pytest.raises(KernelError, match=r"moe: down: expected .* Int8\(\) after 2 parts of gate_up, found"):
        moe(x, gate_up, down, ids, torch.ones(2, 1))
