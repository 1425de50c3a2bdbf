"""Routers and fused experts on every rung: against transformers, and bit for bit against the separate kernels."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from matrices import randn
from torch import Tensor
from transformers import DeepseekV3Config, GptOssConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeTopKRouter

from tilerank.kernels import core
from tilerank.kernels.errors import KernelError
from tilerank.kernels.linear import linear
from tilerank.kernels.moe import ExpertActivation, moe, sigmoid_top_k, softmax_top_k
from tilerank.kernels.ops import gelu_tanh_mul, silu_mul
from tilerank.kernels.packed_experts import PackedExperts
from tilerank.kernels.weight_formats.floats import Float, FloatWeight
from tilerank.parallel.experts import ExpertsBias

BF16, F32 = torch.bfloat16, torch.float32
# transformers gives these no types.
EXPERTS: Callable[[Qwen3MoeConfig], Any] = Qwen3MoeExperts
CLAMPED: Callable[[GptOssConfig], Any] = GptOssExperts
ROUTER: Callable[[SimpleNamespace], Any] = Qwen3MoeTopKRouter
DTYPES = pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
GATED = {"silu_mul": silu_mul, "gelu_tanh_mul": gelu_tanh_mul}


def packed(plain: Tensor) -> FloatWeight:
    n, k = plain.shape
    weight = FloatWeight.empty(n, k, plain.dtype)
    weight.write(plain)
    return weight


class Experts:
    """Random experts, plain and packed."""

    def __init__(self, experts: int, hidden: int, width: int, dtype: torch.dtype) -> None:
        self.count, self.hidden, self.width = experts, hidden, width
        self.activation: ExpertActivation = "silu_mul"
        self.plain_gate_up = (randn(experts, 2 * width, hidden) * 1.5 * hidden**-0.5).to(dtype)
        self.plain_down = (randn(experts, hidden, width, seed=1) * 1.5 * width**-0.5).to(dtype)
        self.gate_up = PackedExperts.empty(experts, width, hidden, Float(dtype), parts=2)
        self.down = PackedExperts.empty(experts, hidden, width, Float(dtype))
        for expert in range(experts):
            for part in (0, 1):
                rows = self.plain_gate_up[expert, part * width : (part + 1) * width]
                self.gate_up.write(rows[: width // 2], expert, part=part)
                self.gate_up.write(rows[width // 2 :], expert, part=part, row=width // 2)
            self.down.write(self.plain_down[expert, :, :1], expert)
            self.down.write(self.plain_down[expert, :, 1:], expert, col=1)

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return moe(x, self.gate_up, self.down, ids, weights, activation=self.activation)

    def unfused(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Compute the same with the separate kernels."""
        outputs = torch.full((*ids.shape, self.hidden), float("nan"))
        for expert in torch.unique(ids).tolist():
            tokens, choices = torch.where(ids == expert)
            gate, up = (linear(x[tokens], packed(rows)) for rows in self.plain_gate_up[expert].chunk(2))
            middle = GATED[self.activation](torch.cat([gate, up], dim=-1))
            outputs[tokens, choices] = linear(middle, packed(self.plain_down[expert]), out_dtype=F32)
        total = torch.zeros(x.shape)
        for choice in range(ids.shape[1]):
            total = total + weights[:, choice, None] * outputs[:, choice]
        return total.to(x.dtype)

    def routed(self, m: int, top_k: int, dtype: torch.dtype, seed: int = 2) -> tuple[Tensor, Tensor, Tensor]:
        """Return x, ids and weights of m tokens; the first experts are chosen more often."""
        logits = randn(m, self.count, seed=seed + 1) - torch.arange(self.count) * (4 / self.count)
        return (randn(m, self.hidden, seed=seed).to(dtype), *softmax_top_k(logits.to(dtype), top_k, renormalize=True))


