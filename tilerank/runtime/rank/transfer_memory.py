"""The memory through which prefill ranks give pages of the KV cache to decode ranks.

It is a memory file that the supervisor holds and the ranks of both groups map, in slots of one page each. A slot has
the heads of the whole model in their order, whatever the cut of either group: a prefill rank writes those of its heads
that no rank before it has, and a decode rank reads its own.

A slot begins with the digest of its page (lead/pages.py: page_digest). It is zeroed before any rank writes other heads
to the slot, and written once all have. A rank that finds the same digest before and after it has copied its heads has
therefore copied this page, even if the other group has failed or started again meanwhile.
"""

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilerank.kernels.kv_pages import KVPages
from tilerank.kernels.latent_pages import LatentPages
from tilerank.parallel.group import Group

from ..protocol.rank_messages import GivePages, TakePages
from ..step.cache import Cache, CacheSpec, HeadPlace, PagedKV

_DIGEST_BYTES = 16
_HEADER_BYTES = 64
"""Bytes of a slot before its heads: the digest, and what aligns them."""


@dataclass(frozen=True)
class Transfer:
    """The part of a rank in a server whose prefill ranks are apart. fd: of the memory file. gives: whether it is a
    prefill rank."""

    fd: int
    gives: bool


@dataclass(frozen=True)
class _Heads:
    """A tensor of a cache, pages[page, head, byte], and where a slot has its heads, from byte `offset` on.

    place: of the heads of this rank. count: how many of them are heads of the model.
    """

    pages: Tensor
    place: HeadPlace
    count: int
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of all heads of the model."""
        return self.place.total * self.pages.shape[2]

    def write(self, number: int, slot: Tensor) -> None:
        """Copy the heads of page `number` that no rank before this one has to a slot."""
        place = self.place
        self._in_slot(slot, place.own, place.first + self.count).copy_(
            self.pages[number, place.own - place.first : self.count]
        )

    def read(self, number: int, slot: Tensor) -> None:
        """Copy the heads of this rank from a slot to page `number`."""
        first = self.place.first
        self.pages[number, : self.count].copy_(self._in_slot(slot, first, first + self.count))

    def _in_slot(self, slot: Tensor, first: int, stop: int) -> Tensor:
        nbytes = self.pages.shape[2]
        return slot[self.offset + first * nbytes : self.offset + stop * nbytes].view(stop - first, nbytes)


class TransferMemory:
    """The slots of a memory file, for the pages of `caches`, which are those of `specs`.

    slots: how many prefill ranks use; 0 for decode ranks, which read as many as there are. slot_bytes: of each.
    """

    def __init__(
        self, transfer: Transfer, specs: Sequence[CacheSpec], caches: Sequence[Cache], group: Group, slots: int
    ) -> None:
        self.slots = slots if transfer.gives else 0
        self._fd, self._group = transfer.fd, group
        self._heads: list[_Heads] = []
        offset = _HEADER_BYTES
        for spec, cache in zip(specs, caches, strict=True):
            for pages, place in _heads_of(spec, cache, group.rank):
                heads = _Heads(pages, place, min(pages.shape[1], place.total - place.first), offset)
                self._heads.append(heads)
                offset += heads.nbytes
        self.slot_bytes = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory: mmap.mmap | None = None
        self._rows = torch.empty(0, self.slot_bytes, dtype=torch.uint8)  # [slot, byte]
        nbytes = self.slots * self.slot_bytes
        if os.fstat(self._fd).st_size < nbytes:  # it never shrinks, because other ranks have mapped it
            os.ftruncate(self._fd, nbytes)

    def follow(self, message: GivePages | TakePages) -> None:
        """Ranks above 0: do what a message of rank 0 says."""
        match message:
            case GivePages(pages):
                self.give(pages)
            case TakePages(pages):
                self.take(pages)

    def give(self, pages: Sequence[tuple[int, int, bytes]]) -> None:
        """Copy pages, (number, slot, digest), to the memory. A collective: all ranks call this with the same pages."""
        slots = [self._slot(slot) for _, slot, _ in pages]
        for _, slot, _ in pages:
            self._set_digest(slot, bytes(_DIGEST_BYTES))
        for (number, _, _), rows in zip(pages, slots, strict=True):
            assert rows is not None
            for heads in self._heads:
                heads.write(number, rows)
        self._group.barrier()
        for _, slot, digest in pages if self._group.rank == 0 else ():
            self._set_digest(slot, digest)

    def take(self, pages: Sequence[tuple[int, int, bytes]]) -> int:
        """Copy pages, (number, slot, digest) in the order of their tokens, from the memory. Returns how many of the
        first ones every rank has found there. A collective: all ranks call this with the same pages."""
        found = next((index for index, page in enumerate(pages) if not self._take(*page)), len(pages))
        return int(self._group.all_gather(torch.tensor([found])).min())

    def _take(self, number: int, slot: int, digest: bytes) -> bool:
        row = self._slot(slot)
        if row is None or self._digest(slot) != digest:
            return False
        for heads in self._heads:
            heads.read(number, row)
        return self._digest(slot) == digest

    def _slot(self, slot: int) -> Tensor | None:
        """Return the bytes of a slot. None if the memory does not reach so far."""
        if slot >= len(self._rows):
            slots = os.fstat(self._fd).st_size // self.slot_bytes
            if slot >= slots:
                return None
            self._memory = mmap.mmap(self._fd, slots * self.slot_bytes)
            self._rows = torch.frombuffer(self._memory, dtype=torch.uint8).view(slots, self.slot_bytes)
        return self._rows[slot]

    def _digest(self, slot: int) -> bytes:
        assert self._memory is not None
        begin = slot * self.slot_bytes
        return self._memory[begin : begin + _DIGEST_BYTES]

    def _set_digest(self, slot: int, digest: bytes) -> None:
        assert self._memory is not None
        begin = slot * self.slot_bytes
        self._memory[begin : begin + _DIGEST_BYTES] = digest


def _heads_of(spec: CacheSpec, cache: Cache, rank: int) -> list[tuple[Tensor, HeadPlace]]:
    """Return the tensors of a cache as bytes [page, head, byte], and the place of their heads. Every rank has the
    latents of a token whole, as one head, which rank 0 writes."""
    match cache:
        case KVPages() if isinstance(spec, PagedKV):
            place = spec.place or HeadPlace(0, 0, spec.kv_heads)
            return [(tensor.flatten(2).view(torch.uint8), place) for tensor in cache.tensors]
        case LatentPages():
            place = HeadPlace(0, min(rank, 1), 1)
            return [(tensor.flatten(1).view(torch.uint8).unsqueeze(1), place) for tensor in cache.tensors]
    return []


def transfer_memory(
    transfer: Transfer | None, specs: Sequence[CacheSpec], caches: Sequence[Cache], group: Group, slots: int
) -> TransferMemory | None:
    """Return the memory between prefill ranks and decode ranks; None if the same ranks do both."""
    return None if transfer is None else TransferMemory(transfer, specs, caches, group, slots)
