"""The packed linear layer against float64 arithmetic in plain torch, on every rung."""

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from matrices import inside_nan, randn
from torch import Tensor

from tilerank.kernels import core
from tilerank.kernels.errors import KernelError
from tilerank.kernels.linear import Activation, linear
from tilerank.kernels.weight_formats import Float
from tilerank.kernels.weight_formats.floats import FloatWeight

BF16, F32 = torch.bfloat16, torch.float32


def packed(plain: Tensor, dtype: torch.dtype) -> FloatWeight:
    n, k = plain.shape
    weight = FloatWeight.empty(n, k, dtype)
    weight.write(plain)
    return weight


def assert_close(result: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Check the error bound of sums of k products, (k + 1) u (|x| |w| + |b|), plus half a unit of the result.

    Products of bf16 are exact in fp32; products of fp32 are fused with the sum.
    """
    x, weight = x.double(), weight.double()
    bias = torch.zeros(weight.shape[0]).double() if bias is None else bias.double()
    exact = x @ weight.T + bias
    magnitude = x.abs() @ weight.abs().T + bias.abs()
    bound = (x.shape[-1] + 1) * 2.0**-24 * magnitude
    if result.dtype is BF16:
        bound = bound * (1 + 2.0**-8) + exact.abs() * 2.0**-8
    excess = (result.double() - exact).abs() - bound
    assert excess.max() <= 0, f"{excess.max()} over the bound"


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
@pytest.mark.parametrize("n, k", [(1, 1), (3, 17), (32, 32), (33, 130), (130, 33), (72, 1100), (520, 544)])
@pytest.mark.parametrize("threads", [1, 3])
def test_product(rung: str, dtype: torch.dtype, n: int, k: int, threads: int) -> None:
    core.start_pool(None, threads, spin=False)
    plain, bias = randn(n, k), randn(n, seed=1)
    weight = packed(plain, dtype)
    for m in (1, 3, 8, 9, 16, 17, 33, 130) if rung != "reference" else (1, 3):
        x = inside_nan(randn(m, k, seed=2).to(dtype))
        assert_close(linear(x, weight, out_dtype=F32), x, plain.to(dtype))
        assert_close(linear(x, weight, bias, out_dtype=F32), x, plain.to(dtype), bias)
        assert_close(linear(x, weight, bias.to(BF16)), x, plain.to(dtype), bias.to(BF16))
    core.start_pool(None, 1, spin=False)


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("k", [1100, 1700])
def test_product_larger_than_every_block(threads: int, k: int) -> None:
    """More rows than two stripes, more outputs than a band (384); inputs in one panel (1100) or several (1700)."""
    core.start_pool(None, threads, spin=False)
    x, plain = randn(850, k).to(BF16), randn(450, k, seed=1).to(BF16)
    result = linear(x, packed(plain, BF16), out_dtype=F32)
    assert_close(result, x, plain)
    core.start_pool(None, 1, spin=False)
    assert torch.equal(result, linear(x, packed(plain, BF16), out_dtype=F32)), "depends on the number of threads"


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("m", "k"), [(m, 2080) for m in (384, 400, 401, 369, 850)] + [(96, 416), (401, 416)])
def test_rows_that_are_not_packed(threads: int, m: int, k: int) -> None:
    """Rows an odd number of cache lines apart need no packing: whole row tiles, and a partial one."""
    core.start_pool(None, threads, spin=False)
    x, plain = randn(m, k).to(BF16), randn(200, k, seed=1).to(BF16)
    weight = packed(plain, BF16)
    apart = core.empty((m, k), BF16).copy_(x)
    result = linear(apart, weight, out_dtype=F32)
    assert_close(result, x, plain)
    together = core.empty((m, k + 32), BF16)[:, :k].copy_(x)
    assert torch.equal(result, linear(together, weight, out_dtype=F32)), "depends on where rows are"
    core.start_pool(None, 1, spin=False)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
@pytest.mark.parametrize("n, k", [(40, 70), (72, 1088), (40, 1700)])
def test_a_row_has_the_same_bits_in_every_batch(rung: str, dtype: torch.dtype, n: int, k: int) -> None:
    count = 300 if rung != "reference" else 20
    x, weight, bias = randn(count, k).to(dtype), packed(randn(n, k, seed=1), dtype), randn(n, seed=2)
    alone = torch.cat([linear(row[None], weight, bias) for row in x])
    # All numbers of rows up to four tiles of 16 and five panels of 14; then all remainders of both, and a stripe.
    for m in (m for m in range(1, count + 1) if m < 72 or m % 11 == 0 or abs(m - 224) < 2):
        assert torch.equal(linear(x[:m], weight, bias), alone[:m]), f"{m} rows"
    assert torch.equal(linear(x[count // 2 :], weight, bias), alone[count // 2 :])


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
@pytest.mark.parametrize("n, k", [(1090, 417), (72, 1155)])
def test_rows_around_every_panel_and_stripe(rung: str, dtype: torch.dtype, n: int, k: int) -> None:
    """The same bits for any number of rows and threads, with and without pairs of blocks.

    Panels have up to 6 or 14 rows, stripes up to 224 rows and 16 blocks, parts of many rows 384 inputs (or 768); from 6
    or 12 panels on, six tiles are multiplied at a time instead of one or two.
    """
    if rung == "reference":
        pytest.skip("has no blocks")
    x, plain = randn(460, k).to(dtype), randn(n, k, seed=1).to(dtype)
    weight, turns = packed(plain, dtype), packed(in_turn(plain[: n // 64 * 32], plain[-(n // 64 * 32) :]), dtype)
    whole, gated = linear(x, weight, out_dtype=F32), linear(x, turns, activation="silu_mul")
    assert_close(whole, x, plain)
    for threads, m in itertools.product((1, 3), (1, 2, 7, 14, 15, 28, 29, 31, 36, 168, 169, 222, 223, 224, 225, 449)):
        core.start_pool(None, threads, spin=False)
        assert torch.equal(linear(x[:m], weight, out_dtype=F32), whole[:m]), f"{m} rows, {threads} threads"
        assert torch.equal(linear(x[:m], turns, activation="silu_mul"), gated[:m]), f"{m} rows, {threads} threads"
    core.start_pool(None, 1, spin=False)


def in_turn(gate: Tensor, up: Tensor) -> Tensor:
    """Interleave blocks of 32 rows of both matrices."""
    return torch.stack([torch.unflatten(part, 0, (-1, 32)) for part in (gate, up)], dim=1).flatten(0, 2)


ACTIVATIONS: dict[Activation | None, Callable[[Tensor], Tensor]] = {
    None: lambda x: x,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu_mul": lambda x: F.silu(x[:, : x.shape[1] // 2]) * x[:, x.shape[1] // 2 :],
    "gelu_tanh_mul": lambda x: F.gelu(x[:, : x.shape[1] // 2], approximate="tanh") * x[:, x.shape[1] // 2 :],
}
GATED = ("silu_mul", "gelu_tanh_mul")


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("threads", [1, 3])
def test_epilogue(rung: str, dtype: torch.dtype, activation: Activation | None, threads: int) -> None:
    """Bias and activation in fp32 with one rounding at the end, against float64, for few and many rows."""
    core.start_pool(None, threads, spin=False)
    n, k = (192, 130) if activation in GATED else (117, 130)
    plain, bias = randn(n, k) / 8, randn(n, seed=1)
    gated = activation in GATED
    weight = packed(in_turn(*plain.chunk(2)) if gated else plain, dtype)
    packed_bias = in_turn(*bias.chunk(2)) if gated else bias
    for m in (1, 9, 16, 17, 50, 300) if rung != "reference" else (1, 3):
        x = randn(m, k, seed=2).to(dtype)
        sums = x.double() @ plain.to(dtype).double().T + bias.double()
        result = linear(x, weight, packed_bias, activation=activation, out_dtype=F32)
        torch.testing.assert_close(result.double(), ACTIVATIONS[activation](sums), rtol=2e-5, atol=2e-5)
        rounded = linear(x, weight, packed_bias, activation=activation, out_dtype=BF16)
        assert torch.equal(rounded, result.to(BF16)), "not rounded once"
        result = linear(x, weight, packed_bias.to(BF16), activation=activation, out_dtype=F32)
        sums = x.double() @ plain.to(dtype).double().T + bias.to(BF16).double()
        torch.testing.assert_close(result.double(), ACTIVATIONS[activation](sums), rtol=2e-5, atol=2e-5)
        without = ACTIVATIONS[activation](x.double() @ plain.to(dtype).double().T)
        result = linear(x, weight, activation=activation, out_dtype=F32)
        torch.testing.assert_close(result.double(), without, rtol=2e-5, atol=2e-5)
    core.start_pool(None, 1, spin=False)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu_mul", "gelu_tanh_mul"])
def test_activations_everywhere(rung: str, activation: Activation) -> None:
    """From large negative through tiny to large positive values, infinities and NaN."""
    values = torch.cat([torch.linspace(-30, 30, 20001), torch.logspace(-30, 30, 61), -torch.logspace(-30, 30, 61)])
    values = torch.cat([values, torch.tensor([float("nan"), float("inf")])])[:, None]
    gated = activation in GATED
    weight = FloatWeight.empty(64 if gated else 1, 1, F32)
    weight.write(torch.ones(1, 1))
    if gated:
        weight.write(torch.ones(1, 1), 32)
    if rung == "reference":
        values = values[::50]
    result = linear(values, weight, activation=activation)[:, 0]
    exact = ACTIVATIONS[activation](torch.cat([values, values], dim=1).double() if gated else values.double())[:, 0]
    torch.testing.assert_close(result, exact.float(), rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
def test_gates_beyond_the_range_of_their_exponential(rung: str, dtype: torch.dtype) -> None:
    """silu is -0 where e^-gate exceeds fp32, whatever multiplies it."""
    gates = torch.tensor([-3e38, -1e30, -1000.0, -100.0, -92.0, -89.0, -88.5, -88.0, -87.0, -20.0, 88.0, 3e38])
    for up in (3e38, -3e38, 1.0):
        x = torch.stack([gates, torch.full_like(gates, up)], dim=1).to(dtype)
        weight = packed(in_turn(torch.tensor([[1.0, 0.0]] * 32), torch.tensor([[0.0, 1.0]] * 32)), dtype)
        found = linear(x, weight, activation="silu_mul", out_dtype=F32)[:, 0]
        torch.testing.assert_close(found, F.silu(x[:, 0].float()) * x[:, 1].float(), rtol=2e-6, atol=1e-36)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu_mul", "gelu_tanh_mul"])
def test_minus_infinity_is_no_number_or_zero(rung: str, activation: Activation) -> None:
    rows = torch.tensor([[-torch.inf, 1.0]])
    plain = torch.tensor([[1.0, 0.0]] * 32)
    weight = packed(in_turn(plain, plain.flip(1)) if activation in GATED else plain, F32)
    found = linear(rows * torch.tensor([1.0, 3e38]), weight, activation=activation)
    assert ((found == 0) | found.isnan()).all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_no_rows(rung: str, activation: Activation | None) -> None:
    width = 32 if activation in GATED else 64
    assert linear(torch.empty(0, 3), packed(randn(64, 3), F32), activation=activation).shape == (0, width)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu_mul", "gelu_tanh_mul"])
@pytest.mark.parametrize("k", [70, 1088])
def test_an_activated_row_has_the_same_bits_in_every_batch(rung: str, activation: Activation, k: int) -> None:
    count, n = 150 if rung != "reference" else 10, 128 if activation in GATED else 117
    x, weight, bias = randn(count, k).to(BF16), packed(randn(n, k, seed=1), BF16), randn(n, seed=2)
    for out_dtype in (BF16, F32):
        whole = linear(x, weight, bias, activation=activation, out_dtype=out_dtype)
        for m in (m for m in range(1, count) if m < 36 or m % 5 == 0):
            part = linear(x[:m], weight, bias, activation=activation, out_dtype=out_dtype)
            assert torch.equal(part, whole[:m]), m


def test_format(rung: str) -> None:
    weight = Float(BF16).empty(33, 65)
    assert weight.format == Float(BF16) and (weight.n, weight.k) == (33, 65)
    assert weight.format.activations is BF16
    assert Float(BF16).nbytes(33, 65) == weight.data.nbytes


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
@pytest.mark.parametrize("source", [F32, BF16, torch.float16, torch.float64, torch.float8_e4m3fn])
def test_write_converts_as_torch_does(rung: str, dtype: torch.dtype, source: torch.dtype) -> None:
    plain = randn(50, 71).to(source)
    every_other = torch.zeros(100, 213, dtype=source)
    every_other[::2, ::3] = plain
    for rows in (plain, plain.T.contiguous().T, every_other[::2, ::3]):
        assert torch.equal(packed(rows, dtype).unpack(), plain.to(dtype))


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
@pytest.mark.parametrize("threads", [1, 3])
def test_write_rectangles(rung: str, dtype: torch.dtype, threads: int) -> None:
    """Uneven shards of several tensors side by side, written in any order, as in a fused projection."""
    core.start_pool(None, threads, spin=False)
    plain = randn(117, 2100).to(dtype)
    weight = FloatWeight.empty(117, 2100, dtype)
    for top, bottom in ((40, 45), (0, 40), (45, 117)):
        for left, right in ((1, 1500), (0, 1), (1500, 2001), (2001, 2100)):
            weight.write(plain[top:bottom, left:right], top, left)
    assert torch.equal(weight.unpack(), plain)
    weight.write(torch.ones(3, 2), 30, 63)
    plain[30:33, 63:65] = 1
    assert torch.equal(weight.unpack(), plain)
    # At tile edges in k, where whole tiles are packed: with the upper, the lower, both or no halves of a block of
    # outputs.
    for seed, rows in enumerate(((0, 16, 37, 64, 117), (0, 48, 50, 81, 117))):
        plain = randn(117, 2100, seed=2 + seed).to(dtype)
        for top, bottom in itertools.pairwise(rows):
            for left, right in ((0, 64), (64, 2080), (2080, 2100)):
                weight.write(plain[top:bottom, left:right], top, left)
        assert torch.equal(weight.unpack(), plain)
    core.start_pool(None, 1, spin=False)


def test_what_is_not_written_is_zero(rung: str) -> None:
    weight = FloatWeight.empty(40, 50, BF16)
    weight.write(torch.ones(2, 3), 5, 7)
    expected = torch.zeros(40, 50)
    expected[5:7, 7:10] = 1
    assert torch.equal(weight.unpack().float(), expected)
    assert torch.equal(linear(torch.ones(1, 50, dtype=BF16), weight)[0].float(), expected.sum(1))


def test_infinite_and_nan_inputs_stay_in_their_row(rung: str) -> None:
    x = torch.ones(3, 64, dtype=BF16)
    x[1, 5], x[2, 7] = float("inf"), float("nan")
    result = linear(x, packed(torch.ones(33, 64), BF16))
    assert result[0].eq(64).all() and result[1].eq(float("inf")).all() and result[2].isnan().all()
    if rung == "reference":
        return
    x = torch.ones(250, 417, dtype=BF16)
    x[::14, 5], x[1::14, 416] = float("inf"), float("nan")
    result = linear(x, packed(torch.ones(33, 417), BF16), out_dtype=F32)
    assert result[::14].eq(float("inf")).all() and result[1::14].isnan().all()
    assert all(result[first::14].eq(417).all() for first in range(2, 14))


def test_nbytes_is_what_is_allocated(rung: str) -> None:
    for dtype in (BF16, F32):
        weight = FloatWeight.empty(33, 65, dtype)
        assert FloatWeight.nbytes(33, 65, dtype) == weight.data.nbytes >= 33 * 65 * dtype.itemsize
    if rung != "reference":
        assert FloatWeight.nbytes(33, 65, BF16) == 64 * 96 * 2


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda w: linear(torch.zeros(2, 9), w), r"linear: x: expected shape \[any, 8\], found \[2, 9\]"),
        (lambda w: linear(torch.zeros(2, 2, 8), w), r"linear: x: expected shape \[any, 8\], found \[2, 2, 8\]"),
        (lambda w: linear(torch.zeros(2, 8, dtype=BF16), w), "x: expected dtype float32, found bfloat16"),
        (lambda w: linear(torch.zeros(8, 2).T, w), "x: expected a contiguous last dimension, found stride 2"),
        (lambda w: linear(torch.zeros(2, 8), w, torch.zeros(3)), r"bias: expected shape \[4\], found \[3\]"),
        (lambda w: linear(torch.zeros(2, 8), w, out_dtype=torch.float16), "out_dtype"),
        (lambda w: linear(torch.zeros(2, 8), w, activation="silu_mul"), "blocks of 32 gate and 32 up rows, found 4"),
        (lambda w: linear(torch.zeros(2, 8), w, activation="relu"), "found 'relu'"),  # type: ignore[arg-type]
        (lambda w: w.write(torch.zeros(2, 8), 3), r"inside \[4, 8\], found \[2, 8\] at row 3"),
        (lambda w: w.write(torch.zeros(2, 2), 0, -1), "column -1"),
        (lambda w: w.write(torch.zeros(2, 2, dtype=torch.int32)), "matrix of floats"),
        (lambda w: FloatWeight.empty(0, 8, F32), "positive sizes"),
        (lambda w: FloatWeight.empty(4, 8, torch.float16), "float16"),
    ],
)
def test_wrong_arguments(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(KernelError, match=message):
        call(FloatWeight.empty(4, 8, F32))


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (33, 31), (64, 32), (70, 1100)])
def test_embedding_from_the_packed_weight(rung: str, dtype: torch.dtype, n: int, k: int) -> None:
    """Exactly the packed rows; zeros for ids of another shard."""
    table = randn(n, k).to(dtype)
    ids = torch.tensor([n - 1, 0, n // 2, -1, n, 2**40, -(2**63)])
    found = packed(table, dtype).embedding(ids + 5, first_row=5)
    assert torch.equal(found[:3], table[ids[:3]])
    assert not found[3:].any()
    assert packed(table, dtype).embedding(ids[:0]).shape == (0, k)


def test_ids_of_another_dtype_are_refused() -> None:
    with pytest.raises(KernelError, match=r"FloatWeight\.embedding: ids: expected"):
        packed(randn(4, 4), F32).embedding(torch.tensor([1], dtype=torch.int32))
