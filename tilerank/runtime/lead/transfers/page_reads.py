"""Pages that the ranks read in place of computing them, and what they are read from: a base of kinds of cache.

A sequence that is admitted looks for the pages that follow those of the tree. They are read into pages of its own, in
pieces between the steps of other sequences, as far as all ranks have them. What cannot be read is computed.
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

    page_bytes: of a page on each rank. pool: has the pages that those of the source continue. after: the kinds that
    have what a sequence no longer needs once pages are read.
    """

    def __init__(self, page_bytes: int, pool: PagePool, after: abc.Sequence[CacheKind[Sequence]]) -> None:
        self._page_bytes = page_bytes
        self._pool = pool
        self._filled: list[CacheKind[Sequence]] = [pool, *after]
        self._reads: dict[Sequence, ReadWork[P]] = {}  # of the running sequences

    @abstractmethod
    def _find(self, sequence: Sequence, missing: Iterator[tuple[int, int, bytes]]) -> list[P]:
        """Return the first of the missing pages of a sequence, as far as the source has them: (index, number, digest)
        of the full pages whose tokens need not be computed, after those of the tree."""

    @abstractmethod
    def _load(self, pages: list[P]) -> int:
        """Lead the ranks in reading pages. Returns how many of the first ones every rank has read."""

    def _on_read(self, sequence: Sequence, tokens: int, *, first: bool) -> None:
        """Count tokens that have been read. first: since the sequence was admitted for the first time."""

    def commit(self, sequence: Sequence) -> None:
        """Find the pages to read."""
        pages = self._find(sequence, self._missing(sequence))
        on_read = partial(self._take, sequence, first=sequence.admitted_s is None)
        self._reads[sequence] = ReadWork(pages, max(PIECE_BYTES // self._page_bytes, 1), self._load, on_read)

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

    def _take(self, sequence: Sequence, pages: int, *, first: bool) -> None:
        """Count the tokens of pages that all ranks have read as cached, and share the pages."""
        sequence.cached += pages * PAGE_TOKENS
        self._on_read(sequence, pages * PAGE_TOKENS, first=first)
        for kind in self._filled:
            kind.publish(sequence)


class ReadWork(WorkInPieces, Generic[P]):
    """The reading of `pages`, `count` of them at a time, on all ranks. It ends with a page that a rank cannot read.

    load: leads a piece. on_read: is called with the number of pages that are read in a piece.
    """

    def __init__(
        self, pages: list[P], count: int, load: Callable[[list[P]], int], on_read: Callable[[int], None]
    ) -> None:
        self.entry = PoolEntry(self, 0, users=1, ready=not pages)
        self._pages = pages
        self._count = count
        self._load = load
        self._on_read = on_read

    def pieces(self, worker: Worker, operations: float) -> Iterator[bool]:
        yield False
        for first in range(0, len(self._pages), self._count):
            pages = self._pages[first : first + self._count]
            read = self._load(pages)
            self.entry.ready = read < len(pages) or first + self._count >= len(self._pages)
            self._on_read(read)
            yield True

    def stop(self, worker: Worker) -> None:
        """The pages that are read already belong to the sequence that gave them back."""
