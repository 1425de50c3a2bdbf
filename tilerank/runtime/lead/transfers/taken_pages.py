"""The pages that decode ranks take from prefill ranks (given_pages.py), read as pages of files are."""

from collections import abc
from collections.abc import Iterator
from itertools import takewhile

from ...protocol.engine_state import EngineState
from ...protocol.rank_messages import TakePages
from ...rank.transfer_memory import TransferMemory
from ...rank.worker import Worker
from ..cache_kind import CacheKind
from ..pages import PagePool
from ..sequence import Sequence
from .page_reads import PageReads


class TakenPages(PageReads[tuple[int, int, bytes]]):
    """The slots of `memory` that requests name."""

    def __init__(
        self, worker: Worker, memory: TransferMemory, pool: PagePool, after: abc.Sequence[CacheKind[Sequence]]
    ) -> None:
        super().__init__(memory.slot_bytes, pool, after)
        self._worker = worker
        self._memory = memory
        self._taken = self._missed = 0  # pages, and prompts of which a page was missing

    def _find(self, sequence: Sequence, missing: Iterator[tuple[int, int, bytes]]) -> list[tuple[int, int, bytes]]:
        slots = sequence.slots
        pages = takewhile(lambda page: page[0] < len(slots), missing)
        return [(number, slots[index], digest) for index, number, digest in pages]

    def _load(self, pages: list[tuple[int, int, bytes]]) -> int:
        self._worker.announce(TakePages(pages))
        taken = self._memory.take(pages)
        self._taken += taken
        self._missed += taken < len(pages)
        return taken

    def report(self, state: EngineState) -> None:
        state.taken_pages, state.missed_prompts = self._taken, self._missed
        state.taken_bytes = self._taken * self._memory.slot_bytes
