"""The memory between prefill ranks and decode ranks: heads are cut anew, and what is not whole is not taken."""

import errno
import itertools
import os
import socket
from collections.abc import Iterator, Sequence
from functools import partial
from unittest import mock

import msgspec
import pytest
import torch
from batching import memory_files, served
from torch import Tensor

from tilerank.kernels.kv_pages import KVPages
from tilerank.kernels.latent_pages import LatentPages
from tilerank.kernels.state_slots import StateSlots
from tilerank.parallel.group import Group, SingleGroup
from tilerank.parallel.shard import Cut, Strategy, cut_even_padded, cut_heads, cut_uneven
from tilerank.runtime.protocol import page_requests
from tilerank.runtime.protocol.areas import Area
from tilerank.runtime.protocol.framing import Connection
from tilerank.runtime.protocol.page_requests import SlotReader
from tilerank.runtime.protocol.rank_messages import GivePages, MovedPage, TakePages
from tilerank.runtime.rank import transfer_memory
from tilerank.runtime.rank.transfer_memory import Transfer, TransferMemory
from tilerank.runtime.step.cache import Cache, CacheSpec, HeadPlace, PagedKV, PagedLatent, RecurrentState

PAGES, HEADS, DIM = 4, 3, 8
GARBAGE = 99
Files = tuple[int, ...]


class OneOf(SingleGroup):
    """A rank of several that act one after the other, rank 0 last."""

    def __init__(self, rank: int) -> None:
        self.rank = rank


@pytest.fixture
def files() -> Iterator[Files]:
    with memory_files() as files:
        yield files


@pytest.fixture
def other_files() -> Iterator[Files]:
    """The memory of decode ranks on another host."""
    with memory_files() as files:
        yield files


@pytest.fixture
def reader(files: Files) -> SlotReader:
    """Reads the memory `files` as another host does."""
    return SlotReader(partial(served, files), 60)


def giving(
    files: Files, slots: int, specs: Sequence[CacheSpec], caches: Sequence[Cache], group: Group
) -> TransferMemory:
    return TransferMemory(Transfer(files, True), specs, caches, group, [slots] * len(Area))


def taking(
    files: Files, specs: Sequence[CacheSpec], caches: Sequence[Cache], group: Group, reader: SlotReader | None = None
) -> TransferMemory:
    """reader: of the memory on another host, where `files` are those of the decode ranks."""
    transfer = Transfer(files, False, fetches=reader is not None, reader=reader if group.rank == 0 else None)
    return TransferMemory(transfer, specs, caches, group, [9] * len(Area))


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
def test_heads_are_cut_anew(
    files: Files, other_files: Files, reader: SlotReader, given: tuple[int, Strategy], taken: tuple[int, Strategy]
) -> None:
    """With codes and scales, on one host and on two. Pages 0 and 1 of a layer go through slots 2 and 0 to pages 3 and
    1, and page 1 of a layer with a window goes through slot 1 of its area to page 2."""
    one = KVPages.empty(1, HEADS, DIM, torch.int8)
    made = [[torch.randint(0, 90, heads.shape, dtype=torch.uint8) for heads in heads_of(one, 0)] for _ in range(3)]
    for rank, specs in reversed(list(enumerate(specs_of(*given)))):
        caches = [spec.allocate(PAGES * 32) for spec in specs]
        for layer, number, content in ((0, 0, made[0]), (0, 1, made[1]), (1, 1, made[2])):
            fill(caches[layer], specs[layer], number, content)
        gives = giving(files, 3, specs, caches, OneOf(rank))
        gives.give(GivePages(of_areas([(0, 2, FIRST), (1, 0, SECOND)], [(1, 1, SECOND)])))
    for memory, source in ((files, None), (other_files, reader)):
        for rank, specs in enumerate(specs_of(*taken)):
            caches = [spec.allocate(PAGES * 32) for spec in specs]
            takes = taking(memory, specs, caches, OneOf(rank), source)
            assert takes.slot_bytes == gives.slot_bytes
            assert takes.take(TakePages(of_areas([(3, 2, FIRST), (1, 0, SECOND)], [(2, 1, SECOND)])))
            for layer, number, content in ((0, 3, made[0]), (0, 1, made[1]), (1, 2, made[2])):
                place = specs[layer].place
                assert place is not None
                first, count = place.first, max(min(specs[layer].kv_heads, HEADS - place.first), 0)
                for mine, whole in zip(heads_of(caches[layer], number), content, strict=True):
                    assert torch.equal(mine[:count], whole[first : first + count])
                    assert not mine[count:].any()
            for layer, number in ((0, 0), (0, 2), (1, 0), (1, 1), (1, 3)):
                assert not any(heads.any() for heads in heads_of(caches[layer], number))


KEY_DIM, VALUE_DIM, INPUTS = 4, 6, 3
DELTA_CUTS = [cut_uneven(HEADS, tp) for tp in (1, 2, 4)] + [cut_even_padded(HEADS, 2)]


