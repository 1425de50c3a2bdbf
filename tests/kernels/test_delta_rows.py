"""The row kernels of gated delta nets on every rung, against float64 arithmetic and the modules of transformers."""

from collections.abc import Callable, Collection, Mapping
from itertools import accumulate, pairwise

import pytest
import torch
from matrices import DTYPES, EPS32, assert_same_rounding, assert_within, half_ulp, inside_nan, randn
from torch import Tensor
from torch.nn import functional

from tilerank.kernels import core, delta
from tilerank.kernels.errors import KernelError
from tilerank.kernels.state_slots import StateSlots

pytestmark = pytest.mark.usefixtures("rung")


DRAFTS = 7
NONE: Mapping[int, int] = {}


class Streams:
    """Random inputs of sequences, and the convolution of parts of them."""

    def __init__(self, lengths: list[int], channels: int, width: int, dtype: torch.dtype) -> None:
        self.inputs = [randn(n, channels, dtype=dtype, seed=i) for i, n in enumerate(lengths)]
        self.weight = randn(channels, width, dtype=dtype, seed=50)
        self.conv = torch.full((len(lengths) + 1, width - 1 + DRAFTS, channels), float("nan"), dtype=dtype)

    @property
    def windows(self) -> Tensor:
        return self.conv[:, : self.weight.shape[1] - 1]

    def run(
        self, parts: list[tuple[int, int, int]], kept: Mapping[int, int] = NONE, wrong: Collection[int] = ()
    ) -> list[Tensor]:
        """Compute rows start..stop of sequence i, whose slot is i + 1, for every part (i, start, stop).

        Parts of one row of a sequence that follow each other are its next row and drafts; the inputs of those in
        `wrong` are NaN.
        """
        sizes = [stop - start for _, start, stop in parts]
        lists = ([i + 1 for i, _, _ in parts], [kept.get(i, 0) for i, _, _ in parts], [0, *accumulate(sizes)])
        slots, kept_drafts, starts = (torch.tensor(values, dtype=torch.int32) for values in lists)
        lengths = torch.tensor([stop for _, _, stop in parts], dtype=torch.int32)
        rows = [self.inputs[i][start:stop] for i, start, stop in parts]
        x = inside_nan(torch.cat([row * float("nan") if j in wrong else row for j, row in enumerate(rows)]))
        return list(
            torch.split(delta.causal_conv(x, self.weight, self.conv, slots, kept_drafts, starts, lengths), sizes)
        )

    def assert_exact(self, i: int, found: Tensor) -> None:
        width = self.weight.shape[1]
        x = functional.pad(self.inputs[i].double(), (0, 0, width - 1, 0)).T
        exact = functional.silu(functional.conv1d(x, self.weight.double()[:, None], groups=x.shape[0]).T)
        sizes = functional.conv1d(x.abs(), self.weight.double().abs()[:, None], groups=x.shape[0]).T
        # `width` products are summed in fp32, whose error silu multiplies by at most 1.1; then a few operations in fp32
        # and one rounding.
        bound = 1.1 * width * EPS32 * sizes + (8 * EPS32 + 1.01 * half_ulp(found.dtype)) * exact.abs() + 1e-37
        assert_within(found, exact, bound)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("channels", [1, 17, 130, 1100])
def test_convolution_of_whole_sequences(dtype: torch.dtype, width: int, channels: int) -> None:
    lengths = [1, 2, 3, 4, 40]
    streams = Streams(lengths, channels, width, dtype)
    for i, found in enumerate(streams.run([(i, 0, n) for i, n in enumerate(lengths)])):
        streams.assert_exact(i, found)
        kept = functional.pad(streams.inputs[i], (0, 0, width, 0))[lengths[i] + 1 :]
        assert torch.equal(streams.windows[i + 1], kept)
    assert streams.conv[0].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cuts", [[1, 2, 3, 4, 5], [4, 6], [2, 9], [11]], ids=str)
def test_convolution_continues_with_the_same_bits(dtype: torch.dtype, cuts: list[int]) -> None:
    whole, parts = (Streams([12, 3], 70, 4, dtype) for _ in range(2))
    expected = whole.run([(0, 0, 12)])[0]
    found = [parts.run([(0, *part)])[0] for part in pairwise([0, *cuts, 12])]
    assert torch.equal(torch.cat(found), expected)
    assert torch.equal(parts.windows[1], whole.windows[1])