@DTYPES
@pytest.mark.parametrize("hidden, width", [(1, 1), (40, 70), (130, 33), (96, 80), (544, 48)])
@pytest.mark.parametrize("threads", [1, 3])
def test_experts_equal_the_separate_kernels(
    rung: str, dtype: torch.dtype, hidden: int, width: int, threads: int
) -> None:
    core.start_pool(None, threads, spin=False)
    experts = Experts(7, hidden, width, dtype)
    for m, top_k in ((1, 1), (1, 7), (3, 2), (17, 3), (70, 2)):
        x, ids, weights = experts.routed(m, top_k, dtype)
        experts.activation = "gelu_tanh_mul" if m in (3, 17) else "silu_mul"
        inside_nan = torch.full((m + 1, hidden + 9), float("nan"), dtype=dtype)
        inside_nan[:m, 4 : 4 + hidden] = x
        found = experts(inside_nan[:m, 4 : 4 + hidden], ids, weights)
        assert torch.equal(found, experts.unfused(x, ids, weights)), (m, top_k)


@pytest.mark.parametrize("hidden, width, m", [(1088, 100, 900), (64, 1600, 700), (1600, 1600, 420)])
def test_more_rows_of_an_expert_than_every_block(hidden: int, width: int, m: int) -> None:
    """Stripes and panels of both projections, whole rows (fewer than 24 or 12 tiles) and partial ones."""
    experts = Experts(3, hidden, width, BF16)
    x = randn(m, hidden, seed=2).to(BF16)
    ids = torch.stack([torch.zeros(m), torch.arange(m) % 7 == 3], dim=1).int()  # and most of the second choices
    weights = randn(m, 2, seed=3)
    found = experts(x, ids, weights)
    assert torch.equal(found, experts.unfused(x, ids, weights))
    core.start_pool(None, 4, spin=False)
    assert torch.equal(found, experts(x, ids, weights)), "depends on the number of threads"
    core.start_pool(None, 1, spin=False)


@DTYPES
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_more_rows_of_an_expert_than_a_stripe(rung: str, dtype: torch.dtype, threads: int) -> None:
    """More than 224 rows of one expert, 15 of another, more blocks than a stripe takes, more inputs than one part."""
    if rung == "reference":
        pytest.skip("has no stripes")
    core.start_pool(None, threads, spin=False)
    experts = Experts(4, 417, 600, dtype)
    x, ids = randn(260, 417, seed=2).to(dtype), torch.full((260, 1), 2)
    ids[::18] = 1
    weights = randn(260, 1, seed=3)
    found = experts(x, ids.int(), weights)
    assert torch.equal(found, experts.unfused(x, ids.int(), weights))
    core.start_pool(None, 1, spin=False)


@DTYPES
def test_a_row_has_the_same_bits_in_every_batch(rung: str, dtype: torch.dtype) -> None:
    experts = Experts(5, 70, 45, dtype)
    x, ids, weights = experts.routed(150, 2, dtype)
    alone = torch.cat([experts(x[i : i + 1], ids[i : i + 1], weights[i : i + 1]) for i in range(150)])
    for m in [*range(1, 150)] if rung != "reference" else [2, 17, 150]:
        assert torch.equal(experts(x[:m], ids[:m], weights[:m]), alone[:m]), f"{m} rows"
    assert torch.equal(experts(x[77:], ids[77:], weights[77:]), alone[77:])