def name_of(cut: Cut) -> str:
    return f"{len(cut.spans)} ranks with {cut.spans[0].size}"


def states_of(cut: Cut) -> list[RecurrentState]:
    """Return what each rank keeps of a delta net with three key heads, with two value heads each."""
    return [
        RecurrentState(
            keys.size * (2 * KEY_DIM + 2 * VALUE_DIM),
            INPUTS + 1,
            2 * keys.size,
            KEY_DIM,
            VALUE_DIM,
            torch.bfloat16,
            2,
            HeadPlace.apart(keys, HEADS),
            HeadPlace.apart(keys.scaled(2), 2 * HEADS),
        )
        for keys in cut.spans
    ]


def inputs_of(spec: RecurrentState, states: StateSlots, slot: int) -> list[Tensor]:
    """Return the last inputs of queries, keys and values as [input, head, dim]."""
    keys, values = spec.key_heads * KEY_DIM, spec.value_heads * VALUE_DIM
    parts = torch.split(states.conv[slot, :INPUTS], [keys, keys, values], dim=1)
    heads = (spec.key_heads, KEY_DIM), (spec.key_heads, KEY_DIM), (spec.value_heads, VALUE_DIM)
    return [part.view(INPUTS, *sizes) for part, sizes in zip(parts, heads, strict=True)]


@pytest.mark.parametrize(("given", "taken"), list(itertools.product(DELTA_CUTS, DELTA_CUTS)), ids=name_of)
def test_states_are_cut_anew(files: Files, given: Cut, taken: Cut) -> None:
    """Those of slot 0 are copied to slot 1 first, go through slot 2 of the memory, and arrive in slot 3. What both have
    of drafts stays."""
    (whole,) = states_of(cut_uneven(HEADS, 1))
    inputs = [torch.rand(INPUTS, count, dim).bfloat16() for count, dim in ((3, KEY_DIM), (3, KEY_DIM), (6, VALUE_DIM))]
    matrices = torch.rand(6, KEY_DIM, VALUE_DIM)
    message = of_areas([], [], [(1, 2, FIRST)])
    for rank, spec in reversed(list(enumerate(states_of(given)))):
        states = spec.allocate(4)
        states.conv[:, INPUTS:] = GARBAGE
        for mine, every, place in zip(inputs_of(spec, states, 0), inputs, places_of(spec), strict=True):
            count = min(mine.shape[1], place.total - place.first)
            mine[:, :count] = every[:, place.first : place.first + count]
        place = places_of(spec)[2]
        count = min(spec.value_heads, place.total - place.first)
        states.state[0, :count] = matrices[place.first : place.first + count]
        giving(files, 3, [spec], [states], OneOf(rank)).give(GivePages(message, [(0, 1)]))
    for rank, spec in enumerate(states_of(taken)):
        states = spec.allocate(4)
        takes = taking(files, [spec], [states], OneOf(rank))
        assert takes.slot_bytes == taking(files, [whole], [whole.allocate(1)], SingleGroup()).slot_bytes
        assert takes.take(TakePages(of_areas([], [], [(3, 2, FIRST)])))
        for mine, every, place in zip(inputs_of(spec, states, 3), inputs, places_of(spec), strict=True):
            count = min(mine.shape[1], place.total - place.first)
            assert torch.equal(mine[:, :count], every[:, place.first : place.first + count])
            assert not mine[:, count:].any()
        place = places_of(spec)[2]
        count = min(spec.value_heads, place.total - place.first)
        assert torch.equal(states.state[3, :count], matrices[place.first : place.first + count])
        assert not states.state[3, count:].any() and not states.state[:3].any()
        assert not states.conv[:3].any() and not states.conv[3, INPUTS:].any()


def places_of(spec: RecurrentState) -> list[HeadPlace]:
    """Return the places of queries, keys and values."""
    assert spec.keys is not None and spec.values is not None
    return [spec.keys, spec.keys, spec.values]


def test_latents_are_given_by_one_rank_and_taken_by_all(files: Files) -> None:
    spec, content = PagedLatent(32, 8, torch.float32), torch.rand(32, 64)
    for rank in (1, 0):
        cache = LatentPages.empty(2, 32, 8, torch.float32)
        cache.data[1] = content if rank == 0 else GARBAGE
        giving(files, 1, [spec], [cache], OneOf(rank)).give(GivePages(of_areas([(1, 0, FIRST)])))
    for rank in range(3):
        cache = spec.allocate(64)
        assert taking(files, [spec], [cache], OneOf(rank)).take(TakePages(of_areas([(0, 0, FIRST)])))
        assert torch.equal(cache.data[0], content) and not cache.data[1].any()


