"""Slots for the states of sequences, of models whose layers keep states instead of keys and values.

A running sequence has a slot, which every step overwrites. A snapshot is a copy of such a slot at the end of a full
page of the tree (pages.py): a prompt that begins with the same tokens starts from it. Snapshots take the slots that no
sequence needs; the least recently used one is dropped first.

Snapshots are taken where other prompts may continue: near the end of a prompt, where a prompt leaves the tree's tokens,
and at the end of the generated tokens. A chunk of a prompt ends there. Prompts and snapshots are cut at multiples of
BLOCK_TOKENS alone, so that the bits of an answer do not depend on the cuts.

The number of slots follows from the number of cached tokens (protocol/sizes.py), so that it is the same on every rank.
"""

from collections import abc
from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

from tilerank.kernels.kv_pages import PAGE_TOKENS
from tilerank.kernels.state_slots import BLOCK_TOKENS

from ..protocol.areas import Area
from ..protocol.engine_state import EngineState
from ..protocol.rank_messages import Step
from ..protocol.sizes import STATE_DRAFTS
from .cache_kind import MovedKind
from .lru_pool import NumberedEntry, NumberedPool
from .sequence import OPENING_TOKENS, Scheduled, Sequence, common_tokens


@dataclass(eq=False)
class _States:
    """The states of a sequence.

    slot: where they are, once the sequence is admitted. known: how many of its first tokens the tree has. page: at
    whose end its states are taken from a snapshot; None if it begins. newest: the page of the last snapshot of its
    generated tokens.
    """

    slot: NumberedEntry | None = None
    known: int = 0
    page: Hashable | None = None
    newest: Hashable | None = None


