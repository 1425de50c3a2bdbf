"""The base of the schedulers of texts and of speeches: admission, preemption, and the queue.

First come, first served. A sequence is admitted once every kind of cache of its model has what it needs for all of its
tokens; it gets another page whenever it fills one. If no page is free, the youngest running sequence is preempted: it
releases what it has and waits to be recomputed. The oldest sequence can therefore always continue.
"""

from bisect import insort
from collections.abc import Sequence
from typing import Generic, TypeVar

from .cache_kind import CacheKind, PagedSequence

S = TypeVar("S", bound=PagedSequence)


class BaseScheduler(Generic[S]):
    """The sequences that run and those that wait, both in order of arrival.

    kinds: of cache, in the order in which they are asked at admission. max_running: limit of running sequences.
    """

    def __init__(self, kinds: Sequence[CacheKind[S]], max_running: int) -> None:
        self.kinds = kinds
        self.waiting: list[S] = []
        self.running: list[S] = []
        self.preemptions = 0
        self._max_running = max_running

    def add(self, sequence: S) -> None:
        """Append a sequence to the queue. The caller has checked that it fits in the caches alone."""
        self.waiting.append(sequence)

    def remove(self, sequence: S, *, share: bool = True) -> None:
        """Remove a sequence that is complete or cancelled, and release what it has. share: as in CacheKind.release."""
        if sequence in self.running:
            self.release(sequence, share=share)
        else:
            self.waiting.remove(sequence)

    @property
    def is_full(self) -> bool:
        return len(self.running) >= self._max_running

    def admit(self, sequence: S) -> bool:
        """Let a sequence run if every kind of cache has what it needs; otherwise nothing is taken."""
        for index, kind in enumerate(self.kinds):
            if not kind.reserve(sequence):
                for other in reversed(self.kinds[:index]):
                    other.release(sequence)
                return False
        for kind in self.kinds:
            kind.commit(sequence)
        insort(self.running, sequence, key=_arrival)
        return True

    def grow(self, sequence: S) -> bool:
        """Have room for the next token of a running sequence, if need be that of younger ones. Returns False if this
        has preempted the sequence itself."""
        while not all(kind.grow(sequence) for kind in self.kinds):
            if self.preempt() is sequence:
                return False
        return True

    def draft_room(self, sequence: S, drafts: int) -> int:
        """Have room for drafts after the next token of a running sequence, without preempting any. Returns for how
        many, at most `drafts`."""
        for kind in self.kinds:
            drafts = kind.draft_room(sequence, drafts)
        return drafts

    def new_pages(self, sequence: S) -> list[int]:
        """Return the pages of a running sequence that the ranks have not received, and count them as sent."""
        return [page for kind in self.kinds for page in kind.new_pages(sequence)]

    def preempt(self) -> S:
        """Move the youngest running sequence to its place in the queue, and return it."""
        youngest = self.running[-1]
        self.requeue(youngest)
        self.preemptions += 1
        return youngest

    def requeue(self, sequence: S) -> None:
        """End the run of a sequence, and move it to its place in the queue."""
        self.release(sequence)
        insort(self.waiting, sequence, key=_arrival)

    def release(self, sequence: S, *, share: bool = True) -> None:
        """End the run of a sequence, and release what it has."""
        self.running.remove(sequence)
        for kind in reversed(self.kinds):
            kind.release(sequence, share=share)


def _arrival(sequence: PagedSequence) -> int:
    return sequence.request
