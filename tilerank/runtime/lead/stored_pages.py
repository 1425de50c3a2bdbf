"""Pages of the tree that the ranks keep in files (rank/page_store.py), where they outlast their memory and the server.

When a sequence ends or is preempted, the ranks write the pages that it leaves in the tree. A sequence that is admitted
reads those that follow the pages of the tree, as far as all ranks have them: into pages of its own, in pieces between
the steps of other sequences. What cannot be read is computed.
"""

from collections import abc
from collections.abc import Callable, Iterator
from functools import partial

from tilerank.kernels.kv_pages import PAGE_TOKENS

from ..protocol.engine_state import EngineState
from ..protocol.rank_messages import KeepPages, LoadPages
from ..rank.page_store import PageStore
from ..rank.worker import Worker
from .cache_kind import CacheKind, WorkInPieces
from .lru_pool import PoolEntry
from .pages import PagePool, full_pages, page_digest
from .sequence import Sequence

PIECE_BYTES = 32 << 20
"""Bytes that each rank reads at a time. Other sequences wait for their next step meanwhile."""


class StoredPages(CacheKind[Sequence]):
    """The files of all ranks. store: those of rank 0, which say what there is. pool: has the pages that they continue.
    after: the kinds that have what a sequence no longer needs once pages are read."""

    def __init__(
        self, worker: Worker, store: PageStore, pool: PagePool, after: abc.Sequence[CacheKind[Sequence]]
    ) -> None:
        self._worker = worker
        self._store = store
        self._pool = pool
        self._filled: list[CacheKind[Sequence]] = [pool, *after]
        self._reads: dict[Sequence, ReadWork] = {}  # of the running sequences
        self._hit_tokens = 0  # of prompts, read when they were first admitted

    def commit(self, sequence: Sequence) -> None:
        """Find the pages to read."""
        table, pages = self._pool.tables[sequence], list[tuple[int, bytes]]()
        first = len(table.shared)
        digest = table.shared[-1].digest if first else b""
        for index, keys in enumerate(full_pages(sequence.reusable_keys[:-1], first), first):
            digest = page_digest(digest, keys)
            if digest not in self._store:
                break
            pages.append((table.numbers[index], digest))
        on_read = partial(self._take, sequence, is_hit=sequence.admitted_s is None)
        self._reads[sequence] = ReadWork(self._store, pages, on_read)

    def release(self, sequence: Sequence, *, share: bool = True) -> None:
        """Keep the pages of a sequence that has run."""
        read = self._reads.pop(sequence, None)
        if read is None:
            return
        read.entry.users = 0
        pages = self._pool.tables[sequence].shared
        if share and pages:
            kept = [(page.number, page.digest) for page in pages]
            self._worker.announce(KeepPages(kept))
            self._store.keep(kept)

    def limit(self, sequence: Sequence, tokens: int) -> int:
        return tokens if self._reads[sequence].entry.ready else 0

    def work(self, sequence: Sequence) -> WorkInPieces | None:
        read = self._reads[sequence]
        return None if read.entry.ready else read

    def report(self, state: EngineState) -> None:
        store = self._store
        state.hit_tokens += self._hit_tokens
        state.kv_dir_bytes, state.kv_dir_capacity = store.files.nbytes, store.files.capacity
        state.kv_dir_written, state.kv_dir_read, state.kv_dir_refused = store.written, store.read, store.refused

    def _take(self, sequence: Sequence, pages: int, *, is_hit: bool) -> None:
        """Count the tokens of pages that all ranks have read as cached, and share the pages."""
        tokens = pages * PAGE_TOKENS
        sequence.cached += tokens
        if is_hit:
            sequence.hits += tokens
            self._hit_tokens += tokens
        for kind in self._filled:
            kind.publish(sequence)


class ReadWork(WorkInPieces):
    """The reading of `pages`, (number, digest), on all ranks. It ends with a page that a rank cannot read. on_read: is
    called with the number of pages that are read in a piece."""

    def __init__(self, store: PageStore, pages: list[tuple[int, bytes]], on_read: Callable[[int], None]) -> None:
        self.entry = PoolEntry(self, 0, users=1, ready=not pages)
        self._store = store
        self._pages = pages
        self._on_read = on_read

    def pieces(self, worker: Worker, operations: float) -> Iterator[bool]:
        yield False
        count = max(PIECE_BYTES // self._store.page_bytes, 1)
        for first in range(0, len(self._pages), count):
            pages = self._pages[first : first + count]
            worker.announce(LoadPages(pages))
            read = self._store.load(pages)
            self.entry.ready = read < len(pages) or first + count >= len(self._pages)
            self._on_read(read)
            yield True

    def stop(self, worker: Worker) -> None:
        """The pages that are read already belong to the sequence that gave them back."""
