"""The memory between prefill ranks and decode ranks: heads are cut anew, and what is not whole is not taken."""

import itertools
import os
from collections.abc import Iterator, Sequence
from unittest import mock

import pytest
import torch
from torch import Tensor

from tilerank.kernels.kv_pages import KVPages
from tilerank.kernels.latent_pages import LatentPages
from tilerank.parallel.group import Group, SingleGroup
from tilerank.parallel.shard import Strategy, cut_heads
from tilerank.runtime.protocol.areas import Area
from tilerank.runtime.protocol.rank_messages import MovedPage
from tilerank.runtime.rank import transfer_memory
from tilerank.runtime.rank.transfer_memory import Transfer, TransferMemory
from tilerank.runtime.step.cache import Cache, CacheSpec, HeadPlace, PagedKV, PagedLatent

PAGES, HEADS, DIM = 4, 3, 8
GARBAGE = 99
Files = tuple[int, ...]


class OneOf(SingleGroup):
    """A rank of several that act one after the other, rank 0 last."""

    def __init__(self, rank: int) -> None:
        self.rank = rank


@pytest.fixture
def files() -> Iterator[Files]:
    fds = tuple(os.memfd_create("pages") for _ in Area)
    yield fds
    for fd in fds:
        os.close(fd)


def giving(files: Files, slots: int, specs: Sequence[CacheSpec], caches: Sequence[Cache], group: Group) -> TransferMemory:
    return TransferMemory(Transfer(files, True), specs, caches, group, dict.fromkeys(Area, slots))


def taking(files: Files, specs: Sequence[CacheSpec], caches: Sequence[Cache], group: Group) -> TransferMemory:
    return TransferMemory(Transfer(files, False), specs, caches, group, dict.fromkeys(Area, 9))


def of_areas(*pages: list[MovedPage]) -> list[list[MovedPage]]:
    """Return the pages of each area, none of those that are not named."""
    return [*pages, *([] for _ in range(len(Area) - len(pages)))]


def specs_of(tp: int, strategy: Strategy) -> list[list[PagedKV]]:
    """Return what each rank caches of two layers with three KV heads, and of six query heads. The second has a
    window."""
    cut = cut_heads(6, HEADS, DIM, 64, tp, strategy=strategy)
    return [
        [PagedKV(cut.kv[rank].size, DIM, torch.int8, window, HeadPlace.of(cut, rank)) for window in (0, 64)]
        for rank in range(tp)
    ]


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
FIRST, SECOND = b"first page......", b"second page....."


@pytest.mark.parametrize(("given", "taken"), list(itertools.product(CUTS, CUTS)), ids=lambda cut: f"{cut[1]}-{cut[0]}")
def test_heads_are_cut_anew(files: Files, given: tuple[int, Strategy], taken: tuple[int, Strategy]) -> None:
    """With codes and scales. Pages 0 and 1 of a layer go through slots 2 and 0 to pages 3 and 1, and page 1 of a layer
    with a window goes through slot 1 of its area to page 2."""
    one = KVPages.empty(1, HEADS, DIM, torch.int8)
    made = [[torch.randint(0, 90, heads.shape, dtype=torch.uint8) for heads in heads_of(one, 0)] for _ in range(3)]
    for rank, specs in reversed(list(enumerate(specs_of(*given)))):
        caches = [spec.allocate(PAGES * 32) for spec in specs]
        for layer, number, content in ((0, 0, made[0]), (0, 1, made[1]), (1, 1, made[2])):
            fill(caches[layer], specs[layer], number, content)
        gives = giving(files, 3, specs, caches, OneOf(rank))
        gives.give(of_areas([(0, 2, FIRST), (1, 0, SECOND)], [(1, 1, SECOND)]))
    for rank, specs in enumerate(specs_of(*taken)):
        caches = [spec.allocate(PAGES * 32) for spec in specs]
        takes = taking(files, specs, caches, OneOf(rank))
        assert takes.slot_bytes == gives.slot_bytes
        assert takes.take(of_areas([(3, 2, FIRST), (1, 0, SECOND)], [(2, 1, SECOND)]))
        for layer, number, content in ((0, 3, made[0]), (0, 1, made[1]), (1, 2, made[2])):
            place = specs[layer].place
            assert place is not None
            first, count = place.first, max(min(specs[layer].kv_heads, HEADS - place.first), 0)
            for mine, whole in zip(heads_of(caches[layer], number), content, strict=True):
                assert torch.equal(mine[:count], whole[first : first + count])
                assert not mine[count:].any()
        for layer, number in ((0, 0), (0, 2), (1, 0), (1, 1), (1, 3)):
            assert not any(heads.any() for heads in heads_of(caches[layer], number))


def test_latents_are_given_by_one_rank_and_taken_by_all(files: Files) -> None:
    spec, content = PagedLatent(32, 8, torch.float32), torch.rand(32, 64)
    for rank in (1, 0):
        cache = LatentPages.empty(2, 32, 8, torch.float32)
        cache.data[1] = content if rank == 0 else GARBAGE
        giving(files, 1, [spec], [cache], OneOf(rank)).give(of_areas([(1, 0, FIRST)]))
    for rank in range(3):
        cache = spec.allocate(64)
        assert taking(files, [spec], [cache], OneOf(rank)).take(of_areas([(0, 0, FIRST)]))
        assert torch.equal(cache.data[0], content) and not cache.data[1].any()


def test_pages_that_are_gone_are_not_taken(files: Files) -> None:
    """Another page has the slot, the memory ends before it, and the slot is used again while it is copied."""
    spec = PagedKV(1, 8, torch.float32)
    gives = giving(files, 2, [spec], [spec.allocate(PAGES * 32)], SingleGroup())
    takes = taking(files, [spec], [spec.allocate(PAGES * 32)], SingleGroup())
    assert not takes.take(of_areas([(0, 0, FIRST)]))
    gives.give(of_areas([(0, 0, FIRST), (1, 1, SECOND)]))
    assert takes.take(of_areas([(0, 0, FIRST), (1, 1, SECOND)]))
    assert not takes.take(of_areas([(0, 0, FIRST), (1, 1, FIRST)]))
    assert not takes.take(of_areas([(0, 2, FIRST)]))
    read = transfer_memory._Heads.read

    def read_slowly(heads: transfer_memory._Heads, number: int, slot: Tensor) -> None:
        read(heads, number, slot)
        gives.give(of_areas([(2, 0, SECOND)]))

    with mock.patch.object(transfer_memory._Heads, "read", read_slowly):
        assert not takes.take(of_areas([(0, 0, FIRST)]))
    assert takes.take(of_areas([(0, 0, SECOND)]))


def test_the_memory_grows_and_never_shrinks(files: Files) -> None:
    """Prefill ranks that start again with a larger cache, and then with a smaller one."""
    spec = PagedKV(1, 8, torch.float32)
    takes = taking(files, [spec], [spec.allocate(32)], SingleGroup())
    assert os.fstat(files[Area.PAGES]).st_size == 0
    for slots, most in ((2, 2), (5, 5), (3, 5)):
        gives = giving(files, slots, [spec], [spec.allocate(32)], SingleGroup())
        assert os.fstat(files[Area.PAGES]).st_size == most * gives.slot_bytes[Area.PAGES]
        gives.give(of_areas([(0, slots - 1, bytes([slots]) * 16)]))
        assert takes.take(of_areas([(0, slots - 1, bytes([slots]) * 16)]))
