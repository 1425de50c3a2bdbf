"""Which sequences run next, on rank 0: continuous batching (Orca, OSDI 2022), prompts in chunks between decode steps.

First come, first served. A sequence gets the pages of all tokens that it has when it is admitted, and another each time
that it grows over a page's edge. If there is none, the youngest one gives its pages up and waits to be computed again,
mostly from the pages that it left in the tree. The oldest can therefore always go on.
"""

from collections import deque
from dataclasses import dataclass, field
from itertools import count

from tilerank.kernels.attention import KV_BLOCK

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
    table: Table = field(default_factory=Table)
    announced: int = 0  # pages that the other ranks know of
    cached: int = 0

    @property
    def runs(self) -> bool:
        return self.number >= 0

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
        """The next step: everybody who decodes, then prompts in order of arrival. Empty only if nothing is left."""
        scheduled = self._decoding()
        rows = self._chunk_rows
        for sequence in self.running:
            if sequence.due > 1 and rows:
                scheduled.append((sequence, self._chunk(sequence, rows)))
                rows -= len(scheduled[-1][1].token_ids)
        while rows and self.waiting and len(self.running) < self._max_running and self._admit(self.waiting[0]):
            sequence = self.waiting.popleft()
            self.running.append(sequence)
            scheduled.append((sequence, self._chunk(sequence, rows)))
            rows -= len(scheduled[-1][1].token_ids)
        return scheduled

    def ran(self, scheduled: Scheduled) -> None:
        """The step is computed: pages that are full now can be shared."""
        for sequence, _ in scheduled:
            table = sequence.table
            if sequence.cached // KV_BLOCK > len(table.shared) and not table.private:
                self._pool.publish(table, sequence.tokens[: sequence.cached])

    def _decoding(self) -> Scheduled:
        scheduled: Scheduled = []
        for sequence in [sequence for sequence in self.running if sequence.due == 1]:
            while sequence.runs and len(sequence.table) * KV_BLOCK <= sequence.cached and not self._pool.free:
                self._preempt()
            if sequence.runs:  # it was not the youngest itself
                self._pool.extend(sequence.table, sequence.cached + 1)
                scheduled.append((sequence, self._chunk(sequence, 1)))
        return scheduled

    def _preempt(self) -> None:
        """The youngest one stops, and is the first that is admitted again."""
        sequence = self.running.pop()
        self._release(sequence)
        self.waiting.appendleft(sequence)
        self.preemptions += 1

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
