"""The scheduler of rank 0: continuous batching (Orca, OSDI 2022) with chunked prompts between decode steps.

First come, first served. A sequence is admitted once there are pages for all of its tokens, memory for the encodings of
its media and, for a model with states, a slot for them; it gets another page whenever it fills one. If no page is free,
the youngest running sequence is preempted: it releases what it holds and waits to be recomputed, mostly from pages that
it left in the tree. The oldest sequence can therefore always continue.

Of a model with states, snapshots are taken (state_pool.py) where other prompts may continue: near the end of a
prompt, where a prompt leaves the tree's tokens, and at the end of the generated tokens. A chunk of a prompt ends there.
Prompts and snapshots are cut at multiples of BLOCK_TOKENS alone, so that the bits of an answer do not depend on the
cuts.
"""

import time
from bisect import insort
from collections import deque
from itertools import count

from tilerank.kernels.kv_pages import PAGE_TOKENS
from tilerank.kernels.state_slots import BLOCK_TOKENS

from ..protocol.prompt import Prompt
from ..protocol.rank_messages import Chunk, StoreSource
from .encodings import EncoderCache, Encoding
from .pages import PagePool
from .sequence import Sequence, full_blocks, media_from, next_chunk
from .source_pool import Source, SourcePool, Unstored
from .state_pool import StatePool

SNAPSHOT_MARGIN = 8
"""A prompt's snapshot leaves out at least so many of its last tokens. Those that open the answer of a chat, such as
"<think>", are not repeated by the prompt of the next turn."""

SCORE_ROWS = 128
"""Tokens of a step whose logits score prompts. It bounds the memory of logits, each as wide as the vocabulary."""

Scheduled = list[tuple[Sequence, Chunk]]