def test_convolution_of_a_mixture_on_any_number_of_threads() -> None:
    lengths = [5, 1, 9]
    parts = [(i, 0, n) for i, n in enumerate(lengths)]
    alone = Streams(lengths, 300, 4, torch.bfloat16)
    expected = [alone.run([part])[0] for part in parts]
    for threads in (1, 4):
        core.start_pool(None, threads, spin=False)
        together = Streams(lengths, 300, 4, torch.bfloat16)
        assert all(map(torch.equal, together.run(parts), expected))
        assert torch.equal(together.windows[1:], alone.windows[1:])


def test_padding_of_a_convolution_repeats_a_row() -> None:
    one, two = (Streams([2, 2], 70, 4, torch.float32) for _ in range(2))
    for streams in (one, two):
        streams.run([(0, 0, 1), (1, 0, 1)])
    expected = two.run([(0, 1, 2), (1, 1, 2)])
    x = torch.cat([one.inputs[0][1:], one.inputs[1][1:], torch.full((2, 70), float("nan"))])
    slots, lengths = (torch.tensor(values, dtype=torch.int32) for values in ([1, 2, -1, -2], [2, 2, 1, 1]))
    starts, kept = torch.arange(5, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    found = delta.causal_conv(x, one.weight, one.conv, slots, kept, starts, lengths)
    assert torch.equal(found, torch.cat([*expected, *expected]))
    assert torch.equal(one.windows[1:], two.windows[1:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_convolution_of_drafts_has_the_bits_of_single_steps(dtype: torch.dtype, width: int) -> None:
    """(drafts, right ones) of the steps of a sequence, beside one that has none."""
    plain, drafted = (Streams([28, 7], 70, width, dtype) for _ in range(2))
    expected = [[plain.run([(i, t, t + 1)])[0] for t in range(n)] for i, n in enumerate((28, 7))]
    at, kept = 0, 0
    for number, (drafts, right) in enumerate([(7, 7), (7, 0), (0, 0), (3, 2), (1, 1), (6, 6), (2, 0)]):
        rows = [(0, t, t + 1) for t in range(at, at + 1 + drafts)]
        parts = [*rows, (1, number, number + 1)]
        found = drafted.run(parts, {0: kept}, range(right + 1, drafts + 1))
        assert all(map(torch.equal, found[: right + 1], expected[0][at:]))
        assert torch.equal(found[-1], expected[1][number])
        at, kept = at + 1 + right, right
    rest = drafted.run([(0, at, 28)])[0]
    assert torch.equal(rest, torch.cat(expected[0][at:]))
    assert torch.equal(drafted.windows[1:], plain.windows[1:])


def test_convolution_refuses_a_slot_that_does_not_exist() -> None:
    streams = Streams([1], 8, 4, torch.float32)
    streams.conv = streams.conv[:1]
    with pytest.raises(KernelError, match="causal_conv: slots: expected at most 0 for sequence 0, found 1"):
        streams.run([(0, 0, 1)])


def test_convolution_refuses_slots_without_room() -> None:
    streams = Streams([9], 8, 4, torch.float32)
    with pytest.raises(
        KernelError, match="causal_conv: slots: expected 0 to 7 drafts of the sequence in slot 1, found 8"
    ):
        streams.run([(0, t, t + 1) for t in range(9)])
    streams.conv = streams.conv[:, :2]
    with pytest.raises(KernelError, match="causal_conv: conv: expected at least 3 rows, found 2"):
        streams.run([(0, 0, 1)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("log_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [1, 6, 33])
def test_gating(dtype: torch.dtype, log_dtype: torch.dtype, heads: int) -> None:
    a, b = (inside_nan((8 * randn(7, heads, seed=seed)).to(dtype)) for seed in (0, 1))
    a[0, 0], a[1, 0], a[2, 0], b[0, 0], b[1, 0] = 300.0, -300.0, 20.5, 300.0, -300.0
    a_log, dt_bias = randn(heads, dtype=log_dtype, seed=2), randn(heads, dtype=log_dtype, seed=3)
    g, beta = delta.delta_gating(a, b, a_log, dt_bias)
    x = a.double() + dt_bias.double()
    # a + dt_bias is rounded to fp32 once, which moves softplus by at most as much, relatively by |x|.
    exact = -a_log.double().exp() * (x.clamp(min=0) + (-x.abs()).exp().log1p())
    assert_within(g, exact, (16 + x.abs()) * EPS32 * exact.abs() + 1e-37)
    exact = b.double().sigmoid()
    assert_within(beta, exact, (8 * EPS32 + 1.01 * half_ulp(dtype)) * exact + 1e-37)
    assert torch.equal(beta, beta.to(dtype).float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads, d", [(1, 1), (3, 24), (20, 128), (2, 130)])
def test_gated_norm(dtype: torch.dtype, heads: int, d: int) -> None:
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

    o, z = (inside_nan(randn(5, heads * d, dtype=dtype, seed=seed)) for seed in (0, 1))
    module = Qwen3_5RMSNormGated(d, 1e-6)
    module.weight.data = randn(d, dtype=dtype, seed=2)
    found = delta.gated_norm(o, z, module.weight.data, 1e-6)
    expected = module(o.reshape(-1, d), z.reshape(-1, d)).detach().view(5, heads * d)
    if dtype == torch.bfloat16:
        assert_same_rounding(found.contiguous(), expected)
    else:
        # The sum of d squares, halved by the root, and some ten operations.
        assert_within(found, expected.double(), expected.double().abs() * (d / 4 + 12) * EPS32 + 1e-37)


def assert_gates(x: Tensor, gate: Tensor) -> None:
    """Assert that `sigmoid_gate_` rounds as torch does, or is within a few units of fp32."""
    expected = x * torch.sigmoid(gate)
    delta.sigmoid_gate_(x, gate)
    if x.dtype == torch.bfloat16:
        assert_same_rounding(x, expected)
    else:
        assert_within(x, expected.double(), expected.double().abs() * 8 * EPS32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gate_of_attention_is_a_part_of_the_query_projection(dtype: torch.dtype) -> None:
    projection, x = randn(5, 3, 2 * 40, dtype=dtype), randn(5, 3, 43, dtype=dtype, seed=1)[..., :40]
    assert_gates(x, projection[..., 40:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 17, 600])
def test_gate_of_a_row(dtype: torch.dtype, columns: int) -> None:
    """As the shared expert of Qwen3.5-MoE has it."""
    assert_gates(inside_nan(randn(6, columns, dtype=dtype)), inside_nan(randn(6, 1, dtype=dtype, seed=1)))


def test_gates_refuse_shapes_that_do_not_fit() -> None:
    with pytest.raises(KernelError, match="sigmoid_gate_: gate: expected 4 or 1 columns, found 2"):
        delta.sigmoid_gate_(torch.zeros(3, 4), torch.zeros(3, 2))
    with pytest.raises(KernelError, match="gated_norm: o: expected heads of 3 columns, found 4 columns"):
        delta.gated_norm(torch.zeros(1, 4), torch.zeros(1, 4), torch.zeros(3), 1e-6)


@pytest.mark.parametrize("ratio", [1, 2, 3, 4])
def test_layer_equals_that_of_transformers(ratio: int) -> None:
    """All kernels in turn, with a prompt in three chunks and two steps, against the module of transformers."""
    from transformers.cache_utils import DynamicCache
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

    keys, values, dk, dv = 2, 2 * ratio, 16, 24
    config = Qwen3_5TextConfig(
        hidden_size=32,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=keys,
        linear_num_value_heads=values,
        linear_key_head_dim=dk,
        linear_value_head_dim=dv,
    )
    torch.manual_seed(ratio)
    build: Callable[..., Qwen3_5GatedDeltaNet] = Qwen3_5GatedDeltaNet  # asks for the config of the whole model
    module = build(config, 0).eval()
    x, cache = torch.randn(1, 131, 32), DynamicCache(config=config)
    states = StateSlots.empty(1, 4, 2 * keys * dk + values * dv, values, dk, dv, torch.float32, 0)
    for tensor in (states.conv, states.state):
        tensor.fill_(float("nan"))
    slots, kept = torch.zeros(2, 1, dtype=torch.int32)
    with torch.no_grad():
        expected = torch.cat([module(x[:, :129], cache), module(x[:, 129:130], cache), module(x[:, 130:], cache)], 1)
        projections = (module.in_proj_qkv, module.in_proj_z, module.in_proj_b, module.in_proj_a)
        fused = torch.cat([projection(x[0]) for projection in projections], 1)
        found = []
        for start, stop in pairwise([0, 1, 66, 129, 130, 131]):
            starts, lengths = (torch.tensor(values, dtype=torch.int32) for values in ([0, stop - start], [stop]))
            batch = (slots, kept, starts, lengths)
            sizes = [2 * keys * dk + values * dv, values * dv, values, values]
            qkv, z, b, a = torch.split(fused[start:stop], sizes, dim=1)
            qkv = delta.causal_conv(qkv, module.conv1d.weight[:, 0], states.conv, *batch)
            g, beta = delta.delta_gating(a, b, module.A_log, module.dt_bias)
            o = delta.delta_rule(qkv, g, beta, states, *batch, key_heads=keys)
            found.append(module.out_proj(delta.gated_norm(o, z, module.norm.weight, config.rms_norm_eps)))
    assert_within(torch.cat(found), expected[0].double(), 1e-5)
