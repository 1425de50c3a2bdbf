"""Drafts that the ranks compute, led by rank 0 after every step."""

from abc import abstractmethod
from collections import abc

from ...protocol.rank_messages import Chunk, Draft
from ...rank.worker import Worker
from ..scheduler import Scheduler
from ..sequence import Scheduled, Sequence
from .draft_counts import Proposal
from .draft_depth import DraftDepth
from .drafts import DraftSource

Led = tuple[Sequence, Chunk, int]
"""A sequence, its tokens that a drafter reads after a step, and how many it then drafts."""


class LedDrafts(DraftSource):
    """Leads the drafter of the ranks over prompts, and over texts while its drafts pay, and keeps its drafts for the
    next step. most: tokens that are drafted after a sequence."""

    takes_time = False

    def __init__(self, worker: Worker, most: int) -> None:
        assert worker.drafts is not None
        self._worker = worker
        self._depth = DraftDepth(worker.drafts.step_bytes.decode(1, 0) / worker.step_bytes.decode(1, 0), most)
        self._sequences = 0  # after which tokens were drafted
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
            if tokens:
                chosen = sequence.tokens[length:]
                self._learn(sequence, tokens, chosen)
                self._depth.learn(self._sequences, tokens, chosen[: chunk.drafts])
        self._drafts = {sequence: found for sequence, found in self._drafts.items() if sequence.is_running}
        running = [(sequence, chunk) for sequence, chunk in scheduled if sequence.is_running]
        self._sequences = sum(sequence.uncached == 1 and sequence.max_drafts > 0 for sequence, _ in running)
        depth = self._depth.choose(self._sequences) if self._sequences else 0
        led = [one for sequence, chunk in running if (one := self._led(sequence, chunk, depth, scheduler)) is not None]
        if not led:
            return
        message = Draft([chunk for _, chunk, _ in led], [count for _, _, count in led])
        self._worker.announce(message)
        drafted = self._worker.draft(message)
        self._drafts |= {
            sequence: (sequence.length, tokens) for (sequence, _, _), tokens in zip(led, drafted, strict=True)
        }

    def _learn(self, sequence: Sequence, drafts: list[int], chosen: list[int]) -> None:
        """Tokens were drafted after a sequence, and a step chose others or the same for it."""
        return

    @abstractmethod
    def _led(self, sequence: Sequence, chunk: Chunk, depth: int, scheduler: Scheduler) -> Led | None:
        """Return what the drafter reads of a sequence that runs, of which a step computed a chunk; None for nothing.
        depth: as many tokens are drafted."""