class StatePool(MovedKind[Sequence]):
    """All slots, numbered from 0 to `slots` - 1. A snapshot has the page at whose end it was taken as its key."""

    area: ClassVar = Area.STATES
    least_tokens: ClassVar = BLOCK_TOKENS + OPENING_TOKENS

    def __init__(self, slots: int) -> None:
        self.pool = NumberedPool(slots)
        self.copies: list[tuple[int, int]] = []
        """(from, to), slots to copy in this order before the next step."""
        self._states: dict[Sequence, _States] = {}

    @property
    def available(self) -> int:
        """The number of slots that no sequence has; snapshots are in some of them."""
        return self.pool.capacity - self.pool.pinned

    def slot(self, sequence: Sequence) -> int:
        """Return the slot of a running sequence."""
        slot = self._states[sequence].slot
        assert slot is not None
        return slot.numbers[0]

    def reserve(self, sequence: Sequence) -> bool:
        if not self.available:
            return False
        self._states[sequence] = _States()
        return True

    def shared(self, sequence: Sequence, pages: abc.Sequence[Hashable]) -> int:
        """Return how many pages there are up to the last one with a snapshot.

        The last token but one is never covered, because a single token would be computed in another form
        (kernels/state_slots.py).
        """
        states = self._states[sequence]
        known = min(len(pages), max(len(sequence.reusable_keys) - 2, 0) // PAGE_TOKENS)
        count = next((count for count in range(known, 0, -1) if pages[count - 1] in self.pool), 0)
        states.known = max(states.known, known * PAGE_TOKENS)
        states.page = pages[count - 1] if count else None
        return count

    def commit(self, sequence: Sequence) -> None:
        states, source = self._states[sequence], None
        if states.page is not None:
            self.pool.touch(states.page)
            (source,) = self.pool[states.page].numbers
        pinned = self.pool.pin([NumberedEntry(sequence, 1)])
        assert pinned is not None, "no slot is left of those that are available"
        (states.slot,) = pinned
        (slot,) = states.slot.numbers
        if source is not None and source != slot:  # the snapshot itself may have been the only one to drop
            self.copies.append((source, slot))
        ends = {full_blocks(states.known), full_blocks(sequence.prompt_len - OPENING_TOKENS)}
        sequence.snapshots_at = {at for at in sequence.snapshots_at | ends if at > sequence.cached}

    def draft_room(self, sequence: Sequence, drafts: int) -> int:
        """Return up to before the end of the next block, which is the row of a step: its states take in no drafts of
        this step (kernels/delta.py), and a snapshot of them may be taken there."""
        return min(drafts, STATE_DRAFTS, BLOCK_TOKENS - 1 - sequence.cached % BLOCK_TOKENS)

    def release(self, sequence: Sequence, *, share: bool = True) -> None:
        states = self._states.pop(sequence)
        if states.slot is not None:
            self.pool.unpin(states.slot)
            sequence.snapshots_at = set()

    def limit(self, sequence: Sequence, tokens: int) -> int:
        """End chunks at the next snapshot, and at the end of a block if more tokens follow."""
        if sequence.snapshots_at:
            tokens = min(tokens, min(sequence.snapshots_at) - sequence.cached)
        if tokens == sequence.uncached:
            return tokens
        end = full_blocks(sequence.cached + tokens)
        if end + 1 == sequence.length and end - BLOCK_TOKENS > sequence.cached:
            end -= BLOCK_TOKENS  # no single token is left
        return max(end - sequence.cached, 0)

    def announce(self, step: Step, scheduled: Scheduled) -> None:
        step.state_copies.extend(self.pending_copies())
        step.state_slots.extend(self.slot(sequence) for sequence, _ in scheduled)

    def will_share(self, running: Sequence, waiting: Sequence) -> bool:
        """Plan a snapshot where the tokens of the two sequences part: of the running one, or of the waiting one if the
        other is past this place. Returns whether the running one will take a snapshot that the other can continue."""
        parts = common_tokens(running, waiting, BLOCK_TOKENS, min(len(running.keys), len(waiting.keys)) - 2)
        if parts > running.cached:
            running.snapshots_at.add(parts)
        is_about_to = any(at <= parts for at in running.snapshots_at)
        if not is_about_to:
            waiting.snapshots_at.add(parts)
        return is_about_to

    def filled(self, sequence: Sequence, pages: abc.Sequence[Hashable], first: int) -> None:
        """Take the snapshot that is planned where the cached tokens end, or that of the generated tokens."""
        states, page = self._states[sequence], pages[-1]
        is_planned = sequence.cached in sequence.snapshots_at
        sequence.snapshots_at = {at for at in sequence.snapshots_at if at > sequence.cached}
        if is_planned:
            self._take_snapshot(sequence, page)
        elif sequence.cached % BLOCK_TOKENS == 0 and sequence.cached > sequence.prompt_len:
            if states.newest is not None and page not in self.pool:
                self.drop(states.newest)
            self._take_snapshot(sequence, page)
            states.newest = page

    def drop(self, page: Hashable) -> None:
        if page in self.pool:
            self.pool.remove(self.pool[page])

    def continuable(self, sequence: Sequence, tokens: int) -> int:
        """Return where a snapshot is planned, so that what is given is shared as well."""
        return max(full_blocks(min(tokens, sequence.prompt_len - OPENING_TOKENS)), 0)

    def moved_keys(self, sequence: Sequence, digests: abc.Sequence[bytes]) -> abc.Sequence[bytes]:
        return digests[-1:]

    def given(self, sequence: Sequence, pages: int) -> list[int]:
        return [self.slot(sequence)] if pages else []

    def take(self, sequence: Sequence, pages: int) -> list[int | None]:
        return [self.slot(sequence)]

    def pending_copies(self) -> list[tuple[int, int]]:
        copies = list(self.copies)
        self.copies.clear()
        return copies

    def report(self, state: EngineState) -> None:
        state.state_slots, state.snapshots = self.pool.capacity, len(self.pool.idle)

    def _take_snapshot(self, sequence: Sequence, page: Hashable) -> None:
        """Copy the states of a sequence for `page`, unless there is a snapshot of it or all slots are in use."""
        if page in self.pool:
            self.pool.touch(page)
            return
        snapshot = NumberedEntry(page, 1, ready=True)
        if self.pool.add_idle(snapshot):
            self.copies.append((self.slot(sequence), snapshot.numbers[0]))


def full_blocks(tokens: int) -> int:
    """Return the tokens of the full blocks among the first `tokens`."""
    return tokens // BLOCK_TOKENS * BLOCK_TOKENS
