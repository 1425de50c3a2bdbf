"""Drafts of the next tokens of sequences, which one step checks together (speculative decoding, arXiv 2211.17192).

A step of a few rows takes hardly longer than one of a single row, because both read all weights. A source proposes
tokens that may follow the text of a sequence, and the step computes the logits after each of them. drawing.py then
accepts those that are the chosen tokens.
"""

import time
from abc import ABC, abstractmethod
from collections import abc

import msgspec

from ...protocol.engine_state import EngineState
from ...protocol.rank_messages import Chunk
from ...protocol.sizes import MAX_RUNNING
from ...step.batch import padded_size
from ..scheduler import Scheduler
from ..sequence import Scheduled, Sequence
from .draft_counts import DraftCounts, Proposal

MAX_DRAFTS = 15
"""Drafts of a sequence in a step. With the row of the token before them they fill a recorded step of 16 rows."""
MAX_PROPOSED = 64
"""Tokens that are proposed for all sequences of a step, which bounds the time that choosing among them takes; at least
one for each."""

REST_AFTER, REST_STEPS = 16, 8
"""After so many steps in a row without drafts, only one step of so many asks for proposals: SmolLM2-135M lost 1 to 2 %
to proposals of which none was checked."""


class DraftSource(ABC):
    """Proposes tokens that may follow those of sequences.

    takes_time: whether steps wait for proposals, which are then asked for less often where none is checked.
    """

    takes_time = True

    @abstractmethod
    def propose(self, sequences: abc.Sequence[Sequence], most: abc.Sequence[int]) -> list[Proposal]:
        """Return for each sequence up to `most` tokens. Called between steps, which wait for it."""

    def follow(self, scheduled: Scheduled, scheduler: Scheduler) -> None:
        """A step was computed, and its sequences have the tokens that were chosen."""
        return


class Drafting:
    """Adds drafts to decode steps. source: None for none. drafted, accepted: tokens since the start."""

    def __init__(self, source: DraftSource | None, scheduler: Scheduler, counts: DraftCounts) -> None:
        self.drafted = self.accepted = 0
        self._source, self._scheduler, self._counts = source, scheduler, counts
        self._proposals: list[tuple[Sequence, Proposal]] = []
        self._began = 0.0
        self._rows = 0  # of the step, 0 if it is none of decoding
        self._plain_steps = 0  # in a row, of the same recorded size
        self._size = 0

    def extend(self, scheduled: Scheduled) -> Scheduled:
        """Return a step with drafts. One that computes prompts has none: its rows are not free."""
        self._began, self._proposals, self._rows = time.perf_counter(), [], 0
        if self._source is None or any(len(chunk.token_ids) != 1 or chunk.logits != 1 for _, chunk in scheduled):
            return scheduled
        self._rows = len(scheduled)
        if self._source.takes_time and self._rests(len(scheduled)):
            return scheduled
        limit = min(MAX_DRAFTS, max(MAX_PROPOSED // len(scheduled), 1))
        most = [min(sequence.max_drafts, limit) for sequence, _ in scheduled]
        asked = [sequence for (sequence, _), count in zip(scheduled, most, strict=True) if count]
        if not asked:
            return scheduled
        proposals = self._source.propose(asked, [count for count in most if count])
        self._proposals = [(one, proposal) for one, proposal in zip(asked, proposals, strict=True) if proposal.tokens]
        counts = self._counts.choose(self._proposals, self._rows)
        drafts = dict[Sequence, list[int]]()
        for (sequence, proposal), count in zip(self._proposals, counts, strict=True):
            if count and (room := self._scheduler.draft_room(sequence, min(count, MAX_RUNNING - self._rows))):
                drafts[sequence] = proposal.tokens[:room]
                self._rows += room
        if drafts:
            self._plain_steps = 0
        return [
            (sequence, with_drafts(chunk, drafts[sequence]) if sequence in drafts else chunk)
            for sequence, chunk in scheduled
        ]

    def _rests(self, sequences: int) -> bool:
        """Return whether a step is left without proposals, as those before it had no drafts."""
        size = padded_size(sequences)
        self._plain_steps = self._plain_steps + 1 if size == self._size else 0
        self._size = size
        return self._plain_steps > REST_AFTER and self._plain_steps % REST_STEPS != 0

    def learn(self, scheduled: Scheduled) -> None:
        """Compare the proposals for a step, drafted or not, with the tokens that were chosen in it."""
        for sequence, chunk in scheduled:
            if chunk.drafts:
                self.drafted += chunk.drafts
                chosen = sequence.tokens[chunk.start + 1 :]
                self.accepted += common_prefix(chunk.token_ids[1:], chosen)
        starts = {sequence: chunk.start for sequence, chunk in scheduled}
        for sequence, proposal in self._proposals:
            self._counts.learn(sequence, proposal, sequence.tokens[starts[sequence] + 1 :])
        if self._rows:
            self._counts.time(self._rows, time.perf_counter() - self._began)
        if self._source is not None:
            self._source.follow(scheduled, self._scheduler)

    def report(self, state: EngineState) -> None:
        """Set the fields of `state` that are about drafts."""
        state.drafted_tokens, state.accepted_tokens = self.drafted, self.accepted


def with_drafts(chunk: Chunk, drafts: list[int]) -> Chunk:
    """Return a chunk of one token with drafts after it."""
    token_ids = [*chunk.token_ids, *drafts]
    return msgspec.structs.replace(chunk, token_ids=token_ids, logits=len(token_ids), drafts=len(drafts))


def common_prefix(one: abc.Sequence[int], other: abc.Sequence[int]) -> int:
    """Return with how many equal tokens two lists begin."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
