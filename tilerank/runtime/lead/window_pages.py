"""Pages of layers with a window, which keep only the last tokens of a sequence.

A token at position p attends to the window - 1 tokens before it. At the end of a page these are in the last `span`
pages, so that a sequence holds at most span + 1 pages between steps. A chunk of a prompt takes as many more as it
fills, for the time of its step.

A full page belongs to the page of the tree with the same tokens (pages.py). It stays after the sequence has passed it,
until its memory is needed. A prompt that begins with tokens of the tree can continue at the end of a page if the last
`span` pages before it are still here. The pages at the ends where other prompts may continue are kept longest: near the
end of a prompt, where a prompt leaves the tree, and at the end of a sequence. The others go first.
"""

from collections import abc
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import ClassVar

from tilerank.kernels.kv_pages import PAGE_TOKENS

from ..protocol.areas import Area
from ..protocol.engine_state import EngineState
from ..protocol.rank_messages import Step
from ..protocol.sizes import PREFILL_CHUNK
from ..step.cache import num_pages
from .cache_kind import MovedKind
from .lru_pool import NumberedEntry, NumberedPool
from .sequence import OPENING_TOKENS, Scheduled, Sequence, common_tokens


@dataclass(eq=False)
class _Window:
    """The pages of a running sequence.

    quota: how many pages it may hold, whatever other sequences hold.
    first: the index of the first page that it holds, among all pages of the sequence.
    entries: the pages from there on. Their keys are pages of the tree once they are full, unless another sequence has
        filled the same page as well.
    sent: the index of the first page that the ranks have not received.
    filled: how many full pages it has, those that it has passed included.
    known: with how many pages of the tree its tokens begin.
    shared: the pages of the tree that precede its first token to compute, at admission.
    ends: numbers of pages, at the ends of which other prompts may continue.
    """

    quota: int
    first: int = 0
    entries: list[NumberedEntry] = field(default_factory=list)
    sent: int = 0
    filled: int = 0
    known: int = 0
    shared: abc.Sequence[Hashable] = ()
    ends: set[int] = field(default_factory=set)


