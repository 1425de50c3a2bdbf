"""The row kernels on every rung, against float64 arithmetic and against the modules of transformers."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from matrices import DTYPES, EPS32, assert_same_rounding, assert_within, half_ulp, layouts, randn
from torch import Tensor

from tilerank.kernels import core, ops
from tilerank.kernels.errors import KernelError
from tilerank.kernels.joint_norm import head_squares, joint_norm_

pytestmark = pytest.mark.usefixtures("rung")

# The rung fixture stays the same for all examples of a test, so this warning of hypothesis does not apply.
on_rung = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def exact_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    x64 = x.double()
    return x64 / (x64.pow(2).mean(-1, keepdim=True) + eps).sqrt() * (weight.double() + (1 if zero_centered else 0))


def norm_bound(x: Tensor, exact: Tensor, zero_centered: bool) -> Tensor:
    # d squares summed in fp32 (relative error below d / 2 units, halved by the root), a few more fp32 operations, and
    # one rounding to the result's dtype (two in the default form).
    fp32 = (x.shape[-1] / 4 + 6) * EPS32
    return exact.abs() * (fp32 + (1 if zero_centered else 2) * 1.01 * half_ulp(x.dtype)) + 1e-38


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("zero_centered", [False, True], ids=["plain", "zero-centred"])
@on_rung
@given(d=st.integers(1, 300), rows=st.integers(0, 5), scale=st.sampled_from([1e-4, 1.0, 1e4]), seed=st.integers(0, 9))
def test_rms_norm_is_exact_to_rounding(
    dtype: torch.dtype, zero_centered: bool, d: int, rows: int, scale: float, seed: int
) -> None:
    x, weight = (randn(rows, d, seed=seed) * scale).to(dtype), randn(d, dtype=dtype, seed=seed + 10)
    exact = exact_norm(x, weight, 1e-6, zero_centered)
    assert_within(
        ops.rms_norm(x, weight, 1e-6, zero_centered=zero_centered), exact, norm_bound(x, exact, zero_centered)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["dense", "slice", "swapped"])
def test_rms_norm_takes_any_leading_strides(dtype: torch.dtype, layout: str) -> None:
    x, weight = layouts(5, 3, 72, dtype)[layout], randn(72, dtype=dtype, seed=3)
    found = ops.rms_norm(x, weight, 1e-5)
    assert found.is_contiguous()
    assert torch.equal(found, ops.rms_norm(x.contiguous().view(15, 72), weight, 1e-5).view(5, 3, 72))
    assert torch.equal(found[2, 1], ops.rms_norm(x[2, 1], weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_rounds_as_transformers_does(dtype: torch.dtype) -> None:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm

    x, weight = randn(64, 896, dtype=dtype), randn(896, dtype=dtype, seed=1)
    zero_centred = (Qwen3_5RMSNorm(896, 1e-6), Gemma3RMSNorm(896, 1e-6))
    for module, zero_centered in ((LlamaRMSNorm(896, 1e-6), False), *((each, True) for each in zero_centred)):
        module.weight.data = weight
        expected = module(x).detach()
        if dtype == torch.bfloat16:
            assert_same_rounding(ops.rms_norm(x, weight, 1e-6, zero_centered=zero_centered), expected)
        else:
            bound = norm_bound(x, expected.double(), zero_centered)
            assert_within(ops.rms_norm(x, weight, 1e-6, zero_centered=zero_centered), expected.double(), bound)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("zero_centered", [False, True], ids=["plain", "zero-centred"])
@pytest.mark.parametrize("d", [1, 7, 64, 1001])
def test_add_rms_norm_adds_in_place_then_norms(dtype: torch.dtype, zero_centered: bool, d: int) -> None:
    x, weight = randn(5, d + 3, dtype=dtype)[:, :d], randn(d, dtype=dtype, seed=2)
    residual = randn(5, d + 1, dtype=dtype, seed=1)[:, :d]
    total = residual + x
    found = ops.add_rms_norm(x, residual, weight, 1e-6, zero_centered=zero_centered)
    assert torch.equal(residual, total)
    assert torch.equal(found, ops.rms_norm(total, weight, 1e-6, zero_centered=zero_centered))
    post_weight = randn(d, dtype=dtype, seed=3)
    total += ops.rms_norm(x, post_weight, 1e-6, zero_centered=zero_centered)
    found = ops.add_rms_norm(x, residual, weight, 1e-6, post_weight=post_weight, zero_centered=zero_centered)
    assert torch.equal(residual, total)
    assert torch.equal(found, ops.rms_norm(total, weight, 1e-6, zero_centered=zero_centered))
    scale = randn(1, dtype=dtype, seed=4)
    for norm in (None, post_weight):
        total = (total + (x if norm is None else ops.rms_norm(x, norm, 1e-6, zero_centered=zero_centered))) * scale
        options = {"post_weight": norm, "scale": scale}
        found = ops.add_rms_norm(x, residual, weight, 1e-6, **options, zero_centered=zero_centered)
        assert torch.equal(residual, total)
    assert torch.equal(found, ops.rms_norm(total, weight, 1e-6, zero_centered=zero_centered))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scale_rounds_once(dtype: torch.dtype) -> None:
    x = randn(5, 520, dtype=dtype)[:, :517]
    scaled = (x.float() * 33.9375).to(dtype)
    ops.scale_(x, 33.9375)
    assert torch.equal(x, scaled)


def table(positions: int, half: int, dtype: torch.dtype) -> Tensor:
    """[positions, 2, half]: cosines and sines of every position and frequency."""
    angle = torch.arange(positions)[:, None] * 10000.0 ** -(torch.arange(half) / half)
    return torch.stack([angle.cos(), angle.sin()], 1).to(dtype)


def one_axis(half: int) -> Tensor:
    return torch.zeros(half, dtype=torch.int64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("half", [1, 4, 10, 64])
def test_rope_rows_of_text_are_rows_of_the_table(dtype: torch.dtype, half: int) -> None:
    all_rows = table(100, half, dtype)
    found = ops.rope_rows(all_rows, torch.tensor([[0, 1, 17, 5, 5, 99]]), one_axis(half))
    assert found.shape == (6, 2, half)
    for row, position in zip(found, (0, 1, 17, 5, 5, 99), strict=True):
        assert torch.equal(row, all_rows[position])


@pytest.mark.parametrize("axis_of", [[0, 0, 0, 1, 1, 2, 2, 2], [0, 1, 2, 0, 1, 2, 0, 0]], ids=["sections", "in-turn"])
def test_a_frequency_follows_the_positions_of_its_axis(axis_of: list[int]) -> None:
    """Sections as Qwen2-VL has them and frequencies in turn as Qwen3-VL, against a loop written by hand."""
    all_rows = table(30, 8, torch.float32)
    positions = torch.tensor([[4, 5, 29], [1, 0, 7], [2, 2, 11]])
    strided = torch.cat([positions, positions + 1], 1)[:, :3]
    found = ops.rope_rows(all_rows, strided, torch.tensor(axis_of))
    for token in range(3):
        for i, axis in enumerate(axis_of):
            position = int(positions[axis, token])
            assert torch.equal(found[token, :, i], all_rows[position, :, i])


def neighbours_apart(x: Tensor, rotated: int) -> Tensor:
    """x with the even ones of its first `rotated` dims before the odd ones: its pairs lie `rotated` / 2 apart."""
    return torch.cat([x[..., :rotated:2], x[..., 1:rotated:2], x[..., rotated:]], -1)


def exact_rotation(x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """x rotated in float64 as complex numbers, and the sum of the magnitudes that the two products have."""
    half = rows.shape[2]
    turn = torch.complex(rows[:, 0].double(), rows[:, 1].double())[:, None]
    pairs = torch.complex(x[..., :half].double(), x[..., half : 2 * half].double()) * turn
    size = torch.complex(x[..., :half].double().abs(), x[..., half : 2 * half].double().abs())
    most = (size.real + size.imag).repeat(1, 1, 2)
    return torch.cat([pairs.real, pairs.imag, x[..., 2 * half :].double()], -1), most


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["dense", "slice", "swapped"])
@pytest.mark.parametrize(("d", "half"), [(8, 4), (64, 32), (128, 64), (80, 40), (40, 10), (24, 1)])
@pytest.mark.parametrize("neighbours", [False, True], ids=["halves", "neighbours"])
def test_rotary_rotates_pairs(dtype: torch.dtype, layout: str, d: int, half: int, neighbours: bool) -> None:
    q, k = layouts(6, 5, d, dtype)[layout], layouts(6, 2, d, dtype)[layout]
    rows = table(100, half, dtype)[[0, 1, 17, 5, 5, 99]]
    given = [neighbours_apart(x, 2 * half) if neighbours else x.clone() for x in (q, k)]
    expected = [exact_rotation(x, rows) for x in given]
    rest = q[..., 2 * half :].clone()
    ops.rotary_(q, k, rows, neighbours=neighbours)
    for x, (exact, most) in zip((q, k), expected, strict=True):
        found = neighbours_apart(x, 2 * half) if neighbours else x
        rotated = exact[..., : 2 * half]
        bound = rotated.abs() * half_ulp(dtype) * 1.01 + 2 * EPS32 * most
        assert_within(found[..., : 2 * half], rotated, bound)
    assert torch.equal(q[..., 2 * half :], rest)


@pytest.mark.parametrize("neighbours", [False, True], ids=["llama", "deepseek"])
def test_rotary_equals_that_of_transformers(neighbours: bool) -> None:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k = randn(7, 4, 64), randn(7, 2, 64, seed=1)
    rows = table(10, 32, torch.float32)[3:]
    cos, sin = (part.repeat(1, 2) for part in rows.unbind(1))
    if neighbours:  # its result has the even dims first
        rotate: Callable[..., tuple[Tensor, Tensor]] = apply_rotary_pos_emb_interleave  # has no types of its own
        rotated = rotate(*(x[None].transpose(1, 2) for x in (q, k)), cos[None], sin[None])
        expected = tuple(x[0].transpose(0, 1) for x in rotated)
    else:
        expected = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1)
    ops.rotary_(q, k, rows, neighbours=neighbours)
    for x, want in zip((q, k), expected, strict=True):
        found = neighbours_apart(x, 64) if neighbours else x
        torch.testing.assert_close(found, want, rtol=0, atol=4 * EPS32 * float(want.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["dense", "slice", "swapped"])
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize(("d", "half"), [(128, 64), (40, 10), (24, 12)])
def test_norm_rotary_is_a_norm_and_a_rotation(
    dtype: torch.dtype, layout: str, zero_centered: bool, d: int, half: int
) -> None:
    q, k = layouts(6, 5, d, dtype)[layout], layouts(6, 2, d, dtype)[layout]
    q_weight, k_weight = (randn(d, dtype=dtype, seed=seed) for seed in (3, 4))
    rows = table(100, half, dtype)[[0, 1, 17, 5, 5, 99]]
    expected_q = ops.rms_norm(q, q_weight, 1e-5, zero_centered=zero_centered)
    expected_k = ops.rms_norm(k, k_weight, 1e-5, zero_centered=zero_centered)
    ops.rotary_(expected_q, expected_k, rows)
    ops.norm_rotary_(q, k, q_weight, k_weight, 1e-5, rows, zero_centered=zero_centered)
    assert torch.equal(q, expected_q)
    assert torch.equal(k, expected_k)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["dense", "swapped"])
@pytest.mark.parametrize("d", [8, 40, 72])
def test_a_joint_norm_is_that_of_all_heads(dtype: torch.dtype, layout: str, d: int) -> None:
    """The heads are in two parts. Both have key head 1, and the second has a padded query head."""
    q, k = layouts(5, 6, d, dtype)[layout], layouts(5, 3, d, dtype)[layout]
    q_weight, k_weight = randn(6, d, dtype=dtype, seed=3), randn(3, d, dtype=dtype, seed=4)
    exact = [exact_norm(x.flatten(1), w.flatten(), 1e-3, False) for x, w in ((q, q_weight), (k, k_weight))]
    bounds = [norm_bound(x.flatten(1), right, False).view_as(x) for x, right in zip((q, k), exact, strict=True)]
    padding = torch.zeros(5, 1, d, dtype=dtype)
    parts = [(q[:, :4], k[:, :2], 0), (torch.cat([q[:, 4:], padding], 1), k[:, 1:], 1)]
    weights = [(q_weight[:4], k_weight[:2]), (torch.cat([q_weight[4:], torch.ones_like(padding[0])]), k_weight[1:])]
    squares = sum((head_squares(*part) for part in parts), torch.zeros(5, 2))
    again = parts[1][1].clone()
    joint_norm_(*parts[0][:2], *weights[0], squares, 6 * d, 3 * d, 1e-3)
    joint_norm_(parts[1][0], again, *weights[1], squares, 6 * d, 3 * d, 1e-3)
    found = torch.cat([parts[0][0], parts[1][0]], 1), torch.cat([parts[0][1], again[:, 1:]], 1)
    assert not found[0][:, 6:].any()
    for ours, right, bound in zip((found[0][:, :6], found[1]), exact, bounds, strict=True):
        assert_within(ours, right.view_as(ours), bound)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@on_rung
@given(rows=st.integers(0, 4), width=st.integers(1, 600), scale=st.sampled_from([0.1, 3.0, 40.0]))
def test_silu_mul_is_exact_to_rounding(dtype: torch.dtype, rows: int, width: int, scale: float) -> None:
    gate_up = (randn(rows, 2 * width + 5) * scale).to(dtype)[:, : 2 * width]
    gate, up = gate_up.double().chunk(2, -1)
    exact = gate * torch.sigmoid(gate) * up
    # exp is accurate to 2 units; 1 + exp, the division and the product add one rounding each, and bfloat16 adds two
    # roundings. exp overflows fp32 below -88.7, where the exact result is below 1e-36 times up.
    bound = exact.abs() * (6 * EPS32 + 2.02 * half_ulp(dtype)) + up.abs() * 1e-36
    assert_within(ops.silu_mul(gate_up), exact, bound)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
def test_silu_mul_of_gates_beyond_the_range_of_their_exponential(rung: str, dtype: torch.dtype) -> None:
    gate = torch.tensor([-3e38, -1e30, -1000.0, -100.0, -89.0, -88.5, -88.0, -20.0, 88.0, 3e38], dtype=dtype)
    for up in (3e38, -3e38, 1.0):
        found = ops.silu_mul(torch.cat([gate, torch.full_like(gate, up)])[None])[0]
        exact = torch.nn.functional.silu(gate) * torch.full_like(gate, up)
        torch.testing.assert_close(found, exact, rtol=1e-2 if dtype is torch.bfloat16 else 2e-6, atol=1e-36)


def test_gated_activations_round_as_transformers_does() -> None:
    gate_up = randn(16, 2 * 500, dtype=torch.bfloat16)
    gate, up = gate_up.chunk(2, -1)
    assert_same_rounding(ops.silu_mul(gate_up), torch.nn.functional.silu(gate) * up)
    assert_same_rounding(ops.gelu_tanh_mul(gate_up), torch.nn.functional.gelu(gate, approximate="tanh") * up)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gelu_tanh_mul_is_exact_to_rounding(rung: str, dtype: torch.dtype) -> None:
    gate_up = (randn(3, 2 * 300 + 5) * 4).to(dtype)[:, :600]
    gate, up = gate_up.double().chunk(2, -1)
    exact = torch.nn.functional.gelu(gate, approximate="tanh") * up
    # As for tower_ops.gelu: small results are differences of large numbers.
    bound = 8 * EPS32 * (gate * up).abs() + 2.02 * half_ulp(dtype) * exact.abs()
    assert_within(ops.gelu_tanh_mul(gate_up), exact, bound)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_is_exact_to_rounding(rung: str, dtype: torch.dtype) -> None:
    for rows, width in ((1, 1), (3, 17), (2, 600), (33, 130)):
        x = (randn(rows, width + 5) * 20).to(dtype)[:, :width]
        exact = x.double() * torch.sigmoid(x.double())
        # As above, but without a product and its rounding.
        assert_within(ops.silu(x), exact, exact.abs() * (5 * EPS32 + 1.01 * half_ulp(dtype)) + 1e-36)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_are_summed_in_fp32_and_rounded_once(rung: str, dtype: torch.dtype) -> None:
    for n, rows, width in ((1, 1, 1), (3, 3, 17), (16, 2, 600), (5, 33, 130)):
        parts = randn(n + 1, rows, width + 5, dtype=dtype)[1:, :, :width]
        total = torch.zeros(rows, width)
        for part in parts:
            total = total + part.float()
        assert torch.equal(ops.sum_parts(parts), total.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_embedding_shards_add_up_to_the_table(dtype: torch.dtype) -> None:
    table = randn(50, 33, dtype=dtype)
    ids = torch.tensor([0, 49, 20, 19, 20, 7, 33])
    assert torch.equal(ops.embedding(ids, table), table[ids])
    cuts = [0, 20, 20, 33, 50]
    parts = [ops.embedding(ids, table[a:b], first_row=a) for a, b in pairwise(cuts)]
    for part, (a, b) in zip(parts, pairwise(cuts), strict=True):
        held = (ids >= a) & (ids < b)
        assert torch.equal(part[held], table[ids[held]])
        assert not part[~held].any()
    assert torch.equal(torch.stack(parts).sum(0), table[ids])


def test_embedding_of_strided_rows_and_foreign_ids() -> None:
    table = randn(10, 40)[:, 3:19]
    ids = torch.tensor([-1, 3, 10, 2**40, -(2**63)])
    expected = torch.zeros(5, 16)
    expected[1] = table[3]
    assert torch.equal(ops.embedding(ids, table), expected)


def first_largest(row: list[float]) -> int:
    return row.index(max(row))


@on_rung
@given(
    st.lists(
        st.lists(
            st.sampled_from([-3.5, -0.0, 0.0, 1.0, 2.0, float("-inf"), float("inf"), 1e-45]), min_size=9, max_size=9
        ),
        min_size=1,
        max_size=5,
    )
)
def test_argmax_is_the_first_of_equals(rows: list[list[float]]) -> None:
    assert ops.argmax(torch.tensor(rows)).tolist() == [first_largest(row) for row in rows]


@pytest.mark.parametrize("at", [0, 4095, 4096, 12287, 12288, 13000])
def test_argmax_of_a_large_vocabulary(at: int) -> None:
    logits = randn(3, 13001).clamp_(max=4.0)
    logits[1, at] = 5.0
    logits[1, at + 1 :: 7] = 5.0
    found = ops.argmax(logits)
    assert found.dtype == torch.int64
    assert found.tolist() == [first_largest(row) for row in logits.tolist()]
    assert found[1] == at


@pytest.mark.parametrize("nan", [float("nan"), -float("nan")])
@pytest.mark.parametrize("at", [0, 4096, 4999])
def test_argmax_names_the_row_that_holds_nan(nan: float, at: int) -> None:
    logits = randn(4, 5000)
    logits[2, at] = torch.tensor(nan).copysign(torch.tensor(nan))
    with pytest.raises(KernelError, match=r"^argmax: logits: expected numbers, found NaN in row 2$"):
        ops.argmax(logits)


ROW_KERNELS: dict[str, Callable[[Tensor], Tensor]] = {
    "rms_norm": lambda x: ops.rms_norm(x, randn(x.shape[1], dtype=x.dtype, seed=9), 1e-6),
    "add_rms_norm": lambda x: ops.add_rms_norm(x, x * 2, randn(x.shape[1], dtype=x.dtype, seed=9), 1e-6),
    "silu_mul": ops.silu_mul,
    "gelu_tanh_mul": ops.gelu_tanh_mul,
    "silu": ops.silu,
    "sum_parts": lambda x: ops.sum_parts(torch.stack([x, x * 3, x * 5])),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ROW_KERNELS)
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype, name: str) -> None:
    x = randn(13, 518, dtype=dtype)
    together = ROW_KERNELS[name](x)
    assert torch.equal(ROW_KERNELS[name](x[4:11]), together[4:11])
    assert torch.equal(torch.cat([ROW_KERNELS[name](row[None]) for row in x]), together)
    core.start_pool(None, 1, spin=False)
    assert torch.equal(ROW_KERNELS[name](x), together)


X, W, IDS = torch.zeros(4, 6), torch.zeros(6), torch.zeros(4, dtype=torch.int64)
Q, TABLE, AXES = torch.zeros(4, 2, 6), torch.zeros(5, 2, 3), torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: ops.rms_norm(X, W[:5], 1e-6), "rms_norm: weight: expected shape [6], found [5]"),
        (lambda: ops.rms_norm(X, W.bfloat16(), 1e-6), "rms_norm: weight: expected dtype float32, found bfloat16"),
        (lambda: ops.rms_norm(X.half(), W, 1e-6), "rms_norm: x: expected dtype float32 or bfloat16, found float16"),
        (lambda: ops.rms_norm(X.T, W[:4], 1e-6), "rms_norm: x: expected a contiguous last dimension, found stride 6"),
        (lambda: ops.add_rms_norm(X, X[:3], W, 1e-6), "add_rms_norm: residual: expected shape [4, 6], found [3, 6]"),
        (lambda: ops.add_rms_norm(Q, Q, W, 1e-6), "add_rms_norm: x: expected shape [any, any], found [4, 2, 6]"),
        (lambda: ops.rope_rows(X, IDS[None], AXES), "rope_rows: table: expected shape [any, 2, any], found [4, 6]"),
        (lambda: ops.rope_rows(TABLE, IDS, AXES), "rope_rows: positions: expected shape [any, any], found [4]"),
        (lambda: ops.rope_rows(TABLE, IDS[None], IDS), "rope_rows: axis_of: expected shape [3], found [4]"),
        (lambda: ops.rope_rows(TABLE, IDS[None] + 5, AXES), "rope_rows: positions: expected values in [0, 5), found 5"),
        (
            lambda: ops.rope_rows(TABLE, IDS[None] - 1, AXES),
            "rope_rows: positions: expected values in [0, 5), found -1",
        ),
        (lambda: ops.rope_rows(TABLE, IDS[None], AXES + 1), "rope_rows: axis_of: expected values in [0, 1), found 1"),
        (lambda: ops.rotary_(Q, Q, TABLE), "rotary_: rows: expected shape [4, 2, any], found [5, 2, 3]"),
        (
            lambda: ops.rotary_(Q, Q, torch.zeros(4, 2, 4)),
            "rotary_: rows: expected at most 3 frequencies, found 4",
        ),
        (
            lambda: ops.norm_rotary_(Q, Q, W, W[:5], 1e-6, TABLE[:4]),
            "norm_rotary_: k_weight: expected shape [6], found [5]",
        ),
        (lambda: ops.silu_mul(X[:, :5]), "silu_mul: gate_up: expected an even number of columns, found 5"),
        (lambda: ops.embedding(IDS, W), "embedding: weight: expected shape [any, any], found [6]"),
        (lambda: ops.argmax(X.bfloat16()), "argmax: logits: expected dtype float32, found bfloat16"),
        (lambda: ops.argmax(X[:, :0]), "argmax: logits: expected at least one column, found shape [4, 0]"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_named(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(KernelError) as error:
        call()
    assert str(error.value) == sentence
