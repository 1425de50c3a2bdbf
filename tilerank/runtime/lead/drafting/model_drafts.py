"""Drafts of a small model with the same vocabulary (rank/draft_model.py)."""

from collections import abc
from itertools import takewhile

from ...protocol.rank_messages import Chunk
from ...rank.worker import Worker
from ..scheduler import Scheduler
from ..sequence import Scheduled, Sequence
from .draft_counts import Proposal
from .drafts import common_prefix
from .led_drafts import Led, LedDrafts

MAX_MODEL_DRAFTS = 7
"""Tokens that the model drafts for a sequence. With the row of the token before them they fill a recorded step of 8
rows."""


class ModelDrafts(LedDrafts):
    """Leads the draft model, which reads later what it has not read while its drafts did not pay."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker, MAX_MODEL_DRAFTS)
        assert worker.draft_model is not None
        self._model, self._vocab_size = worker.draft_model, worker.card.vocab_size
        self._read: dict[Sequence, tuple[int, int]] = {}  # its number, and how many of its tokens the model has read

    def propose(self, sequences: abc.Sequence[Sequence], most: abc.Sequence[int]) -> list[Proposal]:
        """As of any source, up to the first token that the vocabulary of the large model does not have."""
        return [
            Proposal(list(takewhile(lambda token: token < self._vocab_size, proposal.tokens)))
            for proposal in super().propose(sequences, most)
        ]

    def follow(self, scheduled: Scheduled, scheduler: Scheduler) -> None:
        super().follow(scheduled, scheduler)
        self._read = {sequence: found for sequence, found in self._read.items() if sequence.is_running}

    def _learn(self, sequence: Sequence, drafts: list[int], chosen: list[int]) -> None:
        number, read = self._read[sequence]
        # It has read all of its drafts but the last.
        self._read[sequence] = number, read + min(common_prefix(drafts, chosen), len(drafts) - 1)

    def _led(self, sequence: Sequence, chunk: Chunk, depth: int, scheduler: Scheduler) -> Led | None:
        """Return the tokens of a sequence that the model has not read, and how many it drafts after them. None if it
        has nothing to do: in decode steps after which nothing is drafted, and where its context ends."""
        count = min(sequence.max_drafts, depth) if sequence.uncached == 1 else 0
        count = scheduler.draft_room(sequence, count) if count else 0
        end = sequence.length if count else sequence.cached
        is_decode = len(chunk.token_ids) == 1 + chunk.drafts
        number, read = self._read.get(sequence, (-1, 0))
        read = read if number == sequence.number else chunk.start
        has_work = (count > 0 or not is_decode) and end + count <= self._model.context_length
        self._read[sequence] = sequence.number, end if has_work else read
        if not has_work:
            return None
        start = min(read, end - 1)
        token_ids = [token if token < self._model.vocab_size else 0 for token in sequence.tokens[start:end]]
        # In a recorded step, all rows have logits.
        following = len(token_ids) - 1 if count and len(token_ids) <= 1 + MAX_MODEL_DRAFTS else 0
        logits, pages = min(count, 1) + following, scheduler.new_pages(sequence)
        return sequence, Chunk(sequence.number, start, token_ids, pages, logits, drafts=following), count