class Scheduler:
    """Decides which sequences take part in each step.

    max_running: limit of running sequences. chunk_rows: limit of prompt tokens in a step, which bounds how long
    decoding sequences wait for a token; at least BLOCK_TOKENS for a model with states. encodings: pinned while
    sequences need them. sources: None for models without cross-attention.
    """

    def __init__(
        self,
        pool: PagePool,
        encodings: EncoderCache,
        *,
        max_running: int,
        chunk_rows: int,
        sources: SourcePool | None = None,
    ) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of arrival
        self.finished: list[int] = []  # numbers whose pages the ranks can drop; the engine sends and clears it
        self.preemptions = 0
        self.queried_tokens = self.hit_tokens = 0  # of the prompts admitted so far: all, and those in the cache
        self._pool = pool
        self._states = pool.states
        self._encodings = encodings
        self._sources = sources
        self._max_running = max_running
        assert self._states is None or full_blocks(chunk_rows), "no block of a prompt would fit in a step"
        self._chunk_rows = chunk_rows
        self._numbers = count()

    def add(self, sequence: Sequence) -> None:
        """Append a sequence to the queue. The caller has checked that the cache can hold its `max_cached` tokens."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence, *, share: bool = True) -> None:
        """Remove a sequence that is complete or cancelled, and release what it holds.

        share: whether the pages that it has filled stay in the tree.
        """
        if sequence in self.running:
            self.running.remove(sequence)
            self._release(sequence, share=share)
        else:
            self.waiting.remove(sequence)

    @property
    def can_step(self) -> bool:
        """Whether a running sequence has tokens to compute now."""
        return any(sequence.computable for sequence in self.running)

    def start_alone(self, sequence: Sequence) -> None:
        """Let a sequence run that shares no pages and is not scheduled. No other may run."""
        encodings = self._encodings.pin(sequence.media)
        assert encodings is not None and not self.running
        sequence.encodings = dict(enumerate(encodings))
        sequence.source = self._pin_source(sequence.prompt)
        assert sequence.source is not None or not sequence.prompt.source
        self._pool.extend(sequence.table, len(sequence.tokens))
        if self._states is not None:
            sequence.state_slot = self._states.take(None)
        sequence.number = next(self._numbers)
        self.running.append(sequence)

    def schedule(self) -> Scheduled:
        """Return the next step: all decoding sequences, then prompts in order of arrival.

        Empty only if no sequence is left, or if all that are left wait for their grammar masks or for encodings.
        """
        scheduled = self._schedule_decoding()
        rows = self._chunk_rows
        for sequence in self.running:
            if sequence.uncached > 1:
                if self._states is not None and self.waiting:
                    _snapshot_to_share(sequence, self.waiting[0])
                rows -= self._schedule_prompt(sequence, rows, scheduled)
        for sequence in list(self.waiting) if rows and len(self.running) < self._max_running else ():
            if not rows or len(self.running) == self._max_running:
                break
            provider = self._about_to_share(sequence)
            if provider is not None and provider.blocking is not None:
                continue  # an encode may take seconds, which sequences that share nothing need not wait
            if provider is not None or not self._admit(sequence):
                break
            self.waiting.remove(sequence)
            insort(self.running, sequence, key=_arrival)
            rows -= self._schedule_prompt(sequence, rows, scheduled)
        return scheduled

    def publish(self, scheduled: Scheduled) -> None:
        """Share the pages that the computed step has filled, take snapshots at their ends, and release the encodings
        that the step has inserted whole."""
        for sequence, _ in scheduled:
            if sequence.cached // PAGE_TOKENS > len(sequence.table.shared):
                self._pool.publish(sequence.table, sequence.keys[: sequence.cached])
                if self._states is not None:
                    self._take_snapshot(sequence, self._states)
            if sequence.encodings:
                left = media_from(sequence.prompt, sequence.cached)
                for medium in sequence.encodings.keys() - left:
                    self._encodings.release(sequence.encodings.pop(medium))

    def next_encoding(self) -> Encoding | Unstored | None:
        """Return the encoding to compute or the source to store next, in order of arrival. None if no running sequence
        waits for one."""
        for sequence in self.running:
            if (place := sequence.blocking) is not None:
                encoding = sequence.encodings[place.medium]
                if sequence.source is None or not encoding.ready:
                    return encoding
                parts = [(sequence.encodings[s.medium].number, s.first, s.count) for s in sequence.prompt.source]
                message = StoreSource(sequence.source.pages, parts, sequence.prompt.source_positions)
                return Unstored(sequence.source, message)
        return None

    def _take_snapshot(self, sequence: Sequence, states: StatePool) -> None:
        """Take the snapshot that is planned where the cached tokens end, or that of the generated tokens."""
        page = sequence.table.shared[-1]
        if sequence.cached in sequence.snapshots_at:
            sequence.snapshots_at.remove(sequence.cached)
            states.snapshot(page, sequence.state_slot)
        elif sequence.cached % BLOCK_TOKENS == 0 and sequence.cached > sequence.prompt_len:
            states.snapshot(page, sequence.state_slot, replaced=sequence.newest_snapshot)
            sequence.newest_snapshot = page

    def _schedule_decoding(self) -> Scheduled:
        scheduled: Scheduled = []
        for sequence in [sequence for sequence in self.running if sequence.uncached == 1 and sequence.ready]:
            while sequence.is_running and len(sequence.table) * PAGE_TOKENS <= sequence.cached and not self._pool.free:
                self._preempt()
            if sequence.is_running:  # it may have been the youngest itself
                self._pool.extend(sequence.table, sequence.cached + 1)
                scheduled.append((sequence, next_chunk(sequence, 1)))
        return scheduled

    def _schedule_prompt(self, sequence: Sequence, rows: int, scheduled: Scheduled) -> int:
        """Schedule up to `rows` tokens of a prompt and return how many."""
        if sequence.scoring:
            rows = min(rows, SCORE_ROWS - sum(chunk.logits for _, chunk in scheduled if chunk.logits > 1))
        rows = sequence.cut(max(min(rows, sequence.computable), 0))
        if rows:
            scheduled.append((sequence, next_chunk(sequence, rows)))
        return rows

    def _preempt(self) -> None:
        """Move the youngest running sequence to its place in the queue."""
        sequence = self.running.pop()
        self._release(sequence)
        insort(self.waiting, sequence, key=_arrival)
        self.preemptions += 1

    def _about_to_share(self, sequence: Sequence) -> Sequence | None:
        """Return a running sequence that is about to fill a page which this one could share.

        The choices of one request, and requests with one system prompt, often arrive together: the first one computes
        the common pages for all.
        """
        for other in self.running if not sequence.scoring else ():
            end = (len(other.table.shared) + 1) * PAGE_TOKENS
            if end >= min(len(other.tokens), len(sequence.tokens)) or other.keys[:end] != sequence.keys[:end]:
                continue
            if self._states is None or _snapshot_to_share(other, sequence):
                return other
        return None

    def _admit(self, sequence: Sequence) -> bool:
        """Allocate pages for all tokens of a sequence and a slot for its states, and pin the encodings of the media
        that the tree's pages do not cover.

        Returns False if the pages are not free, together with one more page for each running sequence, if all slots are
        in use, or if there is no memory for the encodings.
        """
        if self._states is not None and not self._states.available:
            return False
        source = self._pin_source(sequence.prompt)
        if source is None and sequence.prompt.source:
            return False
        table = self._pool.open(sequence.reusable_keys)
        missing = -(-len(sequence.tokens) // PAGE_TOKENS) - len(table)
        media = media_from(sequence.prompt, len(table) * PAGE_TOKENS)
        if source is not None and not source.stored:
            media = list(range(len(sequence.media)))
        fits = missing + len(self.running) <= self._pool.free
        encodings = self._encodings.pin([sequence.media[medium] for medium in media]) if fits else None
        if encodings is None:
            self._pool.close(table)
            if source is not None and self._sources is not None:
                self._sources.release(source)
            return False
        sequence.source = source
        sequence.encodings = dict(zip(media, encodings, strict=True))
        sequence.cached = len(table) * PAGE_TOKENS
        if self._states is not None:
            sequence.state_slot = self._states.take(table.shared[-1] if table.shared else None)
            wanted = {full_blocks(table.known * PAGE_TOKENS), full_blocks(sequence.prompt_len - SNAPSHOT_MARGIN)}
            sequence.snapshots_at = {at for at in sequence.snapshots_at | wanted if at > sequence.cached}
        self._pool.extend(table, len(sequence.tokens))
        sequence.table, sequence.pages_sent, sequence.number = table, 0, next(self._numbers)
        if sequence.admitted_s is None:
            sequence.admitted_s, sequence.hits = time.monotonic(), sequence.cached
            self.queried_tokens += sequence.prompt_len
            self.hit_tokens += sequence.hits
        return True

    def _pin_source(self, prompt: Prompt) -> Source | None:
        if self._sources is None or not prompt.source:
            return None
        return self._sources.pin(prompt.source_digest, sum(segment.count for segment in prompt.source))

    def _release(self, sequence: Sequence, *, share: bool = True) -> None:
        self._pool.close(sequence.table, share=share)
        for encoding in sequence.encodings.values():
            self._encodings.release(encoding)
        sequence.encodings = {}
        if sequence.source is not None and self._sources is not None:
            self._sources.release(sequence.source)
            sequence.source = None
        if self._states is not None:
            self._states.release(sequence.state_slot)
            sequence.state_slot, sequence.snapshots_at, sequence.newest_snapshot = -1, set(), None
        self.finished.append(sequence.number)
        sequence.number, sequence.cached = -1, 0


def _snapshot_to_share(provider: Sequence, sequence: Sequence) -> bool:
    """Plan a snapshot where the tokens of the two sequences part: of `provider`, or of `sequence` if that one is past
    this place. Returns whether `provider` will take one that `sequence` can continue."""
    parts, end = 0, full_blocks(min(len(provider.tokens), len(sequence.tokens)) - 2)
    while parts < end:
        block = slice(parts, parts + BLOCK_TOKENS)
        if provider.keys[block] != sequence.keys[block]:
            break
        parts += BLOCK_TOKENS
    if parts > provider.cached:
        provider.snapshots_at.add(parts)
    is_about_to = any(at <= parts for at in provider.snapshots_at)
    if not is_about_to:
        sequence.snapshots_at.add(parts)
    return is_about_to


def _arrival(sequence: Sequence) -> int:
    return sequence.request
