"""Recording and replay: the same bits as eager on values that come later, and nothing that could escape a recording."""

import gc
import threading
from collections.abc import Callable

import pytest
import torch
from rungs import RUNGS
from torch import Tensor

from tilerank.kernels import core, ops
from tilerank.kernels.attention import attention, store_kv
from tilerank.kernels.errors import KernelError
from tilerank.kernels.graph import Graph, between_launches
from tilerank.kernels.kv_pages import PAGE_TOKENS, KVPages
from tilerank.kernels.linear import linear
from tilerank.kernels.weight_formats.floats import FloatWeight

pytestmark = pytest.mark.usefixtures("restored")

COMPILED = [rung for rung in RUNGS if rung.values != ("reference",)]
needs_compiled = pytest.mark.skipif(not core.isa_report()[-2].usable, reason=core.isa_report()[-2].reason)


class Block:
    """Every kernel of a decode step, over inputs at fixed addresses and a cache of 9 pages."""

    m, hidden, heads, kv_heads, dim, vocab = 3, 40, 3, 1, 16, 70

    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.dtype = dtype
        m, d = self.m, self.hidden
        self.table, self.norm = self.weight(self.vocab, d), self.weight(d)
        self.qkv = self.packed((self.heads + 2 * self.kv_heads) * self.dim, d)
        self.out = self.packed(d, self.heads * self.dim)
        self.gate_up, self.down = self.packed(2 * 56, d), self.packed(d, 56)
        self.head, self.bias = self.packed(self.vocab, d), self.weight(self.vocab)
        self.turns = self.weight(128, 2, self.dim // 2)
        self.axis_of = torch.zeros(self.dim // 2, dtype=torch.int64)
        self.kv_map = torch.tensor([[0, self.heads]], dtype=torch.int32)
        self.cache = KVPages.empty(9, self.kv_heads, self.dim, dtype)
        self.query_starts = torch.arange(m + 1, dtype=torch.int32)
        self.ids, self.positions, self.slots = (torch.zeros(m, dtype=torch.int64) for _ in range(3))
        self.tables, self.lengths = torch.zeros(m, 4, dtype=torch.int32), torch.ones(m, dtype=torch.int32)
        self.rows = torch.arange(m)

    def weight(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random).to(self.dtype)

    def packed(self, n: int, k: int) -> FloatWeight:
        packed = FloatWeight.empty(n, k, self.dtype)
        packed.write(self.weight(n, k) / k**0.5)
        return packed

    def set(self, step: int) -> None:
        """Set sequences of different lengths that grow by one token per step, with three pages each."""
        lengths = torch.tensor([1, 30, 60]) + step
        order = torch.tensor([[4, 1, 7], [2, 8, 3], [5, 0, 6]])
        self.ids.random_(0, self.vocab, generator=self.random)
        self.positions.copy_(lengths - 1)
        page = order.gather(1, ((lengths - 1) // PAGE_TOKENS)[:, None])[:, 0]
        self.slots.copy_(page * PAGE_TOKENS + (lengths - 1) % PAGE_TOKENS)
        self.tables[:, :3] = order
        self.lengths.copy_(lengths)

    def __call__(self) -> Tensor:
        residual = ops.embedding(self.ids, self.table)
        x = ops.rms_norm(residual, self.norm, 1e-5)
        q, k, v = torch.split(linear(x, self.qkv).view(self.m, -1, self.dim), [self.heads, 1, 1], dim=1)
        ops.rotary_(q, k, ops.rope_rows(self.turns, self.positions[None], self.axis_of))
        store_kv(k, v, self.cache, self.slots)
        seen = attention(q, self.cache, self.tables, self.lengths, self.query_starts, self.kv_map, self.dim**-0.5)
        x = ops.add_rms_norm(linear(seen.flatten(1), self.out), residual, self.norm, 1e-5)
        x = linear(ops.silu_mul(linear(x, self.gate_up)), self.down)
        x = ops.add_rms_norm(x, residual, self.norm, 1e-5, zero_centered=True)
        x = ops.take_rows(x, self.rows)
        return linear(x, self.head, self.bias, out_dtype=torch.float32)[:, : self.vocab - 1]


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rung", COMPILED)
def test_replay_equals_eager_bit_for_bit_on_other_values(rung: str, dtype: torch.dtype, threads: int) -> None:
    core.force_isa(rung)
    core.start_pool(None, threads, spin=False)
    eager, recorded = Block(dtype), Block(dtype)
    graph = Graph(recorded)
    different = set()
    for step in range(36):  # every sequence comes to the end of a page
        eager.set(step)
        recorded.set(step)
        wanted = eager()
        found = graph.run()
        assert torch.equal(found, wanted) and found.data_ptr() == graph.output.data_ptr()
        different.add(wanted.sum().item())
    assert torch.equal(eager.cache.k, recorded.cache.k) and torch.equal(eager.cache.v, recorded.cache.v)
    assert len(different) == 36, "the steps are the same: nothing was compared"


@needs_compiled
def test_the_copies_of_columns_and_rows_are_repeated() -> None:
    parts, starts = torch.randn(3, 2, 10), torch.tensor([0, 10, 13, 20])
    a, b, c = parts
    x, rows, row = torch.randn(5, 6), torch.tensor([4, 0, 4]), torch.randn(6)
    steps: list[tuple[Callable[[], Tensor], Callable[[], Tensor]]] = [
        (lambda: ops.join_columns(parts, starts, 20), lambda: torch.cat([a, b[:, :3], c[:, :7]], 1)),
        (lambda: ops.take_rows(x, rows), lambda: x[rows]),
        (lambda: ops.repeat_row(row, 4, 6, torch.float32), lambda: row.repeat(4, 1)),
    ]
    for step, check in steps:
        graph = Graph(step)
        for _ in range(2):
            for value in (parts, x, row):
                value.normal_()
            rows.random_(0, 5)
            assert torch.equal(graph.run(), check())


@needs_compiled
def test_recording_computes_nothing() -> None:
    x, residual, weight = torch.randn(2, 8), torch.randn(2, 8), torch.randn(8)
    before = residual.clone()
    graph = Graph(lambda: ops.add_rms_norm(x, residual, weight, 1e-5))
    assert torch.equal(residual, before)
    graph.run()
    assert torch.equal(residual, before + x)


@needs_compiled
def test_a_step_may_return_nothing() -> None:
    """As for a part of a prompt of which no token is sampled."""
    x, none = torch.randn(3, 8), torch.empty(0, dtype=torch.int64)
    graph = Graph(lambda: ops.take_rows(x, none))
    assert graph.run().shape == (0, 8)


ROWS = torch.tensor([1, 0])
ESCAPES: list[tuple[str, Callable[[Tensor], object]]] = [
    ("aten.add", lambda x: x + 1),
    ("aten.add_", lambda x: x.add_(1)),
    ("aten.zeros", lambda x: torch.zeros(2, 8)),
    ("aten.empty", lambda x: torch.empty(2, 8)),
    ("aten.cat", lambda x: torch.cat([x, x])),
    ("aten.clone", lambda x: x.t().contiguous()),
    ("aten.clone", lambda x: x.t().reshape(-1)),
    ("aten._to_copy", lambda x: x.to(torch.bfloat16)),
    ("aten.index_select", lambda x: x.index_select(0, ROWS)),
    ("aten.index", lambda x: x[ROWS]),
    ("aten.copy_", lambda x: x.copy_(x)),
    ("aten._local_scalar_dense", lambda x: x[0, 0].item()),
    ("aten.max", lambda x: int(x.max())),
]


@needs_compiled
@pytest.mark.parametrize(("name", "escape"), ESCAPES, ids=[f"{i}-{name}" for i, (name, _) in enumerate(ESCAPES)])
def test_a_torch_operation_while_recording_is_an_error(name: str, escape: Callable[[Tensor], object]) -> None:
    x = torch.randn(2, 8)

    def step() -> Tensor:
        escape(x)
        return ops.silu_mul(x)

    with pytest.raises(
        KernelError, match=rf"only kernels and views while recording, found the torch operation {name}\b"
    ):
        Graph(step)
    # The recording has ended: kernels and torch operations run again.
    assert ops.silu_mul(x).shape == (2, 4) and torch.equal(x + 0, x)


@needs_compiled
def test_views_pass() -> None:
    x = torch.randn(4, 6)

    def step() -> Tensor:
        y = x.view(2, 2, 6).flatten(0, 1).unsqueeze(0).squeeze(0).transpose(0, 1).transpose(0, 1)
        first, second = torch.split(y, 2)
        assert first.expand(2, 6)[0].unsqueeze(0).shape == (1, 6)
        return ops.silu_mul(second[:, :4]).narrow(1, 0, 1)

    graph = Graph(step)
    x.normal_()
    assert torch.equal(graph.run(), ops.silu_mul(x[2:, :4])[:, :1])


@needs_compiled
def test_memory_is_the_graphs_own_and_used_again_inside() -> None:
    x = torch.randn(64, 4096)

    def step() -> Tensor:
        y = x
        for _ in range(40):
            y = ops.rms_norm(y, weight, 1e-5)
        return y

    weight = torch.ones(4096)
    graph = Graph(step)
    assert graph.nbytes() == 8 << 20  # 40 results of 1 MB, of which two live at a time
    assert len(graph) == 40
    expected = step()
    held = [core.empty((64, 4096), torch.float32).fill_(i) for i in range(20)]
    assert torch.equal(graph.run(), expected)
    assert all(bool((tensor == i).all()) for i, tensor in enumerate(held)), "a run wrote to memory outside the graph"
    for i in range(20):
        core.empty((64, 4096), torch.float32).fill_(i)
    assert torch.equal(graph.output, expected), "an operation outside the graph wrote to its memory"


@needs_compiled
def test_graphs_that_share_memory_take_turns() -> None:
    x = torch.randn(64, 4096)
    first = Graph(lambda: ops.silu_mul(x))
    second = Graph(lambda: ops.silu_mul(x[:, :2048]), share=first)
    apart = Graph(lambda: ops.silu_mul(x))
    for _ in range(2):
        x.normal_()
        assert torch.equal(first.run(), ops.silu_mul(x))
        assert torch.equal(second.run(), ops.silu_mul(x[:, :2048]))
    assert first.output.data_ptr() == second.output.data_ptr() != apart.output.data_ptr()
    assert first.nbytes() == second.nbytes() == 8 << 20


@needs_compiled
def test_what_a_graph_reads_lives_as_long_as_it_does_and_the_output_longer() -> None:
    def make() -> tuple[Graph, Tensor]:
        weight = core.alloc(4 * 4096).view(torch.float32)
        weight.fill_(2.0)
        x = torch.ones(2, 4096)
        return Graph(lambda: ops.rms_norm(x, weight, 0.0)), x

    graph, _ = make()
    gc.collect()
    noise = [core.alloc(4 * 4096).fill_(255) for _ in range(50)] + [torch.full((2, 4096), 7.0) for _ in range(50)]
    output = graph.run()
    del graph, noise
    gc.collect()
    assert torch.equal(output, torch.full((2, 4096), 2.0))


@needs_compiled
@pytest.mark.parametrize("threads", [1, 3])
def test_a_kernels_error_comes_out_of_a_run_as_it_does_eagerly(threads: int) -> None:
    core.start_pool(None, threads, spin=False)
    x, rows = torch.randn(4, 8), torch.tensor([0, 1])
    graph = Graph(lambda: ops.silu_mul(ops.take_rows(x, rows)))
    rows[1] = 9
    with pytest.raises(KernelError) as eager:
        ops.take_rows(x, rows)
    with pytest.raises(KernelError) as replayed:
        graph.run()
    assert str(replayed.value) == str(eager.value) == "take_rows: rows: expected values in [0, 4), found 9"
    rows[1] = 3
    assert torch.equal(graph.run(), ops.silu_mul(x[[0, 3]]))


@needs_compiled
def test_python_between_launches_runs_at_its_place_in_every_run() -> None:
    x, weight, calls = torch.randn(2, 64), torch.ones(32), []

    def double(seen: Tensor, out: Tensor) -> None:
        calls.append(seen.clone())
        out.copy_(2 * seen)

    def step() -> Tensor:
        y = ops.silu_mul(x)
        doubled = core.empty((2, 32), torch.float32)
        between_launches(double, y, doubled)
        del y
        return ops.rms_norm(ops.rms_norm(doubled, weight, 1e-5), weight, 1e-5)

    graph = Graph(step)
    assert len(graph) == 3 and not calls
    for number in range(1, 4):
        x.normal_()
        found = graph.run().clone()
        assert len(calls) == number and torch.equal(calls[-1], ops.silu_mul(x))
        doubled = 2 * calls[-1]
        assert torch.equal(found, ops.rms_norm(ops.rms_norm(doubled, weight, 1e-5), weight, 1e-5))
    assert torch.equal(found, step())  # outside of a recording, the step runs at once
    profile = graph.profile()
    assert [name for name, _ in profile.entries] == ["silu_mul", "python", "rms_norm", "rms_norm"]
    assert profile.seconds > sum(seconds for _, seconds in profile.entries)


@needs_compiled
def test_a_failure_between_launches_ends_the_run() -> None:
    x, good = torch.randn(2, 64), [True]

    def act(y: Tensor) -> None:
        if not good[0]:
            raise ConnectionError("nobody there")

    def step() -> Tensor:
        y = ops.silu_mul(x)
        between_launches(act, y)
        return ops.silu_mul(y)

    graph = Graph(step)
    before = graph.run().clone()
    x.normal_()
    good[0] = False
    with pytest.raises(ConnectionError, match="nobody there"):
        graph.run()
    assert torch.equal(graph.output, before)
    good[0] = True
    assert torch.equal(graph.run(), ops.silu_mul(ops.silu_mul(x)))


@needs_compiled
def test_a_wrong_argument_is_found_while_recording() -> None:
    x = torch.randn(2, 7)
    with pytest.raises(KernelError, match="even number of columns"):
        Graph(lambda: ops.silu_mul(x))


@needs_compiled
def test_one_recording_at_a_time() -> None:
    x = torch.randn(2, 8)
    with pytest.raises(KernelError, match="one recording at a time"):
        Graph(lambda: Graph(lambda: ops.silu_mul(x)).output)
    assert torch.equal(ops.silu_mul(x), Graph(lambda: ops.silu_mul(x)).run())


@needs_compiled
def test_the_result_must_come_from_a_kernel() -> None:
    x = torch.randn(2, 8)
    with pytest.raises(KernelError, match="to return what a kernel made"):
        Graph(lambda: x)


@needs_compiled
def test_other_threads_run_meanwhile() -> None:
    x = torch.randn(2, 8)
    found: list[Tensor] = []

    def step() -> Tensor:
        other = threading.Thread(target=lambda: found.append(ops.silu_mul(x)))
        other.start()
        other.join()
        return ops.silu_mul(x)

    graph = Graph(step)
    assert len(graph) == 1
    assert torch.equal(found[0], graph.run())


@needs_compiled
@pytest.mark.parametrize("threads", [1, 2])
def test_profile_names_every_launch_in_order(threads: int) -> None:
    core.start_pool(None, threads, spin=False)
    block = Block(torch.float32)
    graph = Graph(block)
    block.set(3)
    wanted = graph.run().clone()
    block.set(3)
    profile = graph.profile()
    names = [name for name, _ in profile.entries]
    assert names[:3] == ["embedding", "rms_norm", "linear_f32"] and names.count("add_rms_norm") == 2
    assert len(names) == len(graph) and graph.output.shape == wanted.shape
    assert all(seconds > 0 for _, seconds in profile.entries)
    assert profile.overhead_s == pytest.approx(profile.seconds - sum(s for _, s in profile.entries))
    assert profile.overhead_s > 0
    sums = profile.by_kernel()
    assert sums["add_rms_norm"][0] == 2
    assert sum(total for _, total in sums.values()) == pytest.approx(profile.seconds - profile.overhead_s)


def test_plain_torch_cannot_be_recorded() -> None:
    core.force_isa("reference")
    with pytest.raises(KernelError, match="found the rung reference"):
        Graph(lambda: ops.silu_mul(torch.randn(2, 8)))
