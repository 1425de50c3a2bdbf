"""The delta rule on every rung, against the recurrence token by token in float64."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise

import pytest
import torch
from matrices import DTYPES, EPS32, assert_within, half_ulp, randn
from torch import Tensor

from tilerank.kernels import core, delta
from tilerank.kernels.errors import KernelError
from tilerank.kernels.graph import Graph
from tilerank.kernels.state_slots import StateSlots

pytestmark = pytest.mark.usefixtures("rung")

DRAFTS = 7
NONE: Mapping[int, int] = {}


@dataclass(frozen=True)
class Sizes:
    """Heads and their dims, named as in the config of Qwen3.5."""

    key_heads: int
    value_heads: int
    dk: int
    dv: int

    @property
    def qkv(self) -> int:
        return 2 * self.key_heads * self.dk + self.value_heads * self.dv


class Sequences:
    """Random tokens of sequences, the states of their slots, which begin as NaN, and the rule on parts of them.

    A part (i, start, stop) is rows start..stop of sequence i. Parts of one row of a sequence that follow each other are
    its next row and drafts. kept: of the drafts in the slot of a sequence. wrong: parts that draft other tokens than
    those of the sequence, with inputs of NaN.
    """

    def __init__(self, sizes: Sizes, lengths: list[int], dtype: torch.dtype, seed: int = 0) -> None:
        self.sizes, self.lengths, self.dtype = sizes, lengths, dtype
        heads = sizes.value_heads
        self.qkv = [randn(n, sizes.qkv, dtype=dtype, seed=seed + i) for i, n in enumerate(lengths)]
        self.a = [randn(n, heads, dtype=dtype, seed=seed + 100 + i) for i, n in enumerate(lengths)]
        self.b = [randn(n, heads, dtype=dtype, seed=seed + 200 + i) for i, n in enumerate(lengths)]
        self.a_log, self.dt_bias = randn(heads, seed=seed + 300) - 1, randn(heads, seed=seed + 301)
        self.slots = torch.randperm(len(lengths) + 1, generator=torch.Generator().manual_seed(seed))[:-1].int()
        self.states = StateSlots.empty(len(lengths) + 1, 1, sizes.qkv, heads, sizes.dk, sizes.dv, dtype, DRAFTS)
        for tensor in (self.states.state, self.states.drafts, self.states.draft_gates):
            tensor.fill_(float("nan"))

    @property
    def state(self) -> Tensor:
        return self.states.state

    def run(
        self, parts: list[tuple[int, int, int]], kept: Mapping[int, int] = NONE, wrong: Collection[int] = ()
    ) -> list[Tensor]:
        """Compute parts in one call of `delta_rule`."""
        qkv, a, b = self.rows(parts, wrong)
        g, beta = delta.delta_gating(a, b, self.a_log, self.dt_bias)
        out = delta.delta_rule(qkv, g, beta, self.states, *self.batch(parts, kept), self.sizes.key_heads)
        assert out.dtype == self.dtype
        return list(torch.split(out, [stop - start for _, start, stop in parts]))

    def step(
        self, parts: list[tuple[int, int, int]], kept: Mapping[int, int] = NONE, wrong: Collection[int] = ()
    ) -> list[Tensor]:
        """The same with `delta_step`, for parts of one row."""
        slots, kept_drafts, _, lengths = self.batch(parts, kept)
        qkv, a, b = self.rows(parts, wrong)
        gates = (self.a_log, self.dt_bias)
        out = delta.delta_step(qkv, a, b, *gates, self.states, slots, kept_drafts, lengths, self.sizes.key_heads)
        return list(torch.split(out, 1))

    def rows(self, parts: list[tuple[int, int, int]], wrong: Collection[int] = ()) -> list[Tensor]:
        """Return qkv, a and b."""
        inputs = (self.qkv, self.a, self.b)
        found = [[each[i][start:stop] for i, start, stop in parts] for each in inputs]
        for tensors in found:
            for number in wrong:
                tensors[number] = torch.full_like(tensors[number], float("nan"))
        return [torch.cat(tensors) for tensors in found]

    def batch(
        self, parts: list[tuple[int, int, int]], kept: Mapping[int, int] = NONE
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return slots, kept, query_starts and seq_lens."""
        starts = [0, *accumulate(stop - start for _, start, stop in parts)]
        lists = ([kept.get(i, 0) for i, _, _ in parts], starts, [stop for _, _, stop in parts])
        drafts, query_starts, lengths = (torch.tensor(values, dtype=torch.int32) for values in lists)
        return self.slots[[i for i, _, _ in parts]], drafts, query_starts, lengths

    def exact(self, i: int, first: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the outputs of sequence i, the state behind it [value_heads, dk, dv], and the sum of the magnitudes
        that each output adds up, all in float64. first: the state before its first token, instead of zeros."""
        s = self.sizes
        heads_of = torch.arange(s.value_heads) // (s.value_heads // s.key_heads)
        state = torch.zeros(s.value_heads, s.dk, s.dv, dtype=torch.float64) if first is None else first.double()
        out, sizes = torch.empty(2, self.lengths[i], s.value_heads, s.dv, dtype=torch.float64)
        gates = torch.nn.functional.softplus(self.a[i].double() + self.dt_bias.double())
        decays = (-self.a_log.double().exp() * gates).exp()
        rates = self.b[i].double().sigmoid().to(self.dtype).double()  # rounded as in transformers
        for t, row in enumerate(self.qkv[i].double()):
            q, k = (x.view(s.key_heads, s.dk) for x in row[: 2 * s.key_heads * s.dk].chunk(2))
            q, k = (x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
            q, k = (q / s.dk**0.5)[heads_of], k[heads_of]
            v = row[2 * s.key_heads * s.dk :].view(s.value_heads, s.dv)
            state = state * decays[t, :, None, None]
            update = rates[t, :, None] * (v - torch.einsum("hk,hkv->hv", k, state))
            state = state + k[:, :, None] * update[:, None, :]
            out[t] = torch.einsum("hk,hkv->hv", q, state)
            sizes[t] = torch.einsum("hk,hkv->hv", q.abs(), state.abs())
        return out.flatten(1), state, sizes.flatten(1)


LENGTHS = [1, 63, 64, 65, 129]
SIZES = [
    Sizes(2, 2, 32, 32),
    Sizes(2, 4, 64, 40),
    Sizes(1, 3, 33, 72),
    Sizes(1, 4, 128, 128),
    Sizes(1, 1, 256, 256),
    Sizes(3, 3, 5, 1),
]


def assert_exact(
    sequences: Sequences, i: int, found: Tensor, first: Tensor | None = None, *, cancelling: int = 1
) -> None:
    """Compare outputs and the state with float64.

    An element is a sum of dk products with elements of the state, which add up some tens of tokens; rounding errors of
    fp32 grow like the square root of the number of terms. With AMX tiles, four products that follow each other have
    factors split into two bf16, whose sum is within 2^-17. cancelling: how much larger the error of a sum is where
    the updates of a chunk cancel.
    """
    exact, state, sizes = sequences.exact(i, first)
    error = EPS32 * (sequences.sizes.dk**0.5 + 8)
    if core.isa() == "amx" and sequences.dtype == torch.bfloat16:
        error += 4 * 2**-17 * cancelling
    assert_within(found, exact, error * sizes.amax() + half_ulp(sequences.dtype) * 1.01 * exact.abs())
    assert_within(sequences.state[sequences.slots[i]], state, error * state.abs().amax())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_rule_equals_the_recurrence(sizes: Sizes, dtype: torch.dtype) -> None:
    sequences = Sequences(sizes, LENGTHS, dtype)
    found = sequences.run([(i, 0, n) for i, n in enumerate(LENGTHS)])
    for i in range(len(LENGTHS)):
        assert_exact(sequences, i, found[i])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cuts", [[1, 2, 3], [63, 64, 65], [64, 128], [5, 100], [128]], ids=str)
def test_rule_continues_from_a_state(cuts: list[int], dtype: torch.dtype) -> None:
    sequences = Sequences(Sizes(2, 4, 32, 48), [129, 3], dtype)
    found = [sequences.run([(0, *part)])[0] for part in pairwise([0, *cuts, 129])]
    assert_exact(sequences, 0, torch.cat(found))


def test_rule_continues_from_any_state() -> None:
    sequences = Sequences(Sizes(2, 6, 48, 32), [70, 1], torch.float32)
    first = torch.randn(2, 6, 48, 32, generator=torch.Generator().manual_seed(1))
    sequences.state[sequences.slots[:2].long()] = first
    slots, kept, starts, _ = sequences.batch([(0, 0, 70), (1, 0, 1)])
    qkv, a, b = sequences.rows([(0, 0, 70), (1, 0, 1)])
    g, beta = delta.delta_gating(a, b, sequences.a_log, sequences.dt_bias)
    lengths = torch.tensor([1000, 2], dtype=torch.int32)
    found = torch.split(delta.delta_rule(qkv, g, beta, sequences.states, slots, kept, starts, lengths, 2), [70, 1])
    for i in range(2):
        assert_exact(sequences, i, found[i], first[i])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strong_decays_keep_their_digits(dtype: torch.dtype) -> None:
    """c runs to some -10,000 in a chunk, and tokens behind it still see their neighbours."""
    sequences = Sequences(Sizes(1, 2, 32, 32), [64], dtype)
    sequences.a[0][:40] = 200.0
    sequences.a[0][40:] = -3.0
    assert_exact(sequences, 0, sequences.run([(0, 0, 64)])[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_repeated_keys_stay_exact(dtype: torch.dtype) -> None:
    """Each update takes back the one before: the key is the same, beta is near 1, and hardly anything decays.

    The sum of 64 updates is as small as one of them, and the error sqrt(64) times as large.
    """
    sequences = Sequences(Sizes(1, 1, 32, 32), [129], dtype)
    sequences.qkv[0][:, 32:64] = sequences.qkv[0][:1, 32:64]
    sequences.a[0][:], sequences.b[0][:] = -8.0, 6.0
    assert_exact(sequences, 0, sequences.run([(0, 0, 129)])[0], cancelling=8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_depend_on_the_sequence_alone(dtype: torch.dtype) -> None:
    """Alone on one thread, and in a mixture with others on three and seven."""
    lengths = [70, 1, 5, 130, 1]
    parts = [(i, 0, n) for i, n in enumerate(lengths)]
    alone = Sequences(Sizes(2, 4, 32, 72), lengths, dtype)
    core.start_pool(None, 1, spin=False)
    expected = [alone.run([part])[0] for part in parts]
    for threads in (3, 7):
        core.start_pool(None, threads, spin=False)
        together = Sequences(Sizes(2, 4, 32, 72), lengths, dtype)
        order = [3, 1, 0, 4, 2]
        for i, found in zip(order, together.run([parts[i] for i in order]), strict=True):
            assert torch.equal(found, expected[i])
            assert torch.equal(together.state[together.slots[i]], alone.state[alone.slots[i]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("threads", [1, 3, 9])
def test_step_equals_gating_and_rule(sizes: Sizes, dtype: torch.dtype, threads: int) -> None:
    core.start_pool(None, threads, spin=False)
    one, two = (Sequences(sizes, [3, 1, 2], dtype) for _ in range(2))
    for sequences in (one, two):
        sequences.run([(0, 0, 2), (2, 0, 1)])
    parts = [(2, 1, 2), (1, 0, 1), (0, 2, 3)]
    for found, expected in zip(one.step(parts), two.run(parts), strict=True):
        assert torch.equal(found, expected)
    assert torch.equal(one.state.nan_to_num(7), two.state.nan_to_num(7))
    assert one.state.isnan().all((1, 2, 3)).sum() == 1  # the spare slot is untouched


def test_recorded_step_equals_eager(rung: str) -> None:
    if rung == "reference":
        pytest.skip("has no launches to record")
    sizes = Sizes(2, 4, 32, 40)
    eager, recorded = (Sequences(sizes, [3, 3], torch.bfloat16) for _ in range(2))
    for sequences in (eager, recorded):
        sequences.run([(0, 0, 1), (1, 0, 1)])
    qkv, a, b = (torch.stack([x[0][1], x[1][1]]) for x in (recorded.qkv, recorded.a, recorded.b))
    slots, kept, _, lengths = recorded.batch([(0, 1, 2), (1, 1, 2)])
    gates = (recorded.a_log, recorded.dt_bias)
    graph = Graph(lambda: delta.delta_step(qkv, a, b, *gates, recorded.states, slots, kept, lengths, sizes.key_heads))
    for t in (1, 2):
        expected = eager.step([(0, t, t + 1), (1, t, t + 1)])
        for x, rows in zip((qkv, a, b), (recorded.qkv, recorded.a, recorded.b), strict=True):
            x.copy_(torch.stack([rows[0][t], rows[1][t]]))
        lengths.fill_(t + 1)
        assert torch.equal(graph.run(), torch.cat(expected))
        assert torch.equal(recorded.state.nan_to_num(7), eager.state.nan_to_num(7))


def test_padding_repeats_a_row_and_touches_no_state() -> None:
    sizes = Sizes(2, 4, 32, 40)
    one, two, other = (Sequences(sizes, [4, 2], torch.float32) for _ in range(3))
    for sequences in (one, two, other):
        sequences.run([(0, 0, 3), (1, 0, 1)])
    first, second = two.run([(0, 3, 4), (1, 1, 2)])
    rows = [(0, 3, 4), (1, 1, 2), (1, 1, 2), (1, 1, 2)]
    slots, kept, starts, lengths = one.batch(rows)
    slots[2:] = -1 - 1
    qkv, a, b = one.rows(rows)
    qkv[2:] = float("nan")
    found = delta.delta_step(qkv, a, b, one.a_log, one.dt_bias, one.states, slots, kept, lengths, 2)
    assert torch.equal(found, torch.cat([first, second, second, second]))
    assert torch.equal(one.state.nan_to_num(7), two.state.nan_to_num(7))
    g, beta = delta.delta_gating(a, b, one.a_log, one.dt_bias)
    assert torch.equal(delta.delta_rule(qkv, g, beta, other.states, slots, kept, starts, lengths, 2), found)


PLAN = [(7, 7), (7, 0), (0, 0), (3, 2), (1, 1), (6, 6), (7, 5), (2, 0), (5, 3), (4, 4)]
"""(drafts, right ones) of the steps of a sequence; the first begin it."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("sizes", "threads"), [(Sizes(2, 4, 64, 40), 1), (Sizes(1, 2, 128, 130), 9), (Sizes(3, 3, 5, 1), 3)], ids=str
)
def test_drafts_have_the_bits_of_single_steps(sizes: Sizes, threads: int, dtype: torch.dtype) -> None:
    """Three sequences whose drafts are right up to some row, in `delta_step` and sometimes in `delta_rule`."""
    core.start_pool(None, threads, spin=False)
    plans = [PLAN, PLAN[3:] + PLAN[:3], [(0, 0)] * len(PLAN)]
    lengths = [sum(right for _, right in plan) + len(plan) + 1 for plan in plans]
    plain, drafted = (Sequences(sizes, [*lengths, 33], dtype) for _ in range(2))
    expected = [torch.cat([plain.step([(i, t, t + 1)])[0] for t in range(n)]) for i, n in enumerate(lengths)]
    starts, kept = [0, 0, 0], dict[int, int]()
    for number, counts in enumerate(zip(*plans, strict=True)):
        rows = [(i, starts[i] + j) for i, (drafts, _) in enumerate(counts) for j in range(1 + drafts)]
        ends = [start + 1 + right for start, (_, right) in zip(starts, counts, strict=True)]
        wrong = [row for row, (i, t) in enumerate(rows) if t >= ends[i]]
        parts = [(i, t, t + 1) if t < ends[i] else (i, starts[i], starts[i] + 1) for i, t in rows]
        found = (drafted.run if number % 3 == 2 else drafted.step)(parts, kept, wrong)
        for row, (i, t) in enumerate(rows):
            assert row in wrong or torch.equal(found[row][0], expected[i][t])
        starts, kept = ends, {i: right for i, (_, right) in enumerate(counts)}
    # Beside a prompt, the states take in the last drafts and a row.
    last = drafted.run([*((i, n - 1, n) for i, n in enumerate(lengths)), (3, 0, 33)], kept)
    for found_rows, wanted in zip(last, [*(rows[-1:] for rows in expected), *plain.run([(3, 0, 33)])], strict=True):
        assert torch.equal(found_rows, wanted)
    assert torch.equal(drafted.state.nan_to_num(7), plain.state.nan_to_num(7))


