"""The memory between prefill ranks and decode ranks: heads are cut anew, and what is not whole is not taken."""

import itertools
import os
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor

from tilerank.kernels.kv_pages import KVPages
from tilerank.kernels.latent_pages import LatentPages
from tilerank.parallel.group import SingleGroup
from tilerank.parallel.shard import Strategy, cut_heads
from tilerank.runtime.rank import transfer_memory
from tilerank.runtime.rank.transfer_memory import Transfer, TransferMemory
from tilerank.runtime.step.cache import Cache, HeadPlace, PagedKV, PagedLatent

PAGES, HEADS, DIM = 4, 3, 8
GARBAGE = 99


class OneOf(SingleGroup):
    """A rank of several that act one after the other, rank 0 last."""

    def __init__(self, rank: int) -> None:
        self.rank = rank


@pytest.fixture
def file() -> Iterator[int]:
    fd = os.memfd_create("pages")
    yield fd
    os.close(fd)


def specs_of(tp: int, strategy: Strategy) -> list[PagedKV]:
    """Return what each rank caches of a layer with three KV heads, and of six query heads."""
    cut = cut_heads(6, HEADS, DIM, 64, tp, strategy=strategy)
    return [PagedKV(cut.kv[rank].size, DIM, torch.int8, 0, HeadPlace.of(cut, rank)) for rank in range(tp)]


def heads_of(cache: KVPages, page: int) -> list[Tensor]:
    """Return the bytes of each tensor of a page, [head, byte]."""
    return [tensor.flatten(2).view(torch.uint8)[page] for tensor in cache.tensors]


def fill(cache: KVPages, spec: PagedKV, page: int, content: list[Tensor]) -> None:
    """Set the heads of a rank. Those that a rank before it has as well, which that one gives, get other bytes."""
    assert spec.place is not None
    for mine, whole in zip(heads_of(cache, page), content, strict=True):
        for head in range(spec.place.first, min(spec.place.first + spec.kv_heads, HEADS)):
            mine[head - spec.place.first] = whole[head] if head >= spec.place.own else GARBAGE


CUTS: list[tuple[int, Strategy]] = [(1, "pad"), (2, "pad"), (2, "split"), (3, "pad"), (4, "split"), (7, "split")]


@pytest.mark.parametrize(("given", "taken"), list(itertools.product(CUTS, CUTS)), ids=lambda cut: f"{cut[1]}-{cut[0]}")
def test_heads_are_cut_anew(file: int, given: tuple[int, Strategy], taken: tuple[int, Strategy]) -> None:
    """With codes and scales. Pages 0 and 1 go through slots 2 and 0 to pages 3 and 1."""
    one = KVPages.empty(1, HEADS, DIM, torch.int8)
    pages = [[torch.randint(0, 90, heads.shape, dtype=torch.uint8) for heads in heads_of(one, 0)] for _ in range(2)]
    for rank, spec in reversed(list(enumerate(specs_of(*given)))):
        cache = spec.allocate(PAGES * 32)
        for number, content in enumerate(pages):
            fill(cache, spec, number, content)
        giving = TransferMemory(Transfer(file, True), [spec], [cache], OneOf(rank), 3)
        giving.give([(0, 2, b"first page......"), (1, 0, b"second page.....")])
    for rank, spec in enumerate(specs_of(*taken)):
        cache = spec.allocate(PAGES * 32)
        taking = TransferMemory(Transfer(file, False), [spec], [cache], OneOf(rank), 3)
        assert taking.slot_bytes == giving.slot_bytes
        assert taking.take([(3, 2, b"first page......"), (1, 0, b"second page.....")]) == 2
        assert spec.place is not None
        first, count = spec.place.first, min(spec.kv_heads, HEADS - spec.place.first)
        for number, content in zip((3, 1), pages, strict=True):
            for mine, whole in zip(heads_of(cache, number), content, strict=True):
                assert torch.equal(mine[:count], whole[first : first + count])
                assert not mine[count:].any()
        assert not any(heads.any() for number in (0, 2) for heads in heads_of(cache, number))


def test_latents_are_given_by_one_rank_and_taken_by_all(file: int) -> None:
    spec, content = PagedLatent(32, 8, torch.float32), torch.rand(32, 64)
    for rank in (1, 0):
        cache = LatentPages.empty(2, 32, 8, torch.float32)
        cache.data[1] = content if rank == 0 else GARBAGE
        TransferMemory(Transfer(file, True), [spec], [cache], OneOf(rank), 1).give([(1, 0, b"latents.........")])
    for rank in range(3):
        cache = spec.allocate(64)
        taking = TransferMemory(Transfer(file, False), [spec], [cache], OneOf(rank), 1)
        assert taking.take([(0, 0, b"latents.........")]) == 1
        assert torch.equal(cache.data[0], content) and not cache.data[1].any()


def test_pages_that_are_gone_are_not_taken(file: int) -> None:
    """Another page has the slot, the memory ends before it, and the slot is used again while it is copied."""
    spec = PagedKV(1, 8, torch.float32)
    caches: list[Cache] = [spec.allocate(PAGES * 32)]
    giving = TransferMemory(Transfer(file, True), [spec], caches, SingleGroup(), 2)
    taking = TransferMemory(Transfer(file, False), [spec], [spec.allocate(PAGES * 32)], SingleGroup(), 2)
    page, other = b"a page..........", b"another page...."
    assert taking.take([(0, 0, page)]) == 0
    giving.give([(0, 0, page), (1, 1, other)])
    assert taking.take([(0, 0, page), (1, 1, page), (2, 1, other)]) == 1
    assert taking.take([(0, 2, page)]) == 0
    read = transfer_memory._Heads.read

    def read_slowly(heads: transfer_memory._Heads, number: int, slot: Tensor) -> None:
        read(heads, number, slot)
        giving.give([(2, 0, other)])

    with mock.patch.object(transfer_memory._Heads, "read", read_slowly):
        assert taking.take([(0, 0, page)]) == 0
    assert taking.take([(0, 0, other)]) == 1


def test_the_memory_grows_and_never_shrinks(file: int) -> None:
    """Prefill ranks that start again with a larger cache, and then with a smaller one."""
    spec = PagedKV(1, 8, torch.float32)
    taking = TransferMemory(Transfer(file, False), [spec], [spec.allocate(32)], SingleGroup(), 9)
    assert os.fstat(file).st_size == 0
    for slots, most in ((2, 2), (5, 5), (3, 5)):
        giving = TransferMemory(Transfer(file, True), [spec], [spec.allocate(32)], SingleGroup(), slots)
        assert os.fstat(file).st_size == most * giving.slot_bytes
        giving.give([(0, slots - 1, bytes([slots]) * 16)])
        assert taking.take([(0, slots - 1, bytes([slots]) * 16)]) == 1
