"""The row kernels of towers and of Gemma on every rung, against float64 arithmetic and against torch's modules."""

from collections.abc import Callable

import pytest
import torch
from matrices import DTYPES, EPS32, assert_same_rounding, assert_within, half_ulp, inside_nan, layouts, randn
from torch import Tensor
from torch.nn import functional

from tilerank.kernels import core, ops, tower_ops
from tilerank.kernels.errors import KernelError
from tilerank.kernels.graph import Graph

pytestmark = pytest.mark.usefixtures("rung")

WIDTHS = [1, 3, 17, 33, 130, 1152]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [0.0, 100.0])
@pytest.mark.parametrize("d", WIDTHS)
def test_layer_norm_is_exact_to_rounding(dtype: torch.dtype, offset: float, d: int) -> None:
    x = inside_nan((randn(5, d) + offset).to(dtype))
    weight, bias = randn(d, dtype=dtype, seed=1), randn(d, dtype=dtype, seed=2)
    found = tower_ops.layer_norm(x, weight, bias, 1e-6)

    exact = functional.layer_norm(x.double(), (d,), weight.double(), bias.double(), 1e-6)
    scale = 1 / (x.double().var(-1, keepdim=True, correction=0) + 1e-6).sqrt()
    scaled = (exact - bias.double()).abs()
    # d numbers summed in fp32, at least 8 at a time: first for the mean, then, of centred values, for the variance.
    sums = (d / 8 + 8) * EPS32
    centered = sums * x.double().abs().amax(-1, keepdim=True) * scale
    bound = weight.double().abs() * centered + scaled * (centered + sums) + bias.double().abs() * EPS32
    assert found.is_contiguous()
    assert_within(found, exact, bound + 1.01 * half_ulp(dtype) * exact.abs() + 1e-38)


@pytest.mark.parametrize("layout", ["dense", "slice", "swapped"])
def test_layer_norm_takes_any_leading_strides(layout: str) -> None:
    x, weight, bias = layouts(5, 3, 72, torch.bfloat16)[layout], randn(72).bfloat16(), randn(72, seed=1).bfloat16()
    found = tower_ops.layer_norm(x, weight, bias, 1e-6)
    assert torch.equal(found, tower_ops.layer_norm(x.contiguous().view(15, 72), weight, bias, 1e-6).view(5, 3, 72))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tanh", [False, True], ids=["erf", "tanh"])
@pytest.mark.parametrize("d", [*WIDTHS, 4304])
def test_gelu_is_exact_to_rounding(dtype: torch.dtype, tanh: bool, d: int) -> None:
    x = inside_nan((3 * randn(5, d)).to(dtype))
    exact = functional.gelu(x.double(), approximate="tanh" if tanh else "none")
    found = tower_ops.gelu(x, tanh)
    assert found.is_contiguous()
    assert_within(found, exact, 8 * EPS32 * x.double().abs() + 1.01 * half_ulp(dtype) * exact.abs())


@pytest.mark.parametrize("tanh", [False, True], ids=["erf", "tanh"])
def test_gelu_of_large_and_special_values(tanh: bool) -> None:
    x = torch.tensor([[0.0, 1e4, -1e4, 1e38, -1e38, 100.0, -100.0, -12.0, float("nan")]])
    found = tower_ops.gelu(x, tanh)[0]
    assert found[:7].tolist() == [0.0, 1e4, 0.0, x[0, 3], 0.0, 100.0, 0.0]
    assert abs(float(found[7])) < 1e-6 and found[8].isnan()


