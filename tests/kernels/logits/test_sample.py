"""Sampling on every rung, against the logits warpers of transformers and against the rule in plain Python."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tilerank.kernels import core, ops
from tilerank.kernels.errors import KernelError

pytestmark = pytest.mark.usefixtures("rung")

INF = float("inf")
JUST_BELOW_1 = 1 - 2.0**-24


def sample(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    uniform: float | list[float] = 0.5,
    min_p: float = 0.0,
) -> list[int]:
    """Sample from one row of logits with each of the uniform numbers (or from every row with the single one)."""
    numbers = uniform if isinstance(uniform, list) else [uniform] * (logits.shape[0] if logits.ndim == 2 else 1)
    m = len(numbers)
    found = ops.sample(
        logits if logits.ndim == 2 else logits.expand(m, -1),
        torch.full((m,), temperature),
        torch.full((m,), top_k, dtype=torch.int32),
        torch.full((m,), top_p),
        torch.full((m,), min_p),
        torch.tensor(numbers),
    )
    assert found.dtype == torch.int64
    assert found.shape == (m,)
    return found.tolist()


def by_hand(
    logits: list[float], temperature: float, top_k: int, top_p: float, uniform: float, min_p: float = 0.0
) -> tuple[int, float]:
    """Return the token, and the margin of the closest decision relative to the total mass."""
    order = sorted((i for i in range(len(logits)) if logits[i] > -INF), key=lambda i: (-logits[i], i))
    if temperature == 0:
        return order[0], 1.0
    if min_p > 0:
        floor = torch.tensor(logits[order[0]]) + torch.tensor(temperature * math.log(min_p))
        order = [i for i in order if logits[i] >= float(floor)]
    if top_k and top_k < len(order):
        order = [i for i in order if logits[i] >= logits[order[top_k - 1]]]
    largest = logits[order[0]]
    mass = [math.exp((logits[i] - largest) / temperature) for i in order]
    margin = 1.0
    if top_p < 1:
        total, kept, before = math.fsum(mass), 1, mass[0]
        while kept < len(order) and before < top_p * total:
            margin = min(margin, top_p * total - before)
            before += mass[kept]
            kept += 1
        if kept < len(order):
            margin = min(margin, before - top_p * total)
        order, mass = order[:kept], mass[:kept]
    target = uniform * math.fsum(mass)
    passed = 0.0
    for token, part in zip(order, mass, strict=True):
        passed += part
        if passed > target:
            return token, min(margin, passed - target, target - (passed - part) if token != order[0] else 1.0)
        margin = min(margin, target - passed)
    raise AssertionError("the cumulative probability never exceeds the uniform number")


NUMBERS = st.one_of(
    st.floats(-30, 30, width=32),
    st.sampled_from([0.0, -1.0, 1.5, -INF]),  # ties and masked tokens
)
UNIFORM = st.one_of(st.sampled_from([0.0, 0.25, 0.5, JUST_BELOW_1]), st.floats(0, JUST_BELOW_1, width=32))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    logits=st.lists(NUMBERS, min_size=1, max_size=40).filter(lambda row: max(row) > -INF),
    temperature=st.sampled_from([0.0, 0.01, 0.5, 1.0, 3.0]),
    top_k=st.integers(0, 45),
    top_p=st.one_of(st.sampled_from([0.0, 0.5, 0.75, 1.0]), st.floats(0, 1, width=32)),
    min_p=st.one_of(st.sampled_from([0.0, 0.1, 1.0]), st.floats(0, 1, width=32)),
    uniform=UNIFORM,
)
def test_sample_follows_the_rule(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, uniform: float
) -> None:
    single, least = torch.tensor([temperature, min_p]).tolist()  # the kernel takes float32
    expected, margin = by_hand(logits, single, top_k, top_p, uniform, least)
    [found] = sample(torch.tensor(logits), temperature, top_k, top_p, uniform, min_p)
    assert logits[found] > -INF
    # Within 1e-12 of a boundary the last bit of exp decides; an exact tie of masses (margin 0) has a defined result.
    if margin == 0 or margin > 1e-12:
        assert found == expected


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (0, 1.0, 0.0),
        (5, 1.0, 0.0),
        (0, 0.8, 0.0),
        (20, 0.5, 0.0),
        (3, 0.99, 0.0),
        (1, 0.3, 0.0),
        (0, 1.0, 0.05),
        (0, 0.8, 0.3),
        (5, 0.9, 0.01),
        (0, 1.0, 1.0),
    ],
)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_frequencies_equal_those_of_transformers(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    from transformers.generation.logits_process import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    logits = torch.randn(60, generator=torch.Generator().manual_seed(1)) * 2
    temperature = float(torch.tensor(temperature))
    scores, ids = logits.double()[None], torch.LongTensor([[0]])
    scores = TemperatureLogitsWarper(temperature)(ids, scores)
    if min_p:
        scores = MinPLogitsWarper(min_p)(ids, scores)
    if top_k:
        scores = TopKLogitsWarper(top_k)(ids, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(float(torch.tensor(top_p)))(ids, scores)
    expected = scores.softmax(-1)[0]
    # Stratified uniform numbers hit every token as often as its probability says, to within one draw. The reference
    # rung samples row by row.
    n = 4000 if core.isa() != "reference" else 1000
    drawn = torch.tensor(sample(logits, temperature, top_k, top_p, [(i + 0.5) / n for i in range(n)], min_p))
    counts = torch.bincount(drawn, minlength=60)
    assert float((counts - expected * n).abs().max()) < 1 + 1e-3
    assert not counts[expected == 0].any()


def test_ties_with_the_kth_stay() -> None:
    logits = torch.tensor([1.0, 3.0, 1.0, 0.0, 1.0])
    numbers = [i / 100 for i in range(100)]
    assert set(sample(logits, top_k=2, uniform=numbers)) == {1, 0, 2, 4}
    assert set(sample(logits, top_k=1, uniform=numbers)) == {1}


def test_top_p_cuts_equal_logits_by_id() -> None:
    numbers = [i / 100 for i in range(100)]
    logits = torch.zeros(4)
    assert set(sample(logits, top_p=0.5, uniform=numbers)) == {0, 1}  # exactly half of the mass precedes token 2
    assert set(sample(logits, top_p=0.51, uniform=numbers)) == {0, 1, 2}
    assert set(sample(logits, top_p=0.0, uniform=numbers)) == {0}
    assert set(sample(logits, top_p=1.0, uniform=numbers)) == {0, 1, 2, 3}


def test_order_is_descending_and_a_boundary_belongs_to_the_next_token() -> None:
    logits = torch.tensor([0.0, 1.0, 0.0, 1.0]) * 1000  # tokens 1 and 3 have half of the mass each
    assert sample(logits, uniform=[0.0, 0.25, 0.4999, 0.5, 0.75, JUST_BELOW_1]) == [1, 1, 1, 3, 3, 3]


@pytest.mark.parametrize("temperature", [0.0, 1e-38, 0.7, 1e30])
def test_masked_tokens_are_never_drawn(temperature: float) -> None:
    logits = torch.full((50,), -INF)
    logits[[7, 30]] = torch.tensor([-3.0, -2.9])
    numbers = [0.0, 0.3, 0.6, 0.9, JUST_BELOW_1]
    for top_k, top_p in [(0, 1.0), (10, 1.0), (0, 0.9), (1, 1.0)]:
        assert set(sample(logits, temperature, top_k, top_p, numbers)) <= {7, 30}
    assert sample(logits, temperature, uniform=0.0) == [30]


def test_rows_have_their_own_parameters() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 100, generator=generator)[:, :77]  # strided rows
    temperature = torch.tensor([0.0, 1.0, 0.5, 2.0, 1.0, 0.0])
    top_k = torch.tensor([0, 3, 0, 50, 0, 7], dtype=torch.int32)
    top_p = torch.tensor([1.0, 1.0, 0.7, 0.9, 1.0, 0.1])
    min_p = torch.tensor([0.1, 0.0, 0.2, 0.05, 0.0, 0.0])
    uniform = torch.rand(6, generator=generator)
    numbers = (temperature, top_k, top_p, min_p, uniform)
    found = ops.sample(logits, *numbers).tolist()
    for i, token in enumerate(found):
        row = slice(i, i + 1)
        assert ops.sample(logits[row], *(each[row] for each in numbers)).tolist() == [token]
        expected, margin = by_hand(
            logits[i].tolist(),
            float(temperature[i]),
            int(top_k[i]),
            float(top_p[i]),
            float(uniform[i]),
            float(min_p[i]),
        )
        assert margin > 1e-9
        assert token == expected


@pytest.mark.parametrize("vocabulary", [151_936, 1000, 513])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (20, 0.95), (0, 0.9), (400, 1.0), (7000, 0.99)])
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 8.0], ids=["equal", "flat", "even", "peaked"])
def test_a_large_vocabulary(spread: float, top_k: int, top_p: float, vocabulary: int) -> None:
    """Against a full sort in float64; half of the tokens are masked."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(vocabulary, generator=generator) * spread
    logits[torch.rand(vocabulary, generator=generator) < 0.5] = -INF
    ordered, order = logits.double().sort(descending=True, stable=True)
    if 0 < top_k < vocabulary:
        ordered = ordered[ordered >= ordered[top_k - 1]]
    mass = ordered.softmax(0).cumsum(0)
    kept = 1 + int((mass < float(torch.tensor(top_p))).sum()) if top_p < 1 else int((ordered > -INF).sum())
    numbers = [0.0, 0.1, 0.9, 0.999, JUST_BELOW_1]
    expected = [int((mass[:kept] <= float(torch.tensor(u)) * mass[kept - 1]).sum()) for u in numbers]
    assert sample(logits, top_k=top_k, top_p=top_p, uniform=numbers) == order[expected].tolist()


