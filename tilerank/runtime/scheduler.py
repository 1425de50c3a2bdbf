"""The scheduler of rank 0: continuous batching (Orca, OSDI 2022) with chunked prompts between decode steps.

First come, first served. A sequence is admitted once there are pages for all of its tokens, and gets another page
whenever it fills one. If no page is free, the youngest running sequence is preempted: it releases its pages and waits
to be recomputed, mostly from pages that it left in the tree. The oldest sequence can therefore always continue.
"""

from collections import deque
from dataclasses import dataclass, field
from itertools import count

from torch import Tensor

from tilerank.kernels.kv_pages import PAGE_TOKENS

from .grammar_masks import GrammarMask
from .pages import PagePool, PageTable
from .rank_messages import Chunk
from .sampling import SamplingParams


@dataclass(eq=False)
class Sequence:
    """A request that waits or runs.

    tokens: the prompt and the tokens generated so far; the KV cache holds the first `cached` of them. number: names the
    sequence in messages to the ranks; a new one for each admission, -1 while it waits. pages_sent: how many of its
    pages the other ranks have received.
    """

    request: int
    params: SamplingParams
    tokens: list[int]
    prompt_len: int
    number: int = -1
    grammar_mask: GrammarMask | None = None
    table: PageTable = field(default_factory=PageTable)
    pages_sent: int = 0
    cached: int = 0

    @property
    def is_running(self) -> bool:
        return self.number >= 0

    @property
    def ready(self) -> bool:
        """False while the mask that its next token needs is being computed."""
        return self.grammar_mask is None or self.grammar_mask.ready

    @property
    def forbidden(self) -> Tensor | None:
        """bool [vocab]: True for tokens that may not come next. None if all may."""
        return None if self.grammar_mask is None else self.grammar_mask.forbidden

    @property
    def uncached(self) -> int:
        """The number of tokens to compute before the next one can be sampled."""
        return len(self.tokens) - self.cached

    @property
    def max_cached(self) -> int:
        """The largest number of tokens that it ever caches. The last generated token is never computed."""
        return self.prompt_len + self.params.max_new_tokens - 1


Scheduled = list[tuple[Sequence, Chunk]]


class Scheduler:
    """Decides which sequences take part in each step.

    max_running: limit of running sequences. chunk_rows: limit of prompt tokens in a step, which bounds how long
    decoding sequences wait for a token.
    """

    def __init__(self, pool: PagePool, *, max_running: int, chunk_rows: int) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of arrival
        self.finished: list[int] = []  # numbers whose pages the ranks can drop; the engine sends and clears it
        self.preemptions = 0
        self._pool = pool
        self._max_running = max_running
        self._chunk_rows = chunk_rows
        self._numbers = count()

    def add(self, sequence: Sequence) -> None:
        """Append a sequence to the queue. The caller has checked that the cache can hold its `max_cached` tokens."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that is complete or cancelled, and release its pages."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._release(sequence)
        else:
            self.waiting.remove(sequence)

    def next_number(self) -> int:
        """Return a new number for a sequence."""
        return next(self._numbers)

    def schedule(self) -> Scheduled:
        """Return the next step: all decoding sequences, then prompts in order of arrival.

        Empty only if no sequence is left, or if all that are left wait for their grammar masks.
        """
        scheduled = self._schedule_decoding()
        rows = self._chunk_rows
        for sequence in self.running:
            if sequence.uncached > 1:
                rows -= self._schedule_prompt(sequence, rows, scheduled)
        while rows and self.waiting and len(self.running) < self._max_running:
            if self._about_to_share(self.waiting[0]) or not self._admit(self.waiting[0]):
                break
            sequence = self.waiting.popleft()
            self.running.append(sequence)
            rows -= self._schedule_prompt(sequence, rows, scheduled)
        return scheduled

    def publish(self, scheduled: Scheduled) -> None:
        """Share the pages that the computed step has filled."""
        for sequence, _ in scheduled:
            table = sequence.table
            if sequence.cached // PAGE_TOKENS > len(table.shared) and not table.private:
                self._pool.publish(table, sequence.tokens[: sequence.cached])

    def _schedule_decoding(self) -> Scheduled:
        scheduled: Scheduled = []
        for sequence in [sequence for sequence in self.running if sequence.uncached == 1 and sequence.ready]:
            while sequence.is_running and len(sequence.table) * PAGE_TOKENS <= sequence.cached and not self._pool.free:
                self._preempt()
            if sequence.is_running:  # it may have been the youngest itself
                self._pool.extend(sequence.table, sequence.cached + 1)
                scheduled.append((sequence, self._chunk(sequence, 1)))
        return scheduled

    def _schedule_prompt(self, sequence: Sequence, rows: int, scheduled: Scheduled) -> int:
        """Schedule up to `rows` tokens of a prompt and return how many.

        The last token of the prompt is left out until its logits can be used.
        """
        rows = min(rows, sequence.uncached - (not sequence.ready))
        if rows:
            scheduled.append((sequence, self._chunk(sequence, rows)))
        return rows

    def _preempt(self) -> None:
        """Move the youngest running sequence to the front of the queue."""
        sequence = self.running.pop()
        self._release(sequence)
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def _about_to_share(self, sequence: Sequence) -> bool:
        """Is a running sequence about to fill a page that this one could share?

        The choices of one request, and requests with one system prompt, often arrive together: the first one computes
        the common pages for all.
        """
        for other in self.running:
            table, usable = other.table, (min(len(other.tokens), len(sequence.tokens)) - 1) // PAGE_TOKENS
            end = (len(table.shared) + 1) * PAGE_TOKENS
            if len(table.shared) < usable and not table.private and other.tokens[:end] == sequence.tokens[:end]:
                return True
        return False

    def _admit(self, sequence: Sequence) -> bool:
        """Allocate pages for all tokens of a sequence.

        Returns False if they are not free, together with one more page for each running sequence.
        """
        table = self._pool.open(sequence.tokens)
        missing = -(-len(sequence.tokens) // PAGE_TOKENS) - len(table)
        if missing + len(self.running) > self._pool.free:
            self._pool.close(table)
            return False
        sequence.cached = len(table) * PAGE_TOKENS
        self._pool.extend(table, len(sequence.tokens))
        sequence.table, sequence.pages_sent, sequence.number = table, 0, self.next_number()
        return True

    def _release(self, sequence: Sequence) -> None:
        self._pool.close(sequence.table)
        self.finished.append(sequence.number)
        sequence.number, sequence.cached = -1, 0

    def _chunk(self, sequence: Sequence, rows: int) -> Chunk:
        """Return the next tokens of a sequence, at most `rows`, and count them as cached."""
        start = sequence.cached
        token_ids = sequence.tokens[start : start + rows]
        sequence.cached += len(token_ids)
        new_pages = []
        if len(sequence.table) > sequence.pages_sent:
            new_pages = sequence.table.page_numbers[sequence.pages_sent :]
            sequence.pages_sent += len(new_pages)
        return Chunk(sequence.number, start, token_ids, new_pages, int(sequence.uncached == 0))
