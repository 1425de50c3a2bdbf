"""What prefill ranks give of a prompt to decode ranks, through the slots of a memory that both have mapped.

A prompt is computed up to the last token at which the decode ranks can continue it, and admitted with a slot for each
page that they need for this, of every kind. Once it is computed, the ranks copy its pages there, except those that a
slot has already because another prompt begins alike. The slots stay pinned until the request is cancelled, which the
HTTP process does once the decode ranks have taken the pages. Prompts wait while all slots of a kind are pinned.
"""

from collections import abc
from weakref import WeakKeyDictionary

from ...protocol.engine_state import EngineState
from ...protocol.rank_messages import GivePages, MovedPage
from ...rank.transfer_memory import TransferMemory
from ...rank.worker import Worker
from ..cache_kind import CacheKind, MovedKind
from ..lru_pool import NumberedEntry, NumberedPool
from ..pages import full_pages, page_digest
from ..sequence import Sequence


class GivenPages(CacheKind[Sequence]):
    """The slots of each area of `memory`, numbered from 0. A slot is ready once it has a page. kinds: those whose
    pages move, at most one for an area."""

    def __init__(self, worker: Worker, memory: TransferMemory, kinds: abc.Sequence[MovedKind[Sequence]]) -> None:
        self._worker = worker
        self._memory = memory
        self._kinds = kinds
        self._slots = [NumberedPool(count) for count in memory.slots]
        self._digests: WeakKeyDictionary[Sequence, list[bytes]] = WeakKeyDictionary()
        self._pinned: dict[Sequence, list[list[NumberedEntry]]] = {}  # by sequence that runs, and area
        self._given: dict[int, list[list[NumberedEntry]]] = {}  # by request that is computed
        self._given_pages = 0

    def reserve(self, sequence: Sequence) -> bool:
        digests = self._digests_of(sequence)
        pinned: list[list[NumberedEntry]] = [[] for _ in self._slots]
        for kind in self._kinds:
            found = self._slots[kind.area].pin([NumberedEntry(key, 1) for key in kind.moved_keys(sequence, digests)])
            if found is None:
                self._unpin(pinned)
                return False
            pinned[kind.area] = found
        self._pinned[sequence] = pinned
        return True

    def release(self, sequence: Sequence, *, share: bool = True) -> None:
        self._unpin(self._pinned.pop(sequence, []))

    def give(self, sequence: Sequence) -> list[list[int]]:
        """Lead the ranks in copying the pages of a prompt that is computed. Returns their slots in each area, pinned
        for its request."""
        pinned, digests = self._pinned.pop(sequence), self._digests_of(sequence)
        new: list[list[MovedPage]] = [[] for _ in pinned]
        for kind in self._kinds:
            keys, numbers = kind.moved_keys(sequence, digests), kind.given(sequence, len(digests))
            new[kind.area] = [
                (number, entry.numbers[0], key)
                for number, entry, key in zip(numbers, pinned[kind.area], keys, strict=True)
                if not entry.ready
            ]
        if any(new):
            message = GivePages(new, [copy for kind in self._kinds for copy in kind.pending_copies()])
            self._worker.announce(message)
            self._memory.give(message)
        for entries in pinned:
            for entry in entries:
                entry.ready = True
        self._given[sequence.request] = pinned
        self._given_pages += sum(map(len, new))
        return [[entry.numbers[0] for entry in entries] for entries in pinned]

    def give_back(self, request: int) -> None:
        """Unpin the slots of a request whose pages have been taken, or are not needed."""
        self._unpin(self._given.pop(request, []))

    def report(self, state: EngineState) -> None:
        """Report the slots of the area that is used most."""
        fullest = max(self._slots, key=lambda slots: slots.pinned / max(slots.capacity, 1))
        state.transfer_slots, state.transfer_slots_used = fullest.capacity, fullest.pinned
        state.given_pages = self._given_pages
        state.least_given = max(kind.least_tokens for kind in self._kinds)

    def _unpin(self, pinned: list[list[NumberedEntry]]) -> None:
        for slots, entries in zip(self._slots, pinned, strict=False):
            for entry in entries:
                slots.unpin(entry)

    def _digests_of(self, sequence: Sequence) -> list[bytes]:
        """Return the digest of each page of a prompt that is computed, found once."""
        digests = self._digests.get(sequence)
        if digests is None:
            digests, digest = [], b""
            for keys in full_pages(sequence.keys[: sequence.length]):
                digest = page_digest(digest, keys)
                digests.append(digest)
            self._digests[sequence] = digests
        return digests
