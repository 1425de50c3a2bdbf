"""Which sequences run next, on rank 0: continuous batching (Orca, OSDI 2022), prompts in chunks between decode steps.

First come, first served. A sequence gets the pages of all tokens that it has when it is admitted, and another each time
that it grows over a page's edge. If there is none, the youngest one gives its pages up and waits to be computed again,
mostly from the pages that it left in the tree. The oldest can therefore always go on.
"""

from collections import deque
from dataclasses import dataclass, field
from itertools import count

from torch import Tensor

from tilerank.kernels.attention import KV_BLOCK

from .guide import Guide
from .pages import PagePool, Table
from .sampling import SamplingParams
from .step import Chunk


@dataclass(eq=False)
class Sequence:
    """A request on its way: `tokens` are its prompt and what was generated so far, `cached` of them in the cache."""

    request: int
    params: SamplingParams
    tokens: list[int]
    prompt_len: int
    number: int = -1  # what the ranks call it; another one each time that it is admitted
    guide: Guide | None = None
    table: Table = field(default_factory=Table)
    announced: int = 0  # pages that the other ranks know of
    cached: int = 0

    @property
    def runs(self) -> bool:
        return self.number >= 0

    @property
    def ready(self) -> bool:
        """Can its next token be chosen, once its logits are there?"""
        return self.guide is None or self.guide.ready

    @property
    def forbidden(self) -> Tensor | None:
        """bool [vocab]: tokens that may not come next."""
        return None if self.guide is None else self.guide.forbidden

    @property
    def due(self) -> int:
        """Tokens to compute before the next one can be chosen."""
        return len(self.tokens) - self.cached

    @property
    def room(self) -> int:
        """The most tokens whose keys and values it will ever keep: the last token is never fed back."""
        return self.prompt_len + self.params.max_new_tokens - 1


Scheduled = list[tuple[Sequence, Chunk]]


class Scheduler:
    """max_running: sequences at a time. chunk_rows: tokens of prompts in a step, which bounds how long sequences that
    decode wait for each of their tokens."""

    def __init__(self, pool: PagePool, *, max_running: int, chunk_rows: int) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of arrival
        self.finished: list[int] = []  # numbers whose pages the other ranks may forget; whoever announces it clears it
        self.preemptions = 0
        self._pool = pool
        self._max_running = max_running
        self._chunk_rows = chunk_rows
        self._numbers = count()

    def add(self, sequence: Sequence) -> None:
        """Last in line. The caller has seen that the cache can hold `room` tokens."""
        self.waiting.append(sequence)

    def end(self, sequence: Sequence) -> None:
        """It is complete, or nobody wants it any more."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._release(sequence)
        else:
            self.waiting.remove(sequence)

    def next_number(self) -> int:
        """What the ranks may call a sequence that has not run yet."""
        return next(self._numbers)

    def schedule(self) -> Scheduled:
        """The next step: everybody who decodes, then prompts in order of arrival. Empty only if nothing is left, or if
        all that is left waits for its guides."""
        scheduled = self._decoding()
        rows = self._chunk_rows
        for sequence in self.running:
            if sequence.due > 1:
                rows -= self._prompt(sequence, rows, scheduled)
        while rows and self.waiting and len(self.running) < self._max_running:
            if self._about_to_share(self.waiting[0]) or not self._admit(self.waiting[0]):
                break
            sequence = self.waiting.popleft()
            self.running.append(sequence)
            rows -= self._prompt(sequence, rows, scheduled)
        return scheduled

    def ran(self, scheduled: Scheduled) -> None:
        """The step is computed: pages that are full now can be shared."""
        for sequence, _ in scheduled:
            table = sequence.table
            if sequence.cached // KV_BLOCK > len(table.shared) and not table.private:
                self._pool.publish(table, sequence.tokens[: sequence.cached])

    def _decoding(self) -> Scheduled:
        scheduled: Scheduled = []
        for sequence in [sequence for sequence in self.running if sequence.due == 1 and sequence.ready]:
            while sequence.runs and len(sequence.table) * KV_BLOCK <= sequence.cached and not self._pool.free:
                self._preempt()
            if sequence.runs:  # it was not the youngest itself
                self._pool.extend(sequence.table, sequence.cached + 1)
                scheduled.append((sequence, self._chunk(sequence, 1)))
        return scheduled

    def _prompt(self, sequence: Sequence, rows: int, scheduled: Scheduled) -> int:
        """Up to `rows` tokens of a prompt, and how many they are. The last one waits until its logits can be used."""
        rows = min(rows, sequence.due - (not sequence.ready))
        if rows:
            scheduled.append((sequence, self._chunk(sequence, rows)))
        return rows

    def _preempt(self) -> None:
        """The youngest one stops, and is the first that is admitted again."""
        sequence = self.running.pop()
        self._release(sequence)
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def _about_to_share(self, sequence: Sequence) -> bool:
        """Is one that runs about to fill a page that this one could use? Choices of one prompt come together, and so do
        requests with one system prompt: the first one computes it for all."""
        for other in self.running:
            table, usable = other.table, (min(len(other.tokens), len(sequence.tokens)) - 1) // KV_BLOCK
            end = (len(table.shared) + 1) * KV_BLOCK
            if len(table.shared) < usable and not table.private and other.tokens[:end] == sequence.tokens[:end]:
                return True
        return False

    def _admit(self, sequence: Sequence) -> bool:
        """Pages for all tokens that it has; false if they are not there, with one more for each that runs."""
        table = self._pool.open(sequence.tokens)
        wanted = -(-len(sequence.tokens) // KV_BLOCK) - len(table)
        if wanted + len(self.running) > self._pool.free:
            self._pool.close(table)
            return False
        sequence.cached = len(table) * KV_BLOCK
        self._pool.extend(table, len(sequence.tokens))
        sequence.table, sequence.announced, sequence.number = table, 0, self.next_number()
        return True

    def _release(self, sequence: Sequence) -> None:
        self._pool.close(sequence.table)
        self.finished.append(sequence.number)
        sequence.number, sequence.cached = -1, 0

    def _chunk(self, sequence: Sequence, rows: int) -> Chunk:
        """The next tokens of a sequence, at most `rows`, which then count as cached."""
        start = sequence.cached
        token_ids = sequence.tokens[start : start + rows]
        sequence.cached += len(token_ids)
        new_blocks = []
        if len(sequence.table) > sequence.announced:
            new_blocks = sequence.table.blocks[sequence.announced :]
            sequence.announced += len(new_blocks)
        return Chunk(sequence.number, start, token_ids, new_blocks, int(sequence.due == 0))
