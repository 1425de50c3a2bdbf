"""A model of the slots of states, which checks each step of a scheduler."""

from drafting import keys_with_drafts
from tilerank.runtime.lead.pages import Page
from tilerank.runtime.lead.sequence import Scheduled, Sequence
from tilerank.runtime.lead.states import StatePool
from tilerank.runtime.protocol.rank_messages import Step


def path(page: Page) -> tuple[int, ...]:
    """Return the keys of a page and its ancestors; fails if it is not in the tree."""
    if page.parent is None:
        return ()
    assert page.parent.children[page.keys] is page
    return path(page.parent) + page.keys


class Slots:
    """The slots of states as a worker holds them: of each, the prompt keys of all tokens that its states have seen, and
    those of the drafts after them."""

    def __init__(self, pool: StatePool) -> None:
        self.pool = pool
        self.seen: dict[int, tuple[int, ...]] = {}
        self.drafts: dict[int, tuple[int, ...]] = {}

    def step(self, scheduled: Scheduled, step: Step) -> None:
        """Copy slots, then compute the chunks: each continues what its slot holds, unless it is a beginning.

        States take in drafts of the step before, but not those after their row.
        """
        for source, target in step.state_copies:
            self.seen[target], self.drafts[target] = self.seen[source], ()
        assert len(set(step.state_slots)) == len(scheduled)
        for (sequence, chunk), slot in zip(scheduled, step.state_slots, strict=True):
            keys = tuple(keys_with_drafts(sequence, chunk))
            stop = len(keys) - chunk.drafts
            if chunk.start:
                kept = chunk.start - len(self.seen[slot])
                assert self.seen[slot] + self.drafts[slot][:kept] == keys[: chunk.start]
                assert not kept or stop == chunk.start + 1
            self.seen[slot], self.drafts[slot] = keys[:stop], keys[stop:]

    def check(self, running: list[Sequence]) -> None:
        """Every slot is in one place, and every snapshot has seen the tokens up to the end of its page."""
        pool, seen = self.pool, dict(self.seen)
        snapshots = {entry.key: entry.numbers[0] for entry in pool.pool.idle}
        taken = {*snapshots.values(), *map(pool.slot, running)}
        assert len(taken) == len(snapshots) + len(running) == pool.pool.used
        assert taken <= set(range(pool.pool.capacity))
        assert pool.available == pool.pool.capacity - len(running)
        for source, target in pool.copies:
            seen[target] = seen[source]
        for page, slot in snapshots.items():
            assert isinstance(page, Page) and seen[slot] == path(page)