def test_padding_repeats_a_draft() -> None:
    sequences = Sequences(Sizes(2, 4, 32, 40), [3], torch.bfloat16)
    rows = [(0, 0, 1), (0, 1, 2), (0, 2, 3), (0, 2, 3)]
    slots, kept, _, lengths = sequences.batch(rows)
    slots[3] = -1 - 1
    qkv, a, b = sequences.rows(rows, wrong=[3])
    gates = (sequences.a_log, sequences.dt_bias)
    found = delta.delta_step(qkv, a, b, *gates, sequences.states, slots, kept, lengths, 2)
    assert found.isfinite().all() and torch.equal(found[3], found[1])


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"slots": [0, 3]}, "slots: expected at most 2 for sequence 1, found 3"),
        ({"slots": [0, -1]}, "slots: expected sequence 1 of padding to be one row that repeats one, found slot -1 and"),
        ({"query_starts": [0, 1, 3]}, "query_starts: expected 0 to 4, found 0 to 3"),
        ({"seq_lens": [1, 2]}, "query_starts: expected 0 to 2 rows of sequence 1, found 3"),
        ({"kept": [8, 0]}, "kept: expected 0 to 7 drafts of the sequence in slot 0, found 8"),
        ({"kept": [-1, 0]}, "kept: expected 0 to 7 drafts of the sequence in slot 0, found -1"),
        ({"kept": [0, 1]}, "kept: expected 0 to 0 drafts of the sequence in slot 1, found 1"),
        ({"slots": [0, 0]}, "query_starts: expected a draft of one row as sequence 1, found 3"),
    ],
)
def test_rule_refuses_batches_that_do_not_fit(change: dict[str, list[int]], expected: str) -> None:
    sequences = Sequences(Sizes(1, 1, 8, 8), [1, 3], torch.float32)
    arguments = {"slots": [0, 1], "kept": [0, 0], "query_starts": [0, 1, 4], "seq_lens": [1, 3]} | change
    batch = {name: torch.tensor(values, dtype=torch.int32) for name, values in arguments.items()}
    gate = torch.zeros(4, 1)
    with pytest.raises(KernelError, match=f"delta_rule: {expected}"):
        delta.delta_rule(torch.cat(sequences.qkv), gate, gate, sequences.states, **batch, key_heads=1)


def test_step_refuses_more_drafts_than_slots_have_room_for() -> None:
    sequences = Sequences(Sizes(1, 1, 8, 8), [9], torch.float32)
    with pytest.raises(KernelError, match=r"slots: expected 0 to 7 drafts of the sequence in slot ., found 8"):
        sequences.step([(0, t, t + 1) for t in range(9)])


def test_a_rank_without_heads_computes_nothing() -> None:
    sequences = Sequences(Sizes(0, 0, 8, 8), [3, 1], torch.float32)
    assert [part.shape for part in sequences.run([(0, 0, 3), (1, 0, 1)])] == [(3, 0), (1, 0)]
    assert [part.shape for part in sequences.step([(1, 0, 1)])] == [(1, 0)]


def test_rule_refuses_heads_that_do_not_fit() -> None:
    sequences = Sequences(Sizes(2, 3, 8, 8), [1], torch.float32)
    with pytest.raises(KernelError, match="key_heads: expected a divisor of 3 value heads, found 2"):
        sequences.run([(0, 0, 1)])
