"""The memory through which prefill ranks give pages of the KV cache, and states, to decode ranks.

It has an area for each kind of them (protocol/areas.py): a memory file that the supervisor holds and the ranks of both
groups map, in slots of one page, or of the states of one sequence. A slot has the heads of the whole model in their
order, whatever the cut of either group: a prefill rank writes those of its heads that no rank before it has, and a
decode rank reads its own.

A slot begins with the digest of its page (lead/pages.py: page_digest). It is zeroed before any rank writes other heads
to the slot, and written once all have. A rank that finds the same digest before and after it has copied its heads has
therefore copied this page, even if the other group has failed or started again meanwhile.

Where prefill ranks are on another host, the memory of the decode ranks has room for the pages of one message. Rank 0
fetches them there from that of the prefill ranks before all ranks copy their heads.
"""

import hashlib
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilerank.kernels.kv_pages import KVPages
from tilerank.kernels.latent_pages import LatentPages
from tilerank.kernels.state_slots import StateSlots
from tilerank.parallel.group import Group

from ..protocol.areas import Area
from ..protocol.page_requests import ReadSlots, SlotReader
from ..protocol.rank_messages import GivePages, MovedPage, TakePages
from ..step.cache import Budget, Cache, CacheSpec, EncoderKV, HeadPlace, PagedKV, RecurrentState, copy_states

_DIGEST_BYTES = 16
_ALIGNMENT = 64
"""Bytes of a slot before its heads, which begin with the digest; heads of each tensor begin at a multiple."""
_AREAS = {
    Budget.TOKENS: Area.PAGES,
    Budget.WINDOW_TOKENS: Area.WINDOW_PAGES,
    Budget.STATES: Area.STATES,
    Budget.SOURCE_TOKENS: Area.SOURCE_PAGES,
}
"""Where the caches of a layer go, by what they are counted in."""


@dataclass(frozen=True)
class Transfer:
    """The part of a rank in a server whose prefill ranks are apart. files: the memory file of each area. gives: whether
    it is a prefill rank. fetches: whether the prefill ranks are on another host. reader: of their memory, on rank 0."""

    files: tuple[int, ...]
    gives: bool
    fetches: bool = False
    reader: SlotReader | None = None


@dataclass(frozen=True)
class _Heads:
    """A tensor of a cache, pages[page, head, ...], and where a slot has its heads, from byte `offset` on.

    place: of the heads of this rank. count: how many of them are heads of the model.
    """

    pages: Tensor
    place: HeadPlace
    count: int
    offset: int

    @property
    def stop(self) -> int:
        """The byte of a slot after all heads of the model."""
        return self.offset + self.place.total * self.pages.shape[2:].numel() * self.pages.itemsize

    def in_slots(self, rows: Tensor) -> Tensor:
        """Return the heads of all slots, [slot, head, ...], whose bytes are rows[slot, byte]."""
        heads = rows[:, self.offset : self.stop].view(self.pages.dtype)
        return heads.view(rows.shape[0], self.place.total, *self.pages.shape[2:])

    def write(self, number: int, slot: Tensor) -> None:
        """Copy the heads of page `number` that no rank before this one has to a slot [head, ...]."""
        place, stop = self.place, self.place.first + self.count
        slot[place.own : stop].copy_(self.pages[number, place.own - place.first : self.count])

    def read(self, number: int, slot: Tensor) -> None:
        """Copy the heads of this rank from a slot [head, ...] to page `number`."""
        first = self.place.first
        self.pages[number, : self.count].copy_(slot[first : first + self.count])


