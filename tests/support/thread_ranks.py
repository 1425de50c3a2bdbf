"""Ranks that are threads of one process, for tests of sharded layers."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from tilerank.loader.rectangle import read_plain
from tilerank.parallel.group import Group
from tilerank.parallel.parameters import Layer
from tilerank.parallel.shard import Strategy
from tilerank.parallel.sharding import Sharding

EPS = torch.finfo(torch.float32).eps


class Exchange:
    """Exchanges tensors between ranks that are threads of one process. One rank runs at a time, because they share one
    pool of kernel threads."""

    def __init__(self, size: int) -> None:
        self.turn = threading.Lock()
        self.barrier = threading.Barrier(size, timeout=300)
        self.given: list[Tensor] = [torch.empty(0)] * size

    def swap(self, rank: int, x: Tensor) -> Tensor:
        self.given[rank] = x.clone()
        self.wait()
        parts = torch.stack(self.given)
        self.wait()
        return parts

    def wait(self) -> None:
        self.turn.release()
        try:
            self.barrier.wait()
        finally:
            self.turn.acquire()


@dataclass
class ThreadGroup(Group):
    rank: int
    size: int
    exchange: Exchange = field(repr=False)
    waited_s = 0.0

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.exchange.swap(self.rank, x).float().sum(0).to(x.dtype)

    def all_gather(self, x: Tensor) -> Tensor:
        return self.exchange.swap(self.rank, x)

    def gather_columns(self, x: Tensor, starts: Tensor, n: int) -> Tensor:
        widths = starts.diff().tolist()
        return torch.cat([part[:, :width] for part, width in zip(self.all_gather(x), widths, strict=True)], dim=1)

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        return self.exchange.swap(self.rank, x)[root]

    def barrier(self) -> None:
        self.exchange.wait()

    def close(self) -> None:
        return


def fill(layer: Layer, checkpoint: dict[str, Tensor]) -> None:
    """Load a layer as the loader does."""
    layer.allocate()
    for rectangle in layer.rectangles():
        assert rectangle.shape == tuple(checkpoint[rectangle.name].shape)
        if rectangle.elements:
            read_plain(rectangle).write([checkpoint[rectangle.name][rectangle.index]])


def on_all_ranks(
    size: int,
    strategy: Strategy,
    body: Callable[[Sharding], Tensor],
    *,
    dtype: torch.dtype = torch.float32,
    cached: int = 0,
) -> list[Tensor]:
    """Return the results of `body` on every rank."""
    exchange = Exchange(size)

    def run(rank: int) -> Tensor:
        with exchange.turn:
            try:
                group = ThreadGroup(rank, size, exchange)
                return body(Sharding(rank, size, dtype, group, strategy, cached))
            except BaseException:
                exchange.barrier.abort()
                raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def assert_all_equal_to(outputs: list[Tensor], expected: Tensor, depth: int) -> None:
    """Assert equality up to the order of fp32 sums of `depth` terms, and the same bits on every rank."""
    for output in outputs:
        assert output.shape == expected.shape
        assert torch.equal(output, outputs[0])
    error = (outputs[0] - expected).abs().max().item()
    assert error <= 4 * EPS * depth**0.5 * expected.abs().max().item()


def random_checkpoint(seed: int, **shapes: tuple[int, ...]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name.replace("__", "."): torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        for name, shape in shapes.items()
    }


sizes = pytest.mark.parametrize("size", range(1, 9))
strategies = pytest.mark.parametrize("strategy", ["pad", "split", "auto"])
