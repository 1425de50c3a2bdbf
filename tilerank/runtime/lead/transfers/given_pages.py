"""The pages that prefill ranks give to decode ranks, through the slots of a memory that both have mapped.

A prompt is admitted with a slot for each of its full pages. Once it is computed, the ranks copy its pages there, except
those that a slot has already because another prompt begins alike. The slots stay pinned until the request is cancelled,
which the HTTP process does once the decode ranks have taken the pages. Prompts wait while all slots are pinned.
"""

from weakref import WeakKeyDictionary

from ...protocol.engine_state import EngineState
from ...protocol.rank_messages import GivePages
from ...rank.transfer_memory import TransferMemory
from ...rank.worker import Worker
from ..cache_kind import CacheKind
from ..lru_pool import NumberedEntry, NumberedPool
from ..pages import PagePool, full_pages, page_digest
from ..sequence import Sequence


class GivenPages(CacheKind[Sequence]):
    """The slots of `memory`, numbered from 0. A slot is ready once it has a page. pages: of the cache."""

    def __init__(self, worker: Worker, memory: TransferMemory, pages: PagePool) -> None:
        self._worker = worker
        self._memory = memory
        self._pages = pages
        self._slots = NumberedPool(memory.slots)
        self._digests: WeakKeyDictionary[Sequence, list[bytes]] = WeakKeyDictionary()
        self._pinned: dict[Sequence, list[NumberedEntry]] = {}  # by sequence that runs
        self._given: dict[int, list[NumberedEntry]] = {}  # by request that is computed
        self._given_pages = 0

    def reserve(self, sequence: Sequence) -> bool:
        pinned = self._slots.pin([NumberedEntry(digest, 1) for digest in self._digests_of(sequence)])
        if pinned is None:
            return False
        self._pinned[sequence] = pinned
        return True

    def release(self, sequence: Sequence, *, share: bool = True) -> None:
        for entry in self._pinned.pop(sequence, []):
            self._slots.unpin(entry)

    def give(self, sequence: Sequence) -> list[int]:
        """Lead the ranks in copying the pages of a prompt that is computed. Returns their slots, pinned for its
        request."""
        entries, numbers = self._pinned.pop(sequence), self._pages.tables[sequence].numbers
        new = [
            (number, entry.numbers[0], digest)
            for number, entry, digest in zip(numbers, entries, self._digests_of(sequence), strict=False)
            if not entry.ready
        ]
        if new:
            self._worker.announce(GivePages(new))
            self._memory.give(new)
        for entry in entries:
            entry.ready = True
        self._given[sequence.request] = entries
        self._given_pages += len(new)
        return [entry.numbers[0] for entry in entries]

    def give_back(self, request: int) -> None:
        """Unpin the slots of a request whose pages have been taken, or are not needed."""
        for entry in self._given.pop(request, []):
            self._slots.unpin(entry)

    def report(self, state: EngineState) -> None:
        state.transfer_slots, state.transfer_slots_used = self._slots.capacity, self._slots.pinned
        state.given_pages = self._given_pages

    def _digests_of(self, sequence: Sequence) -> list[bytes]:
        """Return the digest of each full page of a prompt, computed once."""
        digests = self._digests.get(sequence)
        if digests is None:
            digests, digest = [], b""
            for keys in full_pages(sequence.keys[: sequence.prompt_len]):
                digest = page_digest(digest, keys)
                digests.append(digest)
            self._digests[sequence] = digests
        return digests
