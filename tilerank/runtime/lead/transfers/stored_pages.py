"""Pages of the tree that the ranks keep in files (rank/page_store.py), where they outlast their memory and the server.

When a sequence ends or is preempted, the ranks write the pages that it leaves in the tree.
"""

from collections import abc
from collections.abc import Iterator
from itertools import takewhile

from tilerank.kernels.kv_pages import PAGE_TOKENS

from ...protocol.engine_state import EngineState
from ...protocol.rank_messages import KeepPages, LoadPages
from ...rank.page_store import PageStore
from ...rank.worker import Worker
from ..cache_kind import CacheKind
from ..pages import PagePool
from ..sequence import Sequence
from .page_reads import PageReads, in_pieces


class StoredPages(PageReads[tuple[int, bytes]]):
    """The files of all ranks. store: those of rank 0, which say what there is."""

    def __init__(
        self, worker: Worker, store: PageStore, pool: PagePool, after: abc.Sequence[CacheKind[Sequence]]
    ) -> None:
        super().__init__(pool, after)
        self._worker = worker
        self._store = store
        self._hit_tokens = 0  # of prompts, read when they were first admitted

    def _find(self, sequence: Sequence, missing: Iterator[tuple[int, int, bytes]]) -> list[list[tuple[int, bytes]]]:
        found = takewhile(lambda page: page[2] in self._store, missing)
        return in_pieces([(number, digest) for _, number, digest in found], self._store.page_bytes)

    def _load(self, sequence: Sequence, piece: list[tuple[int, bytes]], *, first: bool) -> bool:
        """Count the pages of each piece as far as every rank has read it."""
        self._worker.announce(LoadPages(piece))
        pages = self._store.load(piece)
        if first:
            sequence.hits += pages * PAGE_TOKENS
            self._hit_tokens += pages * PAGE_TOKENS
        self._count(sequence, pages)
        return pages == len(piece)

    def release(self, sequence: Sequence, *, share: bool = True) -> None:
        """Keep the pages of a sequence that has run."""
        has_run = sequence in self._reads
        super().release(sequence, share=share)
        pages = self._pool.tables[sequence].shared if has_run else []
        if share and pages:
            kept = [(page.number, page.digest) for page in pages]
            self._worker.announce(KeepPages(kept))
            self._store.keep(kept)

    def report(self, state: EngineState) -> None:
        store = self._store
        state.hit_tokens += self._hit_tokens
        state.kv_dir_bytes, state.kv_dir_capacity = store.files.nbytes, store.files.capacity
        state.kv_dir_written, state.kv_dir_read, state.kv_dir_refused = store.written, store.read, store.refused