class WindowPages(MovedKind[Sequence]):
    """All pages of layers with a window of `window` tokens, numbered from 0 to `pages` - 1."""

    area: ClassVar = Area.WINDOW_PAGES

    def __init__(self, pages: int, window: int) -> None:
        self.pool = NumberedPool(pages)
        self._span = num_pages(window - 1)
        self._chunk = min(num_pages(PREFILL_CHUNK), pages - self._span - 1)  # pages that a chunk fills
        self._reserved = 0  # the quotas of all running sequences
        self._windows: dict[Sequence, _Window] = {}

    def reserve(self, sequence: Sequence) -> bool:
        """Reserve the quota of a sequence. Returns False unless chunks of prompts, its own and those of the running
        sequences, have room as well."""
        window = _Window(min(num_pages(sequence.length), self._span + 1))
        prompts = {other: held.quota for other, held in self._windows.items() if other.uncached > 1}
        prompts[sequence] = window.quota
        chunk = max(min(num_pages(one.length) - quota, self._chunk) for one, quota in prompts.items())
        if self._reserved + window.quota + chunk > self.pool.capacity:
            return False
        self._reserved += window.quota
        self._windows[sequence] = window
        return True

    def shared(self, sequence: Sequence, pages: abc.Sequence[Hashable]) -> int:
        """Return how many pages there are up to the last one before which the whole window is held."""
        held = count = 0
        for number, page in enumerate(pages, 1):
            held = held + 1 if page in self.pool else 0
            if held >= min(self._span, number):
                count = number
        window = self._windows[sequence]
        window.known = max(window.known, len(pages))
        window.shared = pages[max(count - self._span, 0) : count]
        return count

    def commit(self, sequence: Sequence) -> None:
        window, prompt_len = self._windows[sequence], sequence.prompt_len
        pinned = self.pool.pin([self.pool[page] for page in window.shared])
        assert pinned is not None, "no page is left of those that were reserved"
        window.entries = pinned
        window.filled = sequence.cached // PAGE_TOKENS
        window.first = window.sent = window.filled - len(pinned)
        window.ends |= {window.known, (prompt_len - 1) // PAGE_TOKENS, (prompt_len - OPENING_TOKENS) // PAGE_TOKENS}

    def grow(self, sequence: Sequence) -> bool:
        window = self._windows[sequence]
        more = min(num_pages(sequence.cached + 1), self._span + 1) - window.quota
        if more > 0:
            if self._reserved + more > self.pool.capacity:
                return False
            window.quota += more
            self._reserved += more
        return True

    def draft_room(self, sequence: Sequence, drafts: int) -> int:
        """Return up to the end of the page that the next token is in, the last one of the quota."""
        return min(drafts, -sequence.cached % PAGE_TOKENS)

    def release(self, sequence: Sequence, *, share: bool = True) -> None:
        window = self._windows.pop(sequence)
        self._reserved -= window.quota
        for entry in window.entries:
            self.pool.unpin(entry)

    def limit(self, sequence: Sequence, tokens: int) -> int:
        """End chunks where the pages end that no other sequence has reserved or takes in this step."""
        window = self._windows[sequence]
        if num_pages(sequence.cached + tokens) - window.first <= window.quota:
            return tokens
        taken = sum(
            max(held.quota, num_pages(other.cached) - held.first)
            for other, held in self._windows.items()
            if other is not sequence
        )
        return min(tokens, (window.first + self.pool.capacity - taken) * PAGE_TOKENS - sequence.cached)

    def announce(self, step: Step, scheduled: Scheduled) -> None:
        for sequence, chunk in scheduled:
            window = self._windows[sequence]
            missing = num_pages(sequence.cached) - window.first - len(window.entries)
            if missing > 0:
                pinned = self.pool.pin([NumberedEntry(object(), 1) for _ in range(missing)])
                assert pinned is not None, "no page is left of those that were reserved"
                window.entries += pinned
            new = [number for entry in window.entries[window.sent - window.first :] for number in entry.numbers]
            if new:
                step.window_pages.append((chunk.sequence, window.sent, new))
                window.sent += len(new)

    def will_share(self, running: Sequence, waiting: Sequence) -> bool:
        """Plan to keep the pages where the tokens of the two sequences part, unless the running one is past this
        place."""
        window, limit = self._windows[running], min(len(running.keys), len(waiting.keys)) - 1
        parts = common_tokens(running, waiting, PAGE_TOKENS, limit) // PAGE_TOKENS
        if parts <= window.filled:
            return False
        window.ends.add(parts)
        return True

    def filled(self, sequence: Sequence, pages: abc.Sequence[Hashable], first: int) -> None:
        """Let other sequences share the new pages, and release those that the next token does not see."""
        window = self._windows[sequence]
        for index in range(max(first, window.first), len(pages)):  # those before it were taken without their windows
            self._share(window.entries[index - window.first], pages[index])
        window.filled = len(pages)
        passed = max(window.filled - self._span - window.first, 0)
        for index, entry in enumerate(window.entries[:passed], window.first):
            self.pool.unpin(entry)
            is_kept = any(end - self._span <= index < end for end in window.ends)
            if entry.ready and not entry.users and not is_kept:
                self.pool.expire(entry.key)
        del window.entries[:passed]
        window.first += passed

    def drop(self, page: Hashable) -> None:
        if page not in self.pool:
            return
        entry = self.pool[page]
        if entry.users:  # of the sequence that is being released and shares nothing
            self.pool.rename(entry, object())
            entry.ready = False
        else:
            self.pool.remove(entry)

    def moved_keys(self, sequence: Sequence, digests: abc.Sequence[bytes]) -> abc.Sequence[bytes]:
        return digests[max(len(digests) - self._span, 0) :]

    def given(self, sequence: Sequence, pages: int) -> list[int]:
        window = self._windows[sequence]
        return [number for entry in window.entries[: pages - window.first] for number in entry.numbers]

    def take(self, sequence: Sequence, pages: int) -> list[int | None]:
        """Release the pages before the window, whose tokens the ranks never see."""
        window, first = self._windows[sequence], max(pages - self._span, 0)
        passed = window.entries[: first - window.first]
        held = window.entries[len(passed) :]
        for entry in passed:
            self.pool.unpin(entry)
        new = self.pool.pin([NumberedEntry(object(), 1) for _ in range(pages - first - len(held))])
        assert new is not None, "no page is left of those that were reserved"
        window.entries, window.first, window.sent = [*held, *new], first, first
        return [*[None] * len(held), *(number for entry in new for number in entry.numbers)]

    def report(self, state: EngineState) -> None:
        state.window_pages, state.window_pages_used = self.pool.capacity, self._reserved

    def _share(self, entry: NumberedEntry, page: Hashable) -> None:
        """Let an entry be that of `page` of the tree, unless sequences use another one."""
        if page in self.pool:
            if self.pool[page].users:
                return
            self.pool.remove(self.pool[page])
        self.pool.rename(entry, page)
        entry.ready = True