@DTYPES
def test_experts_agree_with_transformers(rung: str, dtype: torch.dtype) -> None:
    """fp32: within the rounding of sums; bf16: no further from fp32 than transformers."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=136, moe_intermediate_size=80, num_experts=16, num_experts_per_tok=4, norm_topk_prob=True
    )
    config._experts_implementation = "grouped_mm"
    experts = Experts(16, 136, 80, dtype)
    theirs = EXPERTS(config)
    theirs.gate_up_proj.data, theirs.down_proj.data = experts.plain_gate_up, experts.plain_down
    x, ids, weights = experts.routed(60, 4, dtype)
    with torch.inference_mode():
        wanted = theirs(x, ids.long(), weights.to(dtype)).float()
        theirs.float()
        exact = theirs(x.float(), ids.long(), weights)
    found = experts(x, ids, weights).float()
    if dtype is F32:
        assert (found - wanted).abs().max() <= 2e-6 * wanted.abs().max()
    else:
        assert 0 < (found - exact).abs().mean() <= (wanted - exact).abs().mean()


@DTYPES
@pytest.mark.parametrize("hidden, width", [(136, 80), (40, 33)])
def test_experts_with_biases_agree_with_transformers(rung: str, dtype: torch.dtype, hidden: int, width: int) -> None:
    """fp32: within the rounding of sums; bf16: no further from fp32 than transformers. Some gates and ups are beyond
    the limits of 7."""
    config = GptOssConfig(hidden_size=hidden, intermediate_size=width, num_local_experts=6)
    config._experts_implementation = "eager"
    experts = Experts(6, hidden, width, dtype)
    biases = [randn(6, n, seed=4 + n).to(dtype) * 3 for n in (2 * width, hidden)]
    theirs = CLAMPED(config)
    turns = experts.plain_gate_up.view(6, 2, width, hidden).transpose(1, 2).flatten(1, 2)
    theirs.gate_up_proj.data, theirs.down_proj.data = turns.mT.contiguous(), experts.plain_down.mT.contiguous()
    theirs.gate_up_proj_bias.data, theirs.down_proj_bias.data = biases
    packed_biases = [ExpertsBias(6, width, parts=2), ExpertsBias(6, hidden)]
    for bias, plain in zip(packed_biases, biases, strict=True):
        bias.allocate()
        bias.write(plain, 0)
    x, ids, weights = experts.routed(40, 3, dtype)
    x = x * 2
    with torch.inference_mode():
        wanted = theirs(x, ids.long(), weights.to(dtype)).float()
        theirs.float()
        exact = theirs(x.float(), ids.long(), weights)

    def found(rows: slice) -> Tensor:
        of_gate_up, of_down = (bias.data for bias in packed_biases)
        operands = x[rows], experts.gate_up, experts.down, ids[rows], weights[rows]
        return moe(*operands, gate_up_bias=of_gate_up, down_bias=of_down, activation="swiglu_clamped").float()

    result = found(slice(0, 40))
    if dtype is F32:
        assert (result - wanted).abs().max() <= 3e-6 * wanted.abs().max()
    else:
        assert 0 < (result - exact).abs().mean() <= (wanted - exact).abs().mean()
    assert torch.equal(result, torch.cat([found(slice(i, i + 1)) for i in range(40)])), "depends on the batch"


def test_an_expert_may_be_chosen_twice_and_weigh_nothing(rung: str) -> None:
    experts = Experts(3, 40, 33, F32)
    x = randn(2, 40)
    once = experts(x, torch.tensor([[2], [1]], dtype=torch.int32), torch.ones(2, 1))
    ids = torch.tensor([[2, 2, 0], [1, 1, 1]], dtype=torch.int32)
    assert torch.equal(experts(x, ids, torch.tensor([[0.5, 0.5, 0.0], [1.0, 1.0, -1.0]])), once)
    assert experts(x[:0], ids[:0], torch.ones(0, 3)).shape == (0, 40)


def test_non_finite_values_stay_in_their_row(rung: str) -> None:
    experts = Experts(3, 64, 32, BF16)
    x, ids, weights = experts.routed(20, 2, BF16)
    clean = experts(x, ids, weights)
    x[3], x[9, 5] = float("nan"), float("inf")
    found = experts(x, ids, weights)
    kept = [row for row in range(20) if row not in (3, 9)]
    assert torch.equal(found[kept], clean[kept])
    assert found[3].isnan().all() and not found[9].isfinite().any()


@DTYPES
def test_weights_come_back_as_they_were_written(rung: str, dtype: torch.dtype) -> None:
    experts = Experts(4, 70, 45, dtype)
    for expert in range(4):
        gate, up = experts.gate_up.unpack(expert), experts.gate_up.unpack(expert, 1)
        assert torch.equal(torch.cat([gate, up]), experts.plain_gate_up[expert])
        assert torch.equal(experts.down.unpack(expert), experts.plain_down[expert])
    packed = experts.gate_up.weight
    assert isinstance(packed, FloatWeight)
    assert PackedExperts.nbytes(4, 45, 70, Float(dtype), parts=2) == packed.data.nbytes
    assert not PackedExperts.empty(2, 3, 5, Float(dtype)).unpack(1).any()


@DTYPES
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("experts, top_k", [(1, 1), (8, 2), (60, 4), (128, 8), (133, 133)])
def test_softmax_routing_equals_that_of_transformers(
    rung: str, dtype: torch.dtype, renormalize: bool, experts: int, top_k: int
) -> None:
    config = SimpleNamespace(
        num_experts_per_tok=top_k, num_experts=experts, norm_topk_prob=renormalize, hidden_size=experts
    )
    router = ROUTER(config)
    router.weight.data = torch.eye(experts, dtype=dtype)
    # All probabilities differ, in bf16 as well, so that the order is unique.
    steps = torch.stack([torch.randperm(experts, generator=torch.Generator().manual_seed(i)) for i in range(23)])
    logits = (steps / 16).to(dtype)
    _, weights, ids = router(logits)
    found_ids, found = softmax_top_k(logits, top_k, renormalize=renormalize)
    assert torch.equal(found_ids, ids.int())
    assert torch.equal(found, found.to(dtype).float())
    assert (found - weights.float()).abs().max() <= (2e-7 if dtype is F32 else 2.0**-9)
    alone = torch.cat([softmax_top_k(row[None], top_k, renormalize=renormalize)[1] for row in logits])
    assert torch.equal(alone, found)
    scales = torch.arange(experts) + 0.5
    scaled_ids, scaled = softmax_top_k(logits, top_k, renormalize=renormalize, scales=scales)
    assert torch.equal(scaled_ids, found_ids) and torch.equal(scaled, found * scales[found_ids.long()])


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(
    "experts, groups, top_groups, top_k", [(16, 4, 2, 4), (256, 8, 4, 8), (12, 6, 1, 2), (9, 1, 1, 9)]
)
def test_sigmoid_routing_equals_that_of_transformers(
    rung: str, renormalize: bool, experts: int, groups: int, top_groups: int, top_k: int
) -> None:
    config = DeepseekV3Config(
        num_experts_per_tok=top_k,
        n_routed_experts=experts,
        n_group=groups,
        topk_group=top_groups,
        norm_topk_prob=renormalize,
        routed_scaling_factor=2.5,
        hidden_size=experts,
    )
    router = DeepseekV3TopkRouter(config)
    router.weight.data = torch.eye(experts)
    bias = randn(experts, seed=1) * 0.1
    router.e_score_correction_bias.copy_(bias)
    logits = randn(40, experts)
    with torch.inference_mode():
        _, weights, ids = router(logits)
    found_ids, found = sigmoid_top_k(
        logits, bias, top_k, groups=groups, top_groups=top_groups, renormalize=renormalize, scale=2.5
    )
    # transformers returns them in no particular order
    order, found_order = ids.argsort(1), found_ids.argsort(1)
    assert torch.equal(found_ids.gather(1, found_order), ids.gather(1, order).int())
    assert (found.gather(1, found_order) - weights.gather(1, order)).abs().max() <= 1e-6
    assert bool(((torch.sigmoid(logits) + bias).gather(1, found_ids.long()).diff() <= 0).all()), (
        "not in descending order"
    )


def test_the_first_of_equals_is_chosen(rung: str) -> None:
    ids, weights = softmax_top_k(torch.tensor([[0.0, 1, 1, 0, 1]]), 4, renormalize=True)
    assert ids.tolist() == [[1, 2, 4, 0]] and weights[0, 0] == weights[0, 2] > weights[0, 3]
    logits = torch.zeros(1, 64)
    assert softmax_top_k(logits, 3, renormalize=False)[0].tolist() == [[0, 1, 2]]
    ids, weights = sigmoid_top_k(logits, torch.zeros(64), 3, groups=8, top_groups=2, renormalize=True, scale=3.0)
    assert ids.tolist() == [[0, 1, 2]] and torch.allclose(weights, torch.ones(1, 3))


def test_a_score_of_minus_infinity_is_chosen_once(rung: str) -> None:
    """A bias of -inf excludes an expert unless no other is left."""
    bias = torch.tensor([0.0, -math.inf, 0, -math.inf])
    ids, weights = sigmoid_top_k(torch.zeros(1, 4), bias, 4, groups=1, top_groups=1, renormalize=True, scale=1.0)
    assert ids.tolist() == [[0, 2, 1, 3]] and torch.allclose(weights, torch.full((1, 4), 0.25))


@pytest.mark.parametrize("experts", [20, 60])
def test_routing_of_a_token_does_not_depend_on_its_batch(rung: str, experts: int) -> None:
    logits, bias = randn(13, experts) * 3, randn(experts, seed=1)

    def route(rows: Tensor) -> tuple[Tensor, Tensor]:
        return sigmoid_top_k(rows, bias, 8, groups=4, top_groups=3, renormalize=False, scale=1.0)

    ids, weights = route(logits)
    for m in range(len(logits)):
        some_ids, some_weights = route(logits[:m])
        assert torch.equal(some_ids, ids[:m]) and torch.equal(some_weights, weights[:m]), m


def test_nan_logits_give_valid_experts(rung: str) -> None:
    """A row of NaN must still give valid expert ids."""
    logits = torch.full((2, 20), float("nan"))
    for ids, _ in (
        softmax_top_k(logits, 5, renormalize=True),
        sigmoid_top_k(logits, torch.zeros(20), 5, groups=5, top_groups=2, renormalize=True, scale=1.0),
    ):
        assert ids.min() >= 0 and ids.max() < 20


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"x": torch.zeros(2, 9)}, r"moe: x: expected shape \[any, 8\], found \[2, 9\]"),
        ({"x": torch.zeros(2, 8, dtype=BF16)}, "moe: x: expected dtype float32"),
        ({"ids": torch.zeros(2, 2, dtype=torch.int64)}, "moe: ids: expected dtype int32"),
        ({"ids": torch.zeros(2, 0, dtype=torch.int32), "weights": torch.ones(2, 0)}, "at least one expert a token"),
        ({"ids": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)}, r"moe: ids: expected values in \[0, 3\), found 3"),
        ({"ids": torch.tensor([[0, 1], [-1, 2]], dtype=torch.int32)}, "found -1"),
        ({"weights": torch.ones(2, 1)}, r"moe: weights: expected shape \[2, 2\]"),
        ({"down": (3, 8, 5, 1)}, r"moe: down: expected 1 part of 3 experts \[8, 6\]"),
        ({"gate_up": (3, 6, 8, 1)}, "after 2 parts of gate_up"),
        ({"gate_up_bias": torch.zeros(3, 12)}, r"moe: gate_up_bias: expected shape \[3, 64\], found \[3, 12\]"),
        ({"down_bias": torch.zeros(3, 32, dtype=BF16)}, "moe: down_bias: expected dtype float32"),
        (
            {"activation": "gelu"},
            "moe: activation: expected one of silu_mul, swiglu_clamped, gelu_tanh_mul, found 'gelu'",
        ),
    ],
)
def test_wrong_arguments_of_experts(rung: str, changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "x": torch.zeros(2, 8),
        "gate_up": (3, 6, 8, 2),  # experts, n, k, parts
        "down": (3, 8, 6, 1),
        "ids": torch.zeros(2, 2, dtype=torch.int32),
        "weights": torch.ones(2, 2),
    } | changes
    for name in ("gate_up", "down"):
        experts, n, k, parts = arguments[name]
        arguments[name] = PackedExperts.empty(experts, n, k, Float(F32), parts=parts)
    with pytest.raises(KernelError, match=message):
        moe(**arguments)


@pytest.mark.parametrize(
    "attempt, message",
    [
        (lambda: PackedExperts.empty(0, 4, 4, Float(F32)), "positive numbers, found 0, 1"),
        (lambda: PackedExperts.empty(2, 4, 4, Float(F32)).write(torch.ones(4, 4), 2), "one of 2 experts and 1 parts"),
        (lambda: PackedExperts.empty(2, 4, 4, Float(F32)).unpack(0, 1), "found expert 0, part 1"),
        (lambda: PackedExperts.empty(2, 4, 4, Float(F32)).write(torch.ones(4, 4), 0, row=1), "at row 1"),
        (lambda: softmax_top_k(torch.zeros(2, 4), 5, renormalize=True), "top_k: expected 1 to 4 experts, found 5"),
        (
            lambda: sigmoid_top_k(
                torch.zeros(2, 8), torch.zeros(8), 3, groups=4, top_groups=1, renormalize=True, scale=1.0
            ),
            "top_k: expected 1 to 2 experts, found 3",
        ),
        (
            lambda: sigmoid_top_k(
                torch.zeros(2, 8), torch.zeros(8), 1, groups=3, top_groups=1, renormalize=True, scale=1.0
            ),
            "sigmoid_top_k: groups: .* 8 experts",
        ),
        (
            lambda: sigmoid_top_k(
                torch.zeros(2, 8), torch.zeros(8), 1, groups=2, top_groups=3, renormalize=True, scale=1.0
            ),
            "top_groups: expected 1 to 2, found 3",
        ),
    ],
)
def test_wrong_arguments(attempt, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(KernelError, match=message):
        attempt()