def test_pages_that_are_gone_are_not_taken(files: Files) -> None:
    """Another page has the slot, the memory ends before it, and the slot is used again while it is copied."""
    spec = PagedKV(1, 8, torch.float32)
    gives = giving(files, 2, [spec], [spec.allocate(PAGES * 32)], SingleGroup())
    takes = taking(files, [spec], [spec.allocate(PAGES * 32)], SingleGroup())
    assert not takes.take(TakePages(of_areas([(0, 0, FIRST)])))
    gives.give(GivePages(of_areas([(0, 0, FIRST), (1, 1, SECOND)])))
    assert takes.take(TakePages(of_areas([(0, 0, FIRST), (1, 1, SECOND)])))
    assert not takes.take(TakePages(of_areas([(0, 0, FIRST), (1, 1, FIRST)])))
    assert not takes.take(TakePages(of_areas([(0, 2, FIRST)])))
    read = transfer_memory._Heads.read

    def read_slowly(heads: transfer_memory._Heads, number: int, slot: Tensor) -> None:
        read(heads, number, slot)
        gives.give(GivePages(of_areas([(2, 0, SECOND)])))

    with mock.patch.object(transfer_memory._Heads, "read", read_slowly):
        assert not takes.take(TakePages(of_areas([(0, 0, FIRST)])))
    assert takes.take(TakePages(of_areas([(0, 0, SECOND)])))


def test_the_memory_grows_and_never_shrinks(files: Files) -> None:
    """Prefill ranks that start again with a larger cache, and then with a smaller one."""
    spec = PagedKV(1, 8, torch.float32)
    takes = taking(files, [spec], [spec.allocate(32)], SingleGroup())
    assert os.fstat(files[Area.PAGES]).st_size == 0
    for slots, most in ((2, 2), (5, 5), (3, 5)):
        gives = giving(files, slots, [spec], [spec.allocate(32)], SingleGroup())
        assert os.fstat(files[Area.PAGES]).st_size == most * gives.slot_bytes[Area.PAGES]
        gives.give(GivePages(of_areas([(0, slots - 1, bytes([slots]) * 16)])))
        assert takes.take(TakePages(of_areas([(0, slots - 1, bytes([slots]) * 16)])))


def test_pages_of_another_host_that_are_gone_are_not_taken(files: Files, other_files: Files) -> None:
    """Another page has the slot, the memory ends before it, the slot is used again while it is read, the ranks of the
    other host have another layout, and there is no connection. One that has ended is replaced."""
    connections: list[socket.socket] = []
    is_away = False

    def dial() -> socket.socket:
        if is_away:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        connections.append(served(files))
        return connections[-1]

    spec = PagedKV(1, 8, torch.float32)
    gives = giving(files, 2, [spec], [spec.allocate(PAGES * 32)], SingleGroup())
    takes = taking(other_files, [spec], [spec.allocate(PAGES * 32)], SingleGroup(), SlotReader(dial, 60))
    gives.give(GivePages(of_areas([(0, 0, FIRST), (1, 1, SECOND)])))
    both = TakePages(of_areas([(0, 0, FIRST), (1, 1, SECOND)]))
    assert takes.take(both) and len(connections) == 1
    assert not takes.take(TakePages(of_areas([(0, 0, SECOND), (1, 1, FIRST)])))
    assert not takes.take(TakePages(of_areas([(0, 2, SECOND)])))
    other = PagedKV(1, 8, torch.bfloat16)
    assert not taking(other_files, [other], [other.allocate(32)], SingleGroup(), SlotReader(dial, 60)).take(both)

    def pread(file: int, nbytes: int, offset: int) -> bytes:
        content = os.pread(file, nbytes, offset)
        if nbytes == gives.slot_bytes[Area.PAGES]:
            gives.give(GivePages(of_areas([(2, 0, SECOND)])))
        return content

    assert takes.take(TakePages(of_areas([(0, 1, SECOND)])))  # this host has no other page any more
    with mock.patch.object(page_requests, "os", mock.Mock(pread=pread, fstat=os.fstat)):
        assert not takes.take(TakePages(of_areas([(0, 0, FIRST)])))
    assert takes.take(TakePages(of_areas([(0, 0, SECOND)])))
    gives.give(GivePages(of_areas([(0, 1, FIRST)])))
    count = len(connections)
    connections[0].shutdown(socket.SHUT_RDWR)
    is_away = True
    assert not takes.take(TakePages(of_areas([(0, 1, FIRST)])))
    is_away = False
    assert takes.take(TakePages(of_areas([(0, 1, FIRST)]))) and len(connections) == count + 1


def test_requests_for_slots_that_make_no_sense_end_the_connection(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    for slots, nbytes in (([[(-1, b"")]], [64]), ([[(1, b"")]], [1 << 60]), ([[]], [1, 2]), ("slots", [1])):
        with served(files) as connection:
            Connection(connection, msgspec.msgpack.Decoder()).send([slots, nbytes])
            assert connection.recv(1) == b""
    assert caplog.text.count("refused a request for slots") == 4
