"""Collectives: values by rank-order arithmetic in plain Python loops over the ranks, bits equal on all ranks."""

import hashlib
from typing import Any

import pytest
import torch
from ranks import run_ranks

SIZES = [1, 3, 100_003]


def contribution(rank: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(n, generator=torch.Generator().manual_seed(100 * n + rank)) * 3).to(dtype)


def digest(x: torch.Tensor) -> str:
    return hashlib.sha256(x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def reduce_all(team: Any) -> dict[str, str]:
    group, digests = team.group, {}
    for dtype in (torch.float32, torch.bfloat16):
        for n in SIZES:
            total = group.all_reduce(contribution(group.rank, n, dtype))
            by_hand = contribution(0, n, dtype).float()
            for rank in range(1, group.size):
                by_hand = by_hand + contribution(rank, n, dtype).float()
            assert torch.equal(total, by_hand.to(dtype)), (dtype, n)
            digests[f"{dtype}/{n}"] = digest(total)
    return digests


@pytest.mark.parametrize("size", [1, 3])
def test_sums_are_in_rank_order_and_equal_on_all_ranks(size: int) -> None:
    digests = run_ranks(size, "test_parallel_group:reduce_all")
    assert all(d == digests[0] for d in digests)


def gather_and_talk(team: Any) -> None:
    group = team.group
    assert group.all_gather(torch.tensor(group.rank)).tolist() == list(range(group.size))
    assert group.broadcast(torch.tensor([group.rank]), group.size - 1).item() == group.size - 1
    group.barrier()
    if group.rank == 0:
        team.channel.send(b"hello")
        team.channel.send(b"")
    else:
        assert team.channel.receive() == b"hello"
        assert team.channel.receive() == b""


def test_gather_broadcast_and_control_messages() -> None:
    run_ranks(3, "test_parallel_group:gather_and_talk")
