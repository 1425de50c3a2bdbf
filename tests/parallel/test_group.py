"""Collectives: values by rank-order arithmetic in the test, and the same bits on all ranks and from all transports."""

import hashlib
import os
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks

from tilerank.kernels import core, ops
from tilerank.kernels.reference import ops as reference
from tilerank.parallel.shm import PAGE

SUMS = (torch.float32, torch.bfloat16)
LENGTHS = {torch.float32: [1, 3, 33, 1000, 9_001, 70_003], torch.bfloat16: [1, 3, 33, 1000, 20_001, 150_003]}
COMPILED = [rung.name for rung in core.isa_report() if rung.usable and rung.name not in ("amx", "reference")]
needs_core = pytest.mark.skipif(not COMPILED, reason="shared memory needs the compiled core")


def contribution(rank: int, n: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * n + 10 * seed + rank)
    return (torch.randn(n, generator=generator) * 3).to(dtype)


def in_rank_order(size: int, n: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    total = contribution(0, n, dtype, seed).float()
    for rank in range(1, size):
        total = total + contribution(rank, n, dtype, seed).float()
    return total.to(dtype)


def near_exact(size: int, n: int, dtype: torch.dtype, total: torch.Tensor) -> bool:
    """Compare the first 1000 elements, within the error bound of `size` fp32 additions and one rounding to `dtype`."""
    parts = torch.stack([contribution(rank, n, dtype)[:1000].double() for rank in range(size)])
    bound = parts.abs().sum(0) * size * 2.0**-24 + parts.sum(0).abs() * torch.finfo(dtype).eps
    return bool(((total[:1000].double() - parts.sum(0)).abs() <= bound).all())


def digest(x: torch.Tensor) -> str:
    return hashlib.sha256(x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def sums(team: Any) -> dict[str, str]:
    group, digests = team.group, {}
    for dtype in SUMS:
        for n in LENGTHS[dtype]:
            mine = contribution(group.rank, n, dtype)
            total = group.all_reduce(mine)
            assert torch.equal(total, in_rank_order(group.size, n, dtype)), (dtype, n)
            assert total.data_ptr() == mine.data_ptr()
            assert near_exact(group.size, n, dtype, total), (dtype, n)
            digests[f"{dtype} {n}"] = digest(total)
    digests |= awkward_sums(group)
    moves(group)
    norms(group)
    return digests


def awkward_sums(group: Any) -> dict[str, str]:
    # Subnormals of bf16, a tie that rounds to even, a partial sum that only fp32 can hold, signed zeros, infinity.
    first = [1e-39, 1.0, 256.0, -0.0, 0.0, float("inf"), 3.0] * 9
    other = [2e-39, 2.0**-8, 1.0, -0.0, -0.0, 1.0, -3.0] * 9
    n = group.size - 1
    expected = [1e-39 + n * 2e-39, 1.0 + n * 2.0**-8, 256.0 + n, -0.0, 0.0, float("inf"), 3.0 - 3.0 * n] * 9
    digests = {}
    for dtype in SUMS:
        total = group.all_reduce(torch.tensor(first if group.rank == 0 else other).to(dtype))
        parts = [torch.tensor(first if rank == 0 else other).to(dtype).float() for rank in range(group.size)]
        by_hand = parts[0]
        for part in parts[1:]:
            by_hand = by_hand + part
        assert digest(total) == digest(by_hand.to(dtype)), dtype
        assert torch.allclose(total.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-2, atol=1e-41)
        digests[f"{dtype} awkward"] = digest(total)
    transposed = torch.arange(6, dtype=torch.float32).reshape(2, 3).t() * (group.rank + 1)
    factor = group.size * (group.size + 1) / 2
    assert torch.equal(group.all_reduce(transposed), torch.arange(6).reshape(2, 3).t() * factor)
    assert group.all_reduce(torch.empty(0, 5)).shape == (0, 5)
    return digests


def moves(group: Any) -> None:
    """Check all_gather, broadcast and barrier for several dtypes and sizes."""
    for dtype in (torch.uint8, torch.bool, torch.int64, torch.bfloat16, torch.float64):
        for shape in ((), (1,), (3, 5), (0, 4), (7, 20_021)):
            everyone = [(torch.arange(max(1, n_of(shape))) % (rank + 2)).to(dtype) for rank in range(group.size)]
            everyone = [x[: n_of(shape)].reshape(shape) for x in everyone]
            assert torch.equal(group.all_gather(everyone[group.rank]), torch.stack(everyone)), (dtype, shape)
            for root in (0, group.size - 1):
                assert torch.equal(group.broadcast(everyone[group.rank].clone(), root), everyone[root]), (dtype, shape)
    gather_columns(group)
    group.barrier()


def gather_columns(group: Any) -> None:
    """Check columns side by side without padding: some ranks without any, and so many that they go in pieces."""
    for rows, width in ((1, 5), (3, 7), (17, 20_011)):
        held = [max(width - 3 * rank * rank, 0) for rank in range(group.size)]
        parts = [torch.arange(rows * width).view(rows, width).float() + rank * 1_000_000 for rank in range(group.size)]
        starts = torch.tensor([0, *held]).cumsum(0)
        found = group.gather_columns(parts[group.rank], starts, sum(held))
        expected = torch.cat([part[:, :n] for part, n in zip(parts, held, strict=True)], dim=1)
        assert torch.equal(found, expected), (rows, width)


def norms(group: Any) -> None:
    """Check add_rms_norm of one row and of many, in pieces and larger than a buffer. Since each rank updates only its
    own rows of the residual, check again with rows that do not follow each other and with a whole residual, then once
    more."""
    for dtype in SUMS:
        for rows, width in ((1, 64), (5, 1000), (37, 520), (301, 1024), (2, 140_000)):
            weight = contribution(7, width, dtype)
            residual = contribution(8, rows * width, dtype).view(rows, width)
            whole, plain = residual.clone(), residual.clone()
            post_weight = contribution(9, width, dtype)
            for seed, zero_centered in enumerate((False, True, False)):
                n = rows * width
                options: Any = {"zero_centered": zero_centered, "post_weight": post_weight if zero_centered else None}
                mine = contribution(group.rank, n, dtype, seed).view(rows, width)
                mine = mine.repeat(1, 1 + seed)[:, :width]
                found = group.add_rms_norm(mine, residual, weight, 1e-5, **options, whole=seed == 1)
                total = in_rank_order(group.size, n, dtype, seed).view(rows, width)
                assert torch.equal(found, ops.add_rms_norm(total, whole, weight, 1e-5, **options)), (dtype, rows)
                assert seed != 1 or torch.equal(residual, whole), (dtype, rows)
                expected = reference.add_rms_norm(total, plain, weight, 1e-5, **options)
                # The mean of squares is summed in another order, which can turn the rounding of a post-normed value:
                # by 2^-5 for those from 4 to 8, and the sum with the residual may be much smaller.
                rtol, atol = (0.02, 2**-5) if dtype == torch.bfloat16 else (1e-5, 1e-5)
                torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


def n_of(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def shuffled(team: Any, seed: int, count: int) -> None:
    """Run random collectives with random delays of ranks: no buffer is overwritten before all ranks have read it."""
    group = team.group
    order, pace = random.Random(seed), random.Random(seed + 1 + group.rank)
    for step in range(count):
        kind = order.choice(["sum", "sum", "gather", "broadcast", "broadcast", "barrier"])
        n = order.choice([1, 7, 1000, 20_000, 150_001])
        root = order.randrange(group.size)
        if pace.random() < 0.2:
            time.sleep(pace.random() * 2e-3)
        mine = contribution(group.rank, n, torch.bfloat16, step)
        if kind == "sum":
            assert torch.equal(group.all_reduce(mine), in_rank_order(group.size, n, torch.bfloat16, step)), step
        elif kind == "gather":
            everyone = [contribution(rank, n, torch.bfloat16, step) for rank in range(group.size)]
            assert torch.equal(group.all_gather(mine), torch.stack(everyone)), step
        elif kind == "broadcast":
            assert torch.equal(group.broadcast(mine, root), contribution(root, n, torch.bfloat16, step)), step
        else:
            group.barrier()


def sums_and_shuffled(team: Any, transport: str, steps: int = 60) -> dict[str, str]:
    assert type(team.group).__name__ == transport
    digests = sums(team)
    shuffled(team, 5, steps)
    return digests


def sums_of_a_million(team: Any) -> None:
    """Sum more than a buffer holds, in both dtypes and an odd size, with fewer or more threads than lanes."""
    core.start_pool(None, 1 + team.group.rank, spin=False)
    n = 1_000_003
    for dtype in SUMS:
        total = team.group.all_reduce(contribution(team.group.rank, n, dtype))
        assert torch.equal(total, in_rank_order(team.group.size, n, dtype)), dtype


def test_one_rank_is_its_own_sum() -> None:
    run_ranks(1, "tests.parallel.test_group:sums_and_shuffled", kwargs={"transport": "SingleGroup"})


@needs_core
@pytest.mark.parametrize(
    ("size", "threads", "steps", "spin"), [(2, 1, 100, True), (2, 2, 100, False), (6, 1, 20, False)]
)
def test_shared_memory_sums_in_rank_order(size: int, threads: int, steps: int, spin: bool) -> None:
    target, kwargs = "tests.parallel.test_group:sums_and_shuffled", {"transport": "ShmGroup", "steps": steps}
    digests = run_ranks(size, target, kwargs=kwargs, threads=threads, spin=spin)
    assert all(d == digests[0] for d in digests)


@needs_core
def test_sums_larger_than_the_buffers() -> None:
    run_ranks(3, "tests.parallel.test_group:sums_of_a_million", threads=2)


@needs_core
def test_transports_and_rungs_give_the_same_bits() -> None:
    target = "tests.parallel.test_group:sums_and_shuffled"
    gloo = run_ranks(3, target, kwargs={"transport": "GlooGroup", "steps": 20}, collectives="gloo")
    assert all(d == gloo[0] for d in gloo)
    for rung in COMPILED:
        env = {"TILERANK_ISA": rung}
        shm = run_ranks(3, target, kwargs={"transport": "ShmGroup", "steps": 40}, threads=2, env=env)
        assert shm == gloo, rung
    # Without the compiled core the group falls back to gloo.
    without = {"TILERANK_ISA": "reference"}
    assert run_ranks(3, target, kwargs={"transport": "GlooGroup", "steps": 1}, env=without) == gloo


def talk(team: Any) -> list[int]:
    channel = team.channel
    if team.group.rank == 0:
        for message in (b"hello", b"", bytes(range(256)) * 10_000):
            channel.send(message)
        return []
    lengths = []
    for expected in (b"hello", b"", bytes(range(256)) * 10_000):
        message = channel.receive()
        assert message == expected
        lengths.append(len(message))
    return lengths


def test_control_messages_reach_every_rank() -> None:
    assert run_ranks(3, "tests.parallel.test_group:talk") == [[], [5, 0, 2_560_000], [5, 0, 2_560_000]]


def refuse(team: Any) -> list[str]:
    group, said = team.group, []
    attempts: list[Callable[[], object]] = [
        lambda: group.all_reduce(torch.zeros(2, dtype=torch.int32)),
        lambda: group.broadcast(torch.zeros(2), group.size),
        lambda: team.channel.send(b"") if group.rank else team.channel.receive(),
    ]
    for wrong in attempts:
        with pytest.raises(RuntimeError) as error:
            wrong()
        said.append(str(error.value))
    group.barrier()
    return said


def doubts(team: Any, core: int) -> int:
    os.sched_setaffinity(0, {core})
    mine = torch.ones(8)
    for _ in range(300):
        assert team.group.all_reduce(mine.clone()).tolist() == [2.0] * 8
    line = PAGE + team.group.rank * 4096 + 128  # shm_segment.h: Line, from `sleepers` on
    return int(team.group._segment[line : line + 24].view(torch.int32)[5])  # `waits` that did not trust in spinning


@needs_core
def test_ranks_that_share_a_core_do_not_trust_in_spinning() -> None:
    """There a spinning rank keeps the other one from running."""
    core = min(os.sched_getaffinity(0))
    assert min(run_ranks(2, "tests.parallel.test_group:doubts", kwargs={"core": core}, spin=True)) > 0


def test_what_cannot_be_done_is_refused_on_every_rank() -> None:
    first, second = run_ranks(2, "tests.parallel.test_group:refuse")
    assert first[:2] == second[:2]
    assert "int32" in first[0]
    assert "rank 2 in a group of 2" in first[1]
    assert "no rank to receive" in first[2]
    assert "only rank 0" in second[2]
