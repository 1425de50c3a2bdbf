"""What decode ranks take of a prompt from prefill ranks (given_pages.py), read as pages of files are.

All of it is taken or nothing: a prompt can be continued only where every kind of cache has what it needs. If a page is
gone, because the prefill ranks have failed meanwhile, the sequence waits again, and its prompt is computed.
"""

from collections import abc
from collections.abc import Iterator
from itertools import islice

from tilerank.kernels.kv_pages import PAGE_TOKENS

from ...protocol.areas import Area
from ...protocol.engine_state import EngineState
from ...protocol.rank_messages import MovedPage, TakePages
from ...rank.transfer_memory import TransferMemory
from ...rank.worker import Worker
from ..cache_kind import CacheKind, MovedKind
from ..pages import PagePool
from ..sequence import Sequence
from .page_reads import PageReads, in_pieces


class TakenPages(PageReads[tuple[Area, MovedPage]]):
    """The slots of `memory` that requests name.

    beside: the kinds whose pages move with those of `pool`. after: as in PageReads.
    """

    def __init__(
        self,
        worker: Worker,
        memory: TransferMemory,
        beside: abc.Sequence[MovedKind[Sequence]],
        pool: PagePool,
        after: abc.Sequence[CacheKind[Sequence]],
    ) -> None:
        super().__init__(pool, after)
        self._worker = worker
        self._memory = memory
        self._kinds: list[MovedKind[Sequence]] = [*beside, pool]
        self._taken = [0 for _ in Area]  # pages
        self._missed = 0  # prompts of which a page was gone

    def reserve(self, sequence: Sequence) -> bool:
        """Take what is in the slots unless the tree has all of these pages."""
        count = len(sequence.slots[Area.PAGES]) if sequence.slots else 0
        reusable = max(len(sequence.reusable_keys) - 1, 0) // PAGE_TOKENS
        sequence.takes = len(self._pool.tables[sequence].shared) < count <= reusable
        return True

    def _find(
        self, sequence: Sequence, missing: Iterator[tuple[int, int, bytes]]
    ) -> list[list[tuple[Area, MovedPage]]]:
        if not sequence.takes:
            return []
        count = len(sequence.slots[Area.PAGES])
        digests = [page.digest for page in self._pool.tables[sequence].shared]
        digests += [digest for _, _, digest in islice(missing, count - len(digests))]
        pieces: list[list[tuple[Area, MovedPage]]] = []
        for kind in self._kinds:
            keys, slots = kind.moved_keys(sequence, digests), sequence.slots[kind.area]
            numbers = kind.take(sequence, count)
            pages = [
                (kind.area, (number, slot, key))
                for number, slot, key in zip(numbers, slots, keys, strict=True)
                if number is not None
            ]
            pieces += in_pieces(pages, self._memory.slot_bytes[kind.area])
        return pieces

    def _load(self, sequence: Sequence, piece: list[tuple[Area, MovedPage]], *, first: bool) -> bool:
        pages: list[list[MovedPage]] = [[] for _ in Area]
        for area, page in piece:
            pages[area].append(page)
        # A slot for states may have been that of a sequence whose snapshot is not copied yet.
        message = TakePages(pages, [copy for kind in self._kinds for copy in kind.pending_copies()])
        self._worker.announce(message)
        if not self._memory.take(message):
            self._missed += 1
            sequence.slots, sequence.is_lost = [], True
            return False
        for area in Area:
            self._taken[area] += len(pages[area])
        return True

    def _end(self, sequence: Sequence) -> None:
        for kind in self._kinds:
            kind.taken(sequence)
        self._count(sequence, len(sequence.slots[Area.PAGES]) - len(self._pool.tables[sequence].shared))

    def report(self, state: EngineState) -> None:
        state.taken_pages, state.missed_prompts = sum(self._taken), self._missed
        state.taken_bytes = sum(
            count * nbytes for count, nbytes in zip(self._taken, self._memory.slot_bytes, strict=True)
        )