@pytest.mark.parametrize("tanh", [False, True], ids=["erf", "tanh"])
def test_gelu_rounds_as_torch_does(tanh: bool) -> None:
    x = randn(64, 300, dtype=torch.bfloat16)
    assert_same_rounding(tower_ops.gelu(x, tanh), functional.gelu(x, approximate="tanh" if tanh else "none"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["dense", "slice", "swapped"])
@pytest.mark.parametrize("d", [2, 10, 64, 72, 130])
def test_rotary_float_equals_that_of_transformers(dtype: torch.dtype, layout: str, d: int) -> None:
    from transformers.models.qwen3_vl.modeling_qwen3_vl import apply_rotary_pos_emb_vision

    q, k = layouts(6, 5, d, dtype)[layout], layouts(6, 2, d, dtype)[layout]
    angles = torch.randint(0, 64, (6, 1)) * 10000.0 ** -torch.rand(d // 2)
    rows = torch.stack([angles.cos(), angles.sin()], 1)
    cos, sin = (part.repeat(1, 2) for part in rows.unbind(1))
    expected = apply_rotary_pos_emb_vision(q.double(), k.double(), cos, sin)
    exact = apply_rotary_pos_emb_vision(q, k, cos, sin)
    sizes = [x.double().abs() for x in (q, k)]
    tower_ops.rotary_float_(q, k, rows)
    for found, rounded, want, size in zip((q, k), exact, expected, sizes, strict=True):
        most = size + size.roll(d // 2, -1)
        assert_within(found, want.double(), 3 * EPS32 * most + 1.01 * half_ulp(dtype) * want.double().abs())
        assert_within(found, rounded.double(), 4 * EPS32 * most + 2.02 * half_ulp(dtype) * want.double().abs())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", WIDTHS)
def test_interpolate_rows_sums_four_rows(dtype: torch.dtype, d: int) -> None:
    table = inside_nan(randn(36, d, dtype=dtype))
    rows = torch.randint(0, 36, (9, 7))[:, 2:6]
    weights = torch.rand(9, 5)[:, :4]
    found = tower_ops.interpolate_rows(table, rows, weights)
    products = table.double()[rows] * weights.double()[..., None]
    bound = 4 * EPS32 * products.abs().sum(1) + 1.01 * half_ulp(dtype) * products.sum(1).abs()
    assert_within(found, products.sum(1), bound)
    assert found.dtype is dtype and torch.equal(found[3], tower_ops.interpolate_rows(table, rows[3:4], weights[3:4])[0])


def test_interpolate_rows_resamples_a_grid() -> None:
    """With the taps of a bilinear resampling it is torch's, of a 5 x 5 grid to 3 x 9 with aligned corners."""
    table = randn(25, 20)
    height, width = (torch.linspace(0, 4, n) for n in (3, 9))
    top, left = height.floor().clamp(max=3).long()[:, None], width.floor().clamp(max=3).long()[None]
    down, right = height[:, None] - top, width[None] - left
    rows = torch.stack([5 * (top + y) + left + x for y in (0, 1) for x in (0, 1)], -1).view(27, 4)
    weights = torch.stack([y * x for y in (1 - down, down) for x in (1 - right, right)], -1).view(27, 4)
    grid = table.T.view(1, 20, 5, 5)
    expected = functional.interpolate(grid, (3, 9), mode="bilinear", align_corners=True).view(20, 27).T
    torch.testing.assert_close(tower_ops.interpolate_rows(table, rows, weights), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("bad", [-1, 9])
@pytest.mark.parametrize("at", [(0, 3), (2, 0)])
def test_interpolate_rows_refuses_rows_out_of_range(bad: int, at: tuple[int, int]) -> None:
    rows = torch.zeros(3, 4, dtype=torch.int64)
    rows[at] = bad
    with pytest.raises(KernelError, match=rf"interpolate_rows: rows: expected values in \[0, 9\), found {bad}"):
        tower_ops.interpolate_rows(randn(9, 4), rows, torch.ones(3, 4))


X, ROWS = randn(4, 6), torch.zeros(4, 4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: tower_ops.layer_norm(X, X[0], X[0, :5], 1e-6), r"layer_norm: bias: expected shape \[6\], found \[5\]"),
        (lambda: tower_ops.layer_norm(X, X[0].bfloat16(), X[0], 1e-6), "layer_norm: weight: expected dtype float32"),
        (lambda: tower_ops.gelu(X.half(), True), "gelu: x: expected dtype float32 or bfloat16, found float16"),
        (lambda: tower_ops.gelu(X.T, True), "gelu: x: expected a contiguous last dimension"),
        (
            lambda: tower_ops.rotary_float_(X[:, None], X[:, None], X.view(4, 2, 3).bfloat16()),
            "rotary_float_: angles: expected dtype float32",
        ),
        (
            lambda: tower_ops.rotary_float_(X[:, None], X[:, None], X.view(4, 2, 3)[:, :, :2]),
            r"rotary_float_: angles: expected shape \[4, 2, 3\], found \[4, 2, 2\]",
        ),
        (
            lambda: tower_ops.rotary_float_(X[:, None, :3], X[:, None, :3], X.view(4, 2, 3)[:, :, :1]),
            "rotary_float_: q: expected an even head dimension, found 3",
        ),
        (lambda: tower_ops.interpolate_rows(X, ROWS[:, :3], X[:, :3]), "interpolate_rows: rows: expected shape"),
        (lambda: tower_ops.interpolate_rows(X, ROWS, X[:3, :4]), "interpolate_rows: weights: expected shape"),
    ],
)
def test_a_wrong_argument_is_named(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(KernelError, match=sentence):
        call()


def rotated(q: Tensor) -> Tensor:
    heads, angles = ops.add(q, q).view(-1, 2, 20), torch.ones(q.shape[0], 2, 10)
    tower_ops.rotary_float_(heads, heads[:, :0], angles)
    return heads.view(-1, 40)


ROW_KERNELS = {
    "layer_norm": lambda x: tower_ops.layer_norm(x, x.new_ones(40), x.new_ones(40), 1e-6),
    "gelu-erf": lambda x: tower_ops.gelu(x, False),
    "gelu-tanh": lambda x: tower_ops.gelu(x, True),
    "rotary_float": rotated,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ROW_KERNELS)
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype, name: str) -> None:
    x, kernel = randn(33, 40, dtype=dtype), ROW_KERNELS[name]
    together = kernel(x)
    for row in (0, 7, 32):
        assert torch.equal(kernel(x[row : row + 1])[0], together[row])
    assert kernel(x[:0]).shape == (0, 40)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_recording_computes_the_same(dtype: torch.dtype, rung: str) -> None:
    if rung == "reference":
        pytest.skip("it has no launches to record")
    x, weight, bias = (torch.zeros(shape, dtype=dtype) for shape in ((5, 40), (40,), (40,)))
    angles, rows, weights = torch.zeros(5, 2, 10), torch.zeros(5, 4, dtype=torch.int64), torch.zeros(5, 4)

    def step() -> Tensor:
        normed = tower_ops.layer_norm(x, weight, bias, 1e-6)
        q, k = (core.view(normed, (5, 1, 20), (40, 20, 1), first) for first in (0, 20))
        tower_ops.rotary_float_(q, k, angles)
        hidden = ops.add(tower_ops.gelu(normed, True), tower_ops.gelu(normed, False))
        ops.put_rows_(hidden, rows[0, :1], tower_ops.interpolate_rows(x, rows[:1], weights[:1]))
        ops.add_rows_(hidden, rows[1, :1], tower_ops.interpolate_rows(x, rows[1:2], weights[1:2]))
        return hidden

    graph = Graph(step)
    for seed in (1, 2):
        for number, tensor in enumerate((x, weight, bias, angles, weights)):
            tensor.copy_(randn(*tensor.shape, seed=10 * seed + number))
        rows.random_(0, 5)
        assert torch.equal(graph.run(), step())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", [1, 17, 300])
def test_tanh_gate_hides_rows_and_scales_the_rest(dtype: torch.dtype, d: int) -> None:
    x, gate = inside_nan(randn(4, d, dtype=dtype)), torch.tensor([0.7], dtype=dtype)
    x[2] = float("inf")
    shown = torch.tensor([1.0, 0.0, 0.0, 1.0])
    exact = x.double() * gate.double().tanh().to(dtype).double()
    exact[1:3] = 0
    tower_ops.tanh_gate_(x, gate, shown)
    assert_within(x, exact, 1.01 * half_ulp(dtype) * exact.abs())
    rows = randn(3, d, dtype=dtype, seed=1)
    exact = rows.double() * gate.double().tanh().to(dtype).double()
    tower_ops.tanh_gate_(rows, gate)
    assert_within(rows, exact, 1.01 * half_ulp(dtype) * exact.abs())


def test_tanh_gate_names_a_wrong_argument() -> None:
    with pytest.raises(KernelError, match=r"tanh_gate_: shown: expected shape \[2\], found \[3\]"):
        tower_ops.tanh_gate_(randn(2, 8), randn(1), torch.ones(3))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", [0, *WIDTHS])
def test_clamp_is_exact(rung: str, dtype: torch.dtype, d: int) -> None:
    x = inside_nan(randn(5, d, dtype=dtype))
    x[1] = float("nan")
    for low, high in ((-0.7, 0.4), (-float("inf"), -0.2), (0.1, float("inf"))):
        bounds = torch.tensor([[low], [high]], dtype=dtype)
        found = tower_ops.clamp(x, *bounds)
        assert found.is_contiguous()
        torch.testing.assert_close(found, torch.clamp(x, *bounds), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mul_rounds_once(rung: str, dtype: torch.dtype) -> None:
    x, y = randn(5, 520, dtype=dtype)[:, :517], randn(5, 530, dtype=dtype, seed=1)[:, 2:519]
    wanted = x * y
    ops.mul_(x, y)
    assert torch.equal(x, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("d", "half", "distance"), [(128, 16, 64), (40, 5, 20), (24, 4, 20), (24, 12, 12)])
def test_pairs_of_any_distance_are_rotated(rung: str, dtype: torch.dtype, d: int, half: int, distance: int) -> None:
    """The result is that of `rotary_` after the pairs are brought together. k may have no heads."""
    firsts = [*range(half), *range(distance, distance + half)]
    order = torch.tensor(firsts + [i for i in range(d) if i not in firsts])
    q, weight, angles = randn(6, 5, d, dtype=dtype), randn(d, dtype=dtype, seed=1), randn(6, half, seed=2)
    rows = torch.stack([angles.cos(), angles.sin()], 1).to(dtype)
    wanted = ops.rms_norm(q, weight, 1e-5)[..., order]
    ops.rotary_(wanted, wanted[:, :0], rows)
    ops.norm_rotary_(q, q[:, :0], weight, weight, 1e-5, rows, distance=distance)
    assert torch.equal(q[..., order], wanted)


def test_a_distance_beyond_the_head_is_refused() -> None:
    q, weight, rows = torch.zeros(4, 2, 24), torch.zeros(24), torch.zeros(4, 2, 4)
    with pytest.raises(KernelError, match=r"^norm_rotary_: distance: expected 4 to 20, found 21$"):
        ops.norm_rotary_(q, q, weight, weight, 1e-5, rows, distance=21)
