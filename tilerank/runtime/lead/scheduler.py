"""The scheduler of texts: continuous batching (Orca, OSDI 2022) with chunked prompts between decode steps."""

import time
from collections.abc import Sequence as Kinds
from itertools import count

from .base_scheduler import BaseScheduler
from .cache_kind import CacheKind, WorkInPieces
from .sequence import Scheduled, Sequence, next_chunk

SCORE_ROWS = 128
"""Tokens of a step whose logits score prompts. It bounds the memory of logits, each as wide as the vocabulary."""


class Scheduler(BaseScheduler[Sequence]):
    """Decides which sequences take part in each step.

    chunk_rows: limit of prompt tokens in a step, which bounds how long decoding sequences wait for a token; at least
    BLOCK_TOKENS for a model with states.
    """

    def __init__(self, kinds: Kinds[CacheKind[Sequence]], max_running: int, chunk_rows: int) -> None:
        super().__init__(kinds, max_running)
        self.chunk_rows = chunk_rows
        self.finished: list[int] = []  # numbers whose pages the ranks can drop; the engine sends and clears it
        self.queried_tokens = self.hit_tokens = 0  # of the prompts admitted so far: all, and those in the cache
        self._numbers = count()

    @property
    def can_step(self) -> bool:
        """Whether a running sequence has tokens to compute now."""
        return any(self.computable(sequence) for sequence in self.running)

    def admit(self, sequence: Sequence) -> bool:
        if not super().admit(sequence):
            return False
        sequence.number = next(self._numbers)
        return True

    def release(self, sequence: Sequence, *, share: bool = True) -> None:
        super().release(sequence, share=share)
        self.finished.append(sequence.number)
        sequence.number = -1

    def schedule(self) -> Scheduled:
        """Return the next step: all decoding sequences, then prompts in order of arrival.

        Empty only if no sequence is left, or if all that are left wait for their grammar masks or for encodings.
        """
        for sequence in [sequence for sequence in self.running if sequence.is_lost]:
            sequence.is_lost = False
            self.requeue(sequence)
        scheduled = self._schedule_decoding()
        rows = self.chunk_rows
        for sequence in self.running:
            if sequence.uncached > 1:
                for kind in self.kinds if self.waiting else ():
                    kind.will_share(sequence, self.waiting[0])
                rows -= self._schedule_prompt(sequence, rows, scheduled)
        for sequence in list(self.waiting):
            if not rows or self.is_full:
                break
            provider = self._about_to_share(sequence)
            if provider is not None and self.work(provider) is not None:
                continue  # an encode may take seconds, which sequences that share nothing need not wait
            if provider is not None or not self.admit(sequence):
                break
            self.waiting.remove(sequence)
            self._count_hits(sequence)
            rows -= self._schedule_prompt(sequence, rows, scheduled)
        return scheduled

    def publish(self, scheduled: Scheduled) -> None:
        """Share what the computed step has filled, and release what its sequences do not need any more."""
        for sequence, _ in scheduled:
            for kind in self.kinds:
                kind.publish(sequence)

    def next_work(self) -> WorkInPieces | None:
        """Return what has to be computed next, in order of arrival. None if no running sequence waits for it."""
        return next((work for sequence in self.running if (work := self.work(sequence)) is not None), None)

    def work(self, sequence: Sequence) -> WorkInPieces | None:
        """Return what has to be computed before a running sequence can go on; None if nothing has to be."""
        return next((work for kind in self.kinds if (work := kind.work(sequence)) is not None), None)

    def computable(self, sequence: Sequence, rows: int | None = None) -> int:
        """Return how many tokens of a running sequence can be computed now, at most `rows`.

        The last token of a prompt is left out until its logits can be used. Every kind of cache may lower the number,
        and is asked until none does.
        """
        tokens = sequence.uncached - (not sequence.ready)
        before, tokens = -1, tokens if rows is None else max(min(tokens, rows), 0)
        while tokens != before:
            before = tokens
            for kind in self.kinds:
                tokens = kind.limit(sequence, tokens)
        return tokens

    def computed(self) -> list[Sequence]:
        """Return the running sequences of which nothing is left to compute, between steps."""
        return [one for one in self.running if not one.uncached and self.work(one) is None]

    def continuable(self, sequence: Sequence) -> int:
        """Return how many of the first tokens of a prompt other ranks can take, and compute those after them. Every
        kind of cache may lower the number, and is asked until none does."""
        before, tokens = -1, sequence.prompt_len - 1
        while tokens != before:
            before = tokens
            for kind in self.kinds:
                tokens = kind.continuable(sequence, tokens)
        return tokens

    def _schedule_decoding(self) -> Scheduled:
        scheduled: Scheduled = []
        for sequence in [sequence for sequence in self.running if sequence.uncached == 1 and sequence.ready]:
            if sequence.is_running and self.grow(sequence):
                scheduled.append((sequence, next_chunk(sequence, 1)))
        return scheduled

    def _schedule_prompt(self, sequence: Sequence, rows: int, scheduled: Scheduled) -> int:
        """Schedule up to `rows` tokens of a prompt and return how many."""
        if sequence.scoring or sequence.params.hidden_layers:
            most = max(SCORE_ROWS, sequence.whole_tokens)
            rows = min(rows, most - sum(chunk.logits for _, chunk in scheduled if chunk.logits > 1))
        rows = self.computable(sequence, rows)
        if rows:
            scheduled.append((sequence, next_chunk(sequence, rows)))
        return rows

    def _about_to_share(self, sequence: Sequence) -> Sequence | None:
        """Return a running sequence that is about to fill a page which this one could share.

        The choices of one request, and requests with one system prompt, often arrive together: the first one computes
        the common pages for all. Pages are asked before the kinds that a model has beside them.
        """
        for other in self.running if sequence.reusable_keys and not sequence.scoring else ():
            if all(kind.will_share(other, sequence) for kind in reversed(self.kinds)):
                return other
        return None

    def _count_hits(self, sequence: Sequence) -> None:
        """Count how much of the prompt of a sequence the cache had, when it is admitted for the first time."""
        if sequence.admitted_s is None:
            sequence.admitted_s, sequence.hits = time.monotonic(), sequence.cached
            if not sequence.slots:  # prefill ranks have counted those
                self.queried_tokens += sequence.prompt_len
                self.hit_tokens += sequence.hits
