"""Drafts that the ranks compute, led by rank 0 after every step."""

from abc import abstractmethod
from collections import abc

from ...protocol.rank_messages import Chunk, Draft
from ...rank.worker import Worker
from ..scheduler import Scheduler
from ..sequence import Scheduled, Sequence
from .draft_counts import Proposal
from .drafts import DraftSource

Led = tuple[Sequence, Chunk, int]
"""A sequence, its tokens that a drafter reads after a step, and how many it then drafts."""


class LedDrafts(DraftSource):
    """Leads the drafter of the ranks, and keeps its drafts for the next step."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._drafts: dict[Sequence, tuple[int, list[int]]] = {}  # the length of a text, and the drafts after it

    def propose(self, sequences: abc.Sequence[Sequence], most: abc.Sequence[int]) -> list[Proposal]:
        found = [self._drafts.get(sequence, (0, [])) for sequence in sequences]
        return [
            Proposal(tokens[:count] if length == sequence.length else [])
            for sequence, count, (length, tokens) in zip(sequences, most, found, strict=True)
        ]

    def follow(self, scheduled: Scheduled, scheduler: Scheduler) -> None:
        for sequence, chunk in scheduled:
            length, tokens = self._drafts.pop(sequence, (sequence.length, []))
            self._learn(sequence, chunk, tokens, sequence.tokens[length:])
        led = self._lead(scheduled, scheduler)
        self._drafts = {sequence: found for sequence, found in self._drafts.items() if sequence.is_running}
        if not led:
            return
        message = Draft([chunk for _, chunk, _ in led], [count for _, _, count in led])
        self._worker.announce(message)
        drafted = self._worker.draft(message)
        self._drafts |= {
            sequence: (sequence.length, tokens) for (sequence, _, _), tokens in zip(led, drafted, strict=True)
        }

    @abstractmethod
    def _learn(self, sequence: Sequence, chunk: Chunk, drafts: list[int], chosen: list[int]) -> None:
        """Compare what was drafted after a sequence, none if nothing was, with the tokens that a step chose for it.
        chunk: of the step."""

    @abstractmethod
    def _lead(self, scheduled: Scheduled, scheduler: Scheduler) -> list[Led]:
        """Return what the drafter reads after a step, and drafts."""
