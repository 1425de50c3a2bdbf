"""Drafts of the multi-token-prediction head of a checkpoint (models/mtp.py)."""

from ...protocol.rank_messages import Chunk
from ...rank.worker import Worker
from ..scheduler import Scheduler
from ..sequence import Sequence
from .led_drafts import Led, LedDrafts

MAX_HEAD_DRAFTS = 3
"""Tokens that the head drafts for a sequence. With the row of the token before them they fill a recorded step of 4
rows."""


class HeadDrafts(LedDrafts):
    """Leads the draft head. Its cache has no entries of the tokens that came while its drafts did not pay, since the
    ranks keep hidden states for one step: the tokens after them are drafted worse."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker, MAX_HEAD_DRAFTS)

    def _led(self, sequence: Sequence, chunk: Chunk, depth: int, scheduler: Scheduler) -> Led | None:
        """Return the tokens after those of a chunk, as far as these were not rejected drafts; None in decode steps
        after which nothing is drafted."""
        count = min(sequence.max_drafts, depth) if sequence.uncached == 1 else 0
        known = sequence.known_tokens
        token_ids = known[chunk.start + 1 : min(sequence.cached, len(known) - 1) + 1]
        is_decode = len(chunk.token_ids) == 1 + chunk.drafts
        if not token_ids or (is_decode and not count):
            return None
        positions = [axis[: len(token_ids)] for axis in chunk.positions]
        # In a recorded step, all rows have logits.
        logits = len(token_ids) if is_decode else min(count, 1)
        following = len(token_ids) - 1 if is_decode else 0
        after = Chunk(sequence.number, chunk.start, token_ids, [], logits, positions, chunk.shift, drafts=following)
        return sequence, after, count
