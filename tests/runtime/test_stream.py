"""The residual stream: reading it gives the right rows on every rank, whichever rows the ranks keep up to date."""

import hashlib
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor

from tilerank.kernels import core, ops
from tilerank.kernels.graph import Graph
from tilerank.parallel.group import RecordableGroup
from tilerank.parallel.join import Team
from tilerank.parallel.norm import RMSNorm
from tilerank.parallel.sharding import Sharding
from tilerank.runtime.models.stream import Stream
from tilerank.runtime.step.batch import LogitRows

ROWS, HIDDEN, EPS = 40, 1024, 1e-5


def numbers(seed: int) -> Tensor:
    """Return [ROWS, HIDDEN] small integers, whose sums are exact in any order and dtype."""
    return torch.randint(-8, 9, (ROWS, HIDDEN), generator=torch.Generator().manual_seed(seed)).float()


def parts(size: int) -> list[Tensor]:
    """Return the parts of three sums over the ranks: [size, ROWS, HIDDEN] each."""
    return [torch.stack([numbers(100 * step + rank) for rank in range(size)]) for step in range(3)]


def read_between_sums(team: Team) -> dict[str, Any]:
    """Return whether `Stream.rows` is right after every sum, with update_all and without."""
    rank, size = team.group.rank, team.group.size
    right: dict[str, list[bool]] = {}
    digest = hashlib.sha256()
    for dtype in (torch.float32, torch.bfloat16):
        norm = RMSNorm("norm", HIDDEN, EPS, Sharding(rank, size, dtype, team.group))
        norm.allocate()
        norm.weight.data.fill_(1.0)
        for update_all in (True, False):
            stream = Stream(numbers(7).to(dtype), size)
            expected, found = numbers(7), []
            for step in parts(size):
                expected = expected + step.sum(0)
                stream.add(step[rank].to(dtype, copy=True), norm, update_all=update_all)
                rows = stream.rows()
                found.append(torch.equal(rows.float(), expected))
                digest.update(rows.float().numpy().tobytes())
            right[f"{dtype} update_all={update_all}"] = found
        # One more sum after some rows have been dropped.
        stream = Stream(numbers(7).to(dtype), size)
        first, second, _ = parts(size)
        stream.add(first[rank].to(dtype, copy=True), norm)
        some = torch.tensor([2, 3, 11])
        stream.keep(LogitRows(some, torch.tensor([0, 3], dtype=torch.int32)))
        stream.add(second[rank][some].to(dtype), norm)
        wanted = (numbers(7) + first.sum(0) + second.sum(0))[some]
        right[f"{dtype} keep"] = [torch.equal(stream.rows().float(), wanted)]
    return {"right": right, "digest": digest.hexdigest(), "stale": is_stale(team), "recorded": recorded(team)}


def is_stale(team: Team) -> bool:
    """Return whether a sum leaves rows of the stream stale on this rank, so that reading them directly would be
    wrong."""
    rank, size = team.group.rank, team.group.size
    norm = RMSNorm("norm", HIDDEN, EPS, Sharding(rank, size, torch.float32, team.group))
    norm.allocate()
    stream = Stream(numbers(7), size)
    (first, *_) = parts(size)
    stream.add(first[rank].clone(), norm)
    return not torch.equal(stream._rows, numbers(7) + first.sum(0))


def recorded(team: Team) -> bool:
    """Return whether reading the stream can be part of a recorded step."""
    group, rank, size = team.group, team.group.rank, team.group.size
    if core.isa() == "reference" or not isinstance(group, RecordableGroup):
        return True
    norm = RMSNorm("norm", HIDDEN, EPS, Sharding(rank, size, torch.float32, group))
    norm.allocate()
    start, (first, *_) = numbers(7), parts(size)
    mine, every_row = first[rank].clone(), torch.arange(ROWS)

    def step() -> Tensor:
        stream = Stream(start, size)
        stream.add(mine, norm)
        return ops.take_rows(stream.rows(), every_row)

    graph = Graph(step)
    group.replay(graph.run)
    return torch.equal(graph.output, numbers(7) + first.sum(0))


@pytest.mark.parametrize(("tp", "collectives"), [(1, "auto"), (2, "auto"), (3, "auto"), (6, "auto"), (2, "gloo")])
def test_the_stream_is_read_alike_on_every_rank(tp: int, collectives: str) -> None:
    """Sums of small integers are exact, so plain addition gives the expected rows."""
    ranks = run_ranks(tp, "tests.runtime.test_stream:read_between_sums", collectives=collectives)
    for found in ranks:
        assert all(all(right) for right in found["right"].values()), found["right"]
        assert found["digest"] == ranks[0]["digest"] and found["recorded"]


@pytest.mark.skipif(core.isa() == "reference", reason="plain torch updates all rows in every sum")
def test_rows_are_stale_between_sums_over_shared_memory() -> None:
    """Otherwise the tests above could not fail: each of three ranks keeps only a part of the rows up to date."""
    assert [found["stale"] for found in run_ranks(3, "tests.runtime.test_stream:read_between_sums")] == [True] * 3