@pytest.mark.parametrize(
    ("name", "value", "expectation"),
    [
        ("temperature", -0.5, "a finite number >= 0"),
        ("temperature", INF, "a finite number >= 0"),
        ("temperature", math.nan, "a finite number >= 0"),
        ("top_k", -1, ">= 0"),
        ("top_p", -0.1, "a number in [0, 1]"),
        ("top_p", 1.5, "a number in [0, 1]"),
        ("top_p", math.nan, "a number in [0, 1]"),
        ("min_p", -0.1, "a number in [0, 1]"),
        ("min_p", 1.5, "a number in [0, 1]"),
        ("min_p", math.nan, "a number in [0, 1]"),
        ("uniform", 1.0, "a number in [0, 1)"),
        ("uniform", -0.1, "a number in [0, 1)"),
        ("uniform", math.nan, "a number in [0, 1)"),
    ],
)
def test_a_wrong_value_is_named_with_its_row(name: str, value: float, expectation: str) -> None:
    arguments = {
        "logits": torch.zeros(4, 5),
        "temperature": torch.ones(4),
        "top_k": torch.zeros(4, dtype=torch.int32),
        "top_p": torch.ones(4),
        "min_p": torch.zeros(4),
        "uniform": torch.zeros(4),
    }
    arguments[name][2] = value
    with pytest.raises(KernelError) as error:
        ops.sample(**arguments)
    assert str(error.value) == f"sample: {name}: expected {expectation}, found {value:g} in row 2"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_k", [0, 2])
def test_a_row_without_probabilities_gives_no_token(temperature: float, top_k: int) -> None:
    """The other rows have theirs."""
    logits = torch.zeros(5, 600)
    logits[:, 599] = 60.0
    expected = sample(logits, temperature, top_k)
    logits[1, 3], logits[2, 3], logits[3] = math.nan, INF, -INF
    assert sample(logits, temperature, top_k) == [expected[0], -1, -1, -1, expected[4]] == [599, -1, -1, -1, 599]


def test_shapes_and_dtypes_are_checked() -> None:
    logits, ones, zeros = torch.zeros(2, 5), torch.ones(2), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(KernelError, match=r"^sample: temperature: expected shape \[2\], found \[3\]$"):
        ops.sample(logits, torch.ones(3), zeros, ones, ones, ones)
    with pytest.raises(KernelError, match=r"^sample: top_k: expected dtype int32, found int64$"):
        ops.sample(logits, ones, zeros.long(), ones, ones, ones)
    with pytest.raises(KernelError, match=r"^sample: logits: expected at least one column, found shape \[2, 0\]$"):
        ops.sample(logits[:, :0], ones, zeros, ones, ones, ones)
