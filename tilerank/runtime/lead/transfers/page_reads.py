"""Pages that the ranks read in place of computing them, and what they are read from: a base of kinds of cache.

A sequence that is admitted looks for the pages that follow those of the tree. They are read into pages of its own, in
pieces between the steps of other sequences. What cannot be read is computed.
"""

from abc import ABC, abstractmethod
from collections import abc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Generic, TypeVar

from tilerank.kernels.kv_pages import PAGE_TOKENS

from ...rank.worker import Worker
from ..cache_kind import CacheKind, WorkInPieces
from ..lru_pool import PoolEntry
from ..pages import PagePool, full_pages, page_digest
from ..sequence import Sequence

PIECE_BYTES = 32 << 20
"""Bytes that each rank reads at a time. Other sequences wait for their next step meanwhile."""
P = TypeVar("P")


class PageReads(CacheKind[Sequence], Generic[P], ABC):
    """A source of pages. P: how it names a page in the message to the ranks.

    pool: has the pages that those of the source continue. after: the kinds that have what a sequence no longer needs
    once pages are read.
    """

    def __init__(self, pool: PagePool, after: abc.Sequence[CacheKind[Sequence]]) -> None:
        self._pool = pool
        self._filled: list[CacheKind[Sequence]] = [pool, *after]
        self._reads: dict[Sequence, ReadWork[P]] = {}  # of the running sequences

    @abstractmethod
    def _find(self, sequence: Sequence, missing: Iterator[tuple[int, int, bytes]]) -> list[list[P]]:
        """Return what the source has of a sequence, in pieces to be read one after the other. missing: (index, number,
        digest) of the full pages whose tokens need not be computed, after those of the tree."""

    @abstractmethod
    def _load(self, sequence: Sequence, piece: list[P], *, first: bool) -> bool:
        """Lead the ranks in reading a piece. Returns whether every rank has read all of it; otherwise nothing further
        is read. first: since the sequence was admitted for the first time."""

    def _end(self, sequence: Sequence) -> None:
        """Count what was read: every rank has all pieces of a sequence."""

    def commit(self, sequence: Sequence) -> None:
        """Find the pages to read."""
        pieces = self._find(sequence, self._missing(sequence))
        load = partial(self._load, sequence, first=sequence.admitted_s is None)
        self._reads[sequence] = ReadWork(pieces, load, partial(self._end, sequence))

    def release(self, sequence: Sequence, *, share: bool = True) -> None:
        if (read := self._reads.pop(sequence, None)) is not None:
            read.entry.users = 0

    def limit(self, sequence: Sequence, tokens: int) -> int:
        return tokens if self._reads[sequence].entry.ready else 0

    def work(self, sequence: Sequence) -> WorkInPieces | None:
        read = self._reads[sequence]
        return None if read.entry.ready else read

    def _missing(self, sequence: Sequence) -> Iterator[tuple[int, int, bytes]]:
        table = self._pool.tables[sequence]
        first = len(table.shared)
        digest = table.shared[-1].digest if first else b""
        for index, keys in enumerate(full_pages(sequence.reusable_keys[:-1], first), first):
            digest = page_digest(digest, keys)
            yield index, table.numbers[index], digest

    def _count(self, sequence: Sequence, pages: int) -> None:
        """Count the tokens of pages that all ranks have read as cached, and share the pages."""
        sequence.cached += pages * PAGE_TOKENS
        for kind in self._filled:
            kind.publish(sequence)


class ReadWork(WorkInPieces, Generic[P]):
    """The reading of `pieces` on all ranks. load: leads a piece, and returns whether it was read. on_end: is called
    once all of them are."""

    def __init__(self, pieces: list[list[P]], load: Callable[[list[P]], bool], on_end: Callable[[], None]) -> None:
        self.entry = PoolEntry(self, 0, users=1, ready=not pieces)
        self._pieces = pieces
        self._load = load
        self._on_end = on_end

    def pieces(self, worker: Worker, operations: float) -> Iterator[bool]:
        yield False
        for left, piece in zip(reversed(range(len(self._pieces))), self._pieces, strict=True):
            found = self._load(piece)
            self.entry.ready = not found or not left
            if found and not left:
                self._on_end()
            yield True

    def stop(self, worker: Worker) -> None:
        """The pages that are read already belong to the sequence that gave them back."""


def in_pieces(pages: list[P], page_bytes: int) -> list[list[P]]:
    """Cut pages into pieces. page_bytes: of a page on each rank."""
    count = max(PIECE_BYTES // page_bytes, 1)
    return [pages[first : first + count] for first in range(0, len(pages), count)]