class _Slots:
    """The slots of a memory file, for the pages of the layers `caches`.

    count: how many prefill ranks use; 0 for decode ranks, which read as many as there are. nbytes: of each.
    """

    def __init__(self, file: int, caches: Sequence[tuple[CacheSpec, Cache]], rank: int, count: int) -> None:
        self.count = count
        self._file = file
        self._heads: list[_Heads] = []
        offset = _ALIGNMENT
        for spec, cache in caches:
            for pages, place in _heads_of(spec, cache, rank):
                heads = _Heads(pages, place, max(min(pages.shape[1], place.total - place.first), 0), offset)
                self._heads.append(heads)
                offset = -(-heads.stop // _ALIGNMENT) * _ALIGNMENT
        self.nbytes = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        layout = [(heads.offset, heads.place.total, heads.pages.shape[2:], heads.pages.dtype) for heads in self._heads]
        self._key = hashlib.blake2b(repr(layout).encode()).digest()
        self._memory: mmap.mmap
        self._mapped = 0  # slots
        self._views: list[tuple[_Heads, Tensor]] = []  # the heads of each tensor of the cache in all of them
        self.reserve(count)

    def reserve(self, count: int) -> None:
        """Make room for so many slots."""
        if os.fstat(self._file).st_size < count * self.nbytes:  # it never shrinks, because other ranks have mapped it
            os.ftruncate(self._file, count * self.nbytes)

    def begin_of(self, digest: bytes) -> bytes:
        """Return what a slot with this page begins with. It depends on the layout as well, because the ranks of another
        host may have been started with other options."""
        return hashlib.blake2b(digest, key=self._key, digest_size=_DIGEST_BYTES).digest()

    def write(self, pages: Sequence[MovedPage]) -> None:
        """Copy the heads of pages to their slots, which are without a digest then."""
        for _, slot, _ in pages:
            self._set_begin(slot, bytes(_DIGEST_BYTES))
        for number, slot, _ in pages:
            for heads, in_slots in self._views:
                heads.write(number, in_slots[slot])

    def read(self, page: MovedPage) -> bool:
        """Copy the heads of a page from its slot. Returns whether it was there all the time."""
        number, slot, digest = page
        begin = self.begin_of(digest)
        if self._begin(slot) != begin:
            return False
        for heads, in_slots in self._views:
            heads.read(number, in_slots[slot])
        return self._begin(slot) == begin

    def set_digest(self, slot: int, digest: bytes) -> None:
        self._set_begin(slot, self.begin_of(digest))

    def fill(self, slot: int, content: memoryview) -> None:
        """Copy the bytes of a slot of another host, which begins with its digest."""
        self._set_begin(slot, bytes(_DIGEST_BYTES))
        start = slot * self.nbytes
        self._memory[start + _DIGEST_BYTES : start + self.nbytes] = content[_DIGEST_BYTES:]
        self._set_begin(slot, bytes(content[:_DIGEST_BYTES]))

    def _set_begin(self, slot: int, begin: bytes) -> None:
        is_there = self._map(slot)
        assert is_there, "the memory was made large enough"
        start = slot * self.nbytes
        self._memory[start : start + _DIGEST_BYTES] = begin

    def _begin(self, slot: int) -> bytes | None:
        """Return what a slot begins with. None if the memory does not reach so far."""
        start = slot * self.nbytes
        return self._memory[start : start + _DIGEST_BYTES] if self._map(slot) else None

    def _map(self, slot: int) -> bool:
        """Map the memory as far as it reaches. Returns whether it has this slot."""
        if slot >= self._mapped and (slots := os.fstat(self._file).st_size // self.nbytes) > slot:
            self._memory, self._mapped = mmap.mmap(self._file, slots * self.nbytes), slots
            rows = torch.frombuffer(self._memory, dtype=torch.uint8).view(slots, self.nbytes)
            self._views = [(heads, heads.in_slots(rows)) for heads in self._heads]
        return slot < self._mapped


class TransferMemory:
    """The areas of the memory, for the pages of `caches`, which are those of `specs`.

    slots: how many of each area prefill ranks use; none where they have no such pages. slot_bytes: of a slot of each
    area. gives: whether this is a prefill rank.
    """

    def __init__(
        self,
        transfer: Transfer,
        specs: Sequence[CacheSpec],
        caches: Sequence[Cache],
        group: Group,
        slots: Sequence[int],
    ) -> None:
        self.gives, self._caches, self._group = transfer.gives, caches, group
        self._fetches, self._reader = transfer.fetches, transfer.reader
        self._areas: list[_Slots] = []
        for kind in Area:
            held = [pair for pair in zip(specs, caches, strict=True) if _AREAS.get(pair[0].budget) is kind]
            count = slots[kind] if transfer.gives else 0
            self._areas.append(_Slots(transfer.files[kind], held, group.rank, count))
        self.slots = [area.count for area in self._areas]
        self.slot_bytes = [area.nbytes for area in self._areas]

    def follow(self, message: GivePages | TakePages) -> None:
        """Ranks above 0: do what a message of rank 0 says."""
        match message:
            case GivePages():
                self.give(message)
            case TakePages():
                self.take(message)

    def give(self, message: GivePages) -> None:
        """Copy pages of each area to the memory. A collective: all ranks call this with the same message."""
        copy_states(self._caches, message.state_copies)
        for area, moved in zip(self._areas, message.pages, strict=True):
            area.write(moved)
        self._group.barrier()
        for area, moved in zip(self._areas, message.pages, strict=True) if self._group.rank == 0 else ():
            for _, slot, digest in moved:
                area.set_digest(slot, digest)

    def take(self, message: TakePages) -> bool:
        """Copy pages of each area from the memory. Returns whether every rank has found all of them there. A
        collective: all ranks call this with the same message."""
        copy_states(self._caches, message.state_copies)
        of_areas = zip(self._areas, self._fetched(message.pages) if self._fetches else message.pages, strict=True)
        found = all(area.read(page) for area, moved in of_areas for page in moved)
        return bool(self._group.all_gather(torch.tensor([int(found)])).min())

    def _fetched(self, pages: Sequence[Sequence[MovedPage]]) -> list[list[MovedPage]]:
        """Fetch the slots of pages in each area to slots 0, 1, ... of the memory of this host, as far as the other host
        has them. Returns the pages with these slots."""
        here = [[(number, slot, digest) for slot, (number, _, digest) in enumerate(moved)] for moved in pages]
        if self._reader is not None:
            wanted = [
                [(slot, area.begin_of(digest)) for _, slot, digest in moved]
                for area, moved in zip(self._areas, pages, strict=True)
            ]
            for area, moved in zip(self._areas, here, strict=True):
                area.reserve(len(moved))
            places = ((area, slot) for area, moved in zip(self._areas, here, strict=True) for _, slot, _ in moved)
            contents = self._reader.read(ReadSlots(wanted, self.slot_bytes))
            for content, (area, slot) in zip(contents, places, strict=False):
                if content:
                    area.fill(slot, content)
        self._group.barrier()
        return here


def _heads_of(spec: CacheSpec, cache: Cache, rank: int) -> list[tuple[Tensor, HeadPlace]]:
    """Return the tensors of a cache as [page, head, ...], and the place of their heads. Every rank has the latents of a
    token whole, as one head, which rank 0 writes."""
    match cache:
        case KVPages() if isinstance(spec, PagedKV | EncoderKV):
            place = spec.place or HeadPlace(0, 0, spec.kv_heads)
            return [(tensor, place) for tensor in cache.tensors]
        case LatentPages():
            place = HeadPlace(0, min(rank, 1), 1)
            return [(tensor.unsqueeze(1), place) for tensor in cache.tensors]
        case StateSlots() if isinstance(spec, RecurrentState):
            return _heads_of_states(spec, cache)
    return []


def _heads_of_states(spec: RecurrentState, states: StateSlots) -> list[tuple[Tensor, HeadPlace]]:
    """Return the last inputs of the convolution, of queries, keys and values, as [slot, head, input, dim], and the
    matrices of the delta rule, without what both have of drafts."""
    key_heads, value_heads = spec.key_heads, spec.value_heads
    keys = spec.keys or HeadPlace(0, 0, key_heads)
    values = spec.values or HeadPlace(0, 0, value_heads)
    parts = [(key_heads, spec.key_dim, keys)] * 2 + [(value_heads, spec.value_dim, values)]
    inputs = torch.split(states.conv[:, : spec.conv_width - 1], [heads * dim for heads, dim, _ in parts], dim=2)
    return [
        *(
            (tensor.view(*tensor.shape[:2], heads, dim).transpose(1, 2), place)
            for tensor, (heads, dim, place) in zip(inputs, parts, strict=True)
        ),
        (states.state, values),
    ]


def transfer_memory(
    transfer: Transfer | None,
    specs: Sequence[CacheSpec],
    caches: Sequence[Cache],
    group: Group,
    slots: Sequence[int],
) -> TransferMemory | None:
    """Return the memory between prefill ranks and decode ranks; None if the same ranks do both."""
    return None if transfer is None else TransferMemory(transfer, specs, caches, group, slots)
