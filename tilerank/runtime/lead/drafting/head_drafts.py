"""Drafts of the multi-token-prediction head of a checkpoint (models/mtp.py)."""

from ...protocol.rank_messages import Chunk
from ...rank.worker import Worker
from ..scheduler import Scheduler
from ..sequence import Scheduled, Sequence
from .draft_counts import Share
from .drafts import common_prefix
from .led_drafts import Led, LedDrafts

MAX_HEAD_DRAFTS = 3
"""Tokens that the head drafts for a sequence. With the row of the token before them they fill a recorded step of 4
rows."""
SMALLEST_CHANCE = 0.3
"""The head goes on to a token if the drafts up to it are right so often. It then reads a layer and the output head once
more, which is about a tenth of the weights of a step, or a third in small models with a large vocabulary."""
TRIAL_EVERY = 64
"""In one step of so many, the head drafts as many tokens as it may: more of them may be right than were before."""


class HeadDrafts(LedDrafts):
    """Leads the draft head over every step, so that its cache has all tokens."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._right = [Share(2.0, 4.0) for _ in range(MAX_HEAD_DRAFTS)]  # of drafts with all before them, by number
        self._steps = 0

    def _learn(self, sequence: Sequence, chunk: Chunk, drafts: list[int], chosen: list[int]) -> None:
        right = common_prefix(drafts, chosen)
        # After the first wrong draft, all are wrong; after the last token that was chosen, none is known.
        for number in range(len(drafts) if right < len(chosen) else right):
            self._right[number].add(number < right)

    def _lead(self, scheduled: Scheduled, scheduler: Scheduler) -> list[Led]:
        depth = self._depth()
        return [
            (sequence, after, min(sequence.max_drafts, depth))
            for sequence, chunk in scheduled
            if (after := _after(sequence, chunk)) is not None
        ]

    def _depth(self) -> int:
        self._steps += 1
        if self._steps % TRIAL_EVERY == 0:
            return MAX_HEAD_DRAFTS
        depth = 1
        while depth < MAX_HEAD_DRAFTS and self._right[depth].right >= SMALLEST_CHANCE * self._right[depth].guesses:
            depth += 1
        return depth


def _after(sequence: Sequence, chunk: Chunk) -> Chunk | None:
    """Return the tokens after those of a chunk of the step, as far as these were not rejected drafts; None if the head
    has nothing to do with them."""
    end = min(sequence.cached, sequence.length - 1)
    token_ids = sequence.tokens[chunk.start + 1 : end + 1]
    is_decode = len(chunk.token_ids) == 1 + chunk.drafts
    drafts = sequence.uncached == 1 and sequence.max_drafts > 0
    if not sequence.is_running or not token_ids or (is_decode and not drafts):
        return None
    positions = [axis[: len(token_ids)] for axis in chunk.positions]
    # In a recorded step, all rows have logits.
    logits = len(token_ids) if is_decode else int(drafts)
    following = len(token_ids) - 1 if is_decode else 0
    return Chunk(sequence.number, chunk.start, token_ids, [], logits, positions, chunk.shift, drafts=following)
