"""The scheduler of rank 0: continuous batching (Orca, OSDI 2022) with chunked prompts between decode steps.

First come, first served. A sequence is admitted once there are pages for all of its tokens, memory for the encodings of
its media and, for a model with states, a slot for them; it gets another page whenever it fills one. If no page is free,
the youngest running sequence is preempted: it releases what it holds and waits to be recomputed, mostly from pages that
it left in the tree. The oldest sequence can therefore always continue.

Of a model with states, snapshots are taken (state_pool.py) where other prompts may continue: near the end of a prompt,
where a prompt leaves the tree's tokens, and at the end of the generated tokens. A chunk of a prompt ends there. Prompts
and snapshots are cut at multiples of BLOCK_TOKENS alone, so that the bits of an answer do not depend on the cuts.
"""

from bisect import insort
from collections import deque
from dataclasses import dataclass, field
from itertools import count

from torch import Tensor

from tilerank.kernels.kv_pages import PAGE_TOKENS
from tilerank.kernels.state_slots import BLOCK_TOKENS

from .encodings import EncoderCache, Encoding, Wanted
from .grammar_masks import GrammarMask
from .pages import Page, PagePool, PageTable
from .prompt import Place, Prompt
from .rank_messages import Chunk, Insert
from .sampling import SamplingParams
from .state_pool import StatePool

SNAPSHOT_MARGIN = 8
"""A prompt's snapshot leaves out at least so many of its last tokens. Those that open the answer of a chat, such as
"<think>", are not repeated by the prompt of the next turn."""


@dataclass(eq=False)
class Sequence:
    """A request that waits or runs.

    media: what its encodings take, in the order of `prompt.media`. tokens: the prompt and the tokens generated so far;
    the KV cache holds the first `cached` of them. keys: what their pages are shared by (prompt.py). number: names the
    sequence in messages to the ranks; a new one for each admission, -1 while it waits. encodings: by medium, those of
    which it still has to insert tokens; none while it waits. pages_sent: how many of its pages the other ranks have
    received. state_slot: of a running sequence of a model with states, else -1. snapshots_at: numbers of cached tokens
    at which snapshots are to be taken. newest_snapshot: the page of the last snapshot of generated tokens.
    """

    request: int
    params: SamplingParams
    prompt: Prompt
    media: list[Wanted] = field(default_factory=list)
    tokens: list[int] = field(init=False)
    keys: list[int] = field(init=False)
    number: int = -1
    encodings: dict[int, Encoding] = field(default_factory=dict)
    grammar_mask: GrammarMask | None = None
    table: PageTable = field(default_factory=PageTable)
    pages_sent: int = 0
    cached: int = 0
    state_slot: int = -1
    snapshots_at: set[int] = field(default_factory=set)
    newest_snapshot: Page | None = None

    def __post_init__(self) -> None:
        self.tokens, self.keys = list(self.prompt.token_ids), list(self.prompt.keys)

    def append(self, token_id: int) -> None:
        """Add a generated token."""
        self.tokens.append(token_id)
        self.keys.append(token_id)

    @property
    def prompt_len(self) -> int:
        return len(self.prompt.token_ids)

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
    def blocking(self) -> Place | None:
        """The first uncached place whose medium is not encoded yet."""
        if not self.encodings:
            return None
        pending = [place for place in self.prompt.places if place.start + place.count > self.cached]
        return next((place for place in pending if not self.encodings[place.medium].ready), None)

    @property
    def computable(self) -> int:
        """The number of tokens that can be computed now.

        The last token of a prompt is left out until its logits can be used. A medium that is not encoded yet ends the
        chunk at the last whole page before it: the tokens after that share no page with another sequence, and the step
        that computes them later reads the weights anyway. The place of a snapshot ends the chunk as well.
        """
        tokens = self.uncached - (not self.ready)
        if (place := self.blocking) is not None:
            tokens = min(tokens, place.start // PAGE_TOKENS * PAGE_TOKENS - self.cached)
        if self.snapshots_at:
            tokens = min(tokens, min(self.snapshots_at) - self.cached)
        return self.cut(max(tokens, 0))

    def cut(self, tokens: int) -> int:
        """Return the number of tokens to compute where `tokens` could be: fewer for models with states if more tokens
        follow."""
        if self.state_slot < 0 or tokens == self.uncached:
            return tokens
        end = _blocks(self.cached + tokens)
        if end + 1 == len(self.tokens) and end - BLOCK_TOKENS > self.cached:
            end -= BLOCK_TOKENS  # no single token is left
        return max(end - self.cached, 0)

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
    decoding sequences wait for a token; at least BLOCK_TOKENS for a model with states. encodings: pinned while
    sequences need them.
    """

    def __init__(self, pool: PagePool, encodings: EncoderCache, *, max_running: int, chunk_rows: int) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of arrival
        self.finished: list[int] = []  # numbers whose pages the ranks can drop; the engine sends and clears it
        self.preemptions = 0
        self._pool = pool
        self._states = pool.states
        self._encodings = encodings
        self._max_running = max_running
        self._chunk_rows = chunk_rows
        self._numbers = count()

    def add(self, sequence: Sequence) -> None:
        """Append a sequence to the queue. The caller has checked that the cache can hold its `max_cached` tokens."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that is complete or cancelled, and release what it holds."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._release(sequence)
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

    def next_encoding(self) -> Encoding | None:
        """Return the encoding to compute next, in order of arrival. None if no running sequence waits for one."""
        for sequence in self.running:
            if (place := sequence.blocking) is not None:
                return sequence.encodings[place.medium]
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
        rows = sequence.cut(min(rows, sequence.computable))
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
        for other in self.running:
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
        table = self._pool.open(sequence.keys)
        missing = -(-len(sequence.tokens) // PAGE_TOKENS) - len(table)
        media = media_from(sequence.prompt, len(table) * PAGE_TOKENS)
        fits = missing + len(self.running) <= self._pool.free
        encodings = self._encodings.pin([sequence.media[medium] for medium in media]) if fits else None
        if encodings is None:
            self._pool.close(table)
            return False
        sequence.encodings = dict(zip(media, encodings, strict=True))
        sequence.cached = len(table) * PAGE_TOKENS
        if self._states is not None:
            sequence.state_slot = self._states.take(table.shared[-1] if table.shared else None)
            wanted = {_blocks(table.known * PAGE_TOKENS), _blocks(sequence.prompt_len - SNAPSHOT_MARGIN)}
            sequence.snapshots_at = {at for at in sequence.snapshots_at | wanted if at > sequence.cached}
        self._pool.extend(table, len(sequence.tokens))
        sequence.table, sequence.pages_sent, sequence.number = table, 0, next(self._numbers)
        return True

    def _release(self, sequence: Sequence) -> None:
        self._pool.close(sequence.table)
        for encoding in sequence.encodings.values():
            self._encodings.release(encoding)
        sequence.encodings = {}
        if self._states is not None:
            self._states.release(sequence.state_slot)
            sequence.state_slot, sequence.snapshots_at, sequence.newest_snapshot = -1, set(), None
        self.finished.append(sequence.number)
        sequence.number, sequence.cached = -1, 0


def _blocks(tokens: int) -> int:
    """Return the tokens of the full blocks among the first `tokens`."""
    return tokens // BLOCK_TOKENS * BLOCK_TOKENS


def _snapshot_to_share(provider: Sequence, sequence: Sequence) -> bool:
    """Plan a snapshot where the tokens of the two sequences part: of `provider`, or of `sequence` if that one is past
    this place. Returns whether `provider` will take one that `sequence` can continue."""
    parts, end = 0, _blocks(min(len(provider.tokens), len(sequence.tokens)) - 2)
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


def next_chunk(sequence: Sequence, rows: int, *, all_logits: bool = False) -> Chunk:
    """Return the next tokens of a sequence, at most `rows`, and count them as cached.

    Logits are computed for the last token of the sequence, or for all tokens of the chunk.
    """
    start = sequence.cached
    token_ids = sequence.tokens[start : start + rows]
    sequence.cached += len(token_ids)
    new_pages = []
    if len(sequence.table) > sequence.pages_sent:
        new_pages = sequence.table.numbers[sequence.pages_sent :]
        sequence.pages_sent += len(new_pages)
    logits = len(token_ids) if all_logits else int(sequence.uncached == 0)
    positions, inserts = _positions(sequence, start), _inserts(sequence, start)
    return Chunk(sequence.number, start, token_ids, new_pages, logits, positions, sequence.prompt.shift, inserts)


def media_from(prompt: Prompt, index: int) -> list[int]:
    """Return the media that stand for tokens from `index` on, in the order of the prompt."""
    return list(dict.fromkeys(place.medium for place in prompt.places if place.start + place.count > index))


def _positions(sequence: Sequence, start: int) -> list[list[int]]:
    """Return Chunk.positions of the tokens from `start` to `sequence.cached`."""
    prompt, stop = sequence.prompt, sequence.cached
    if not prompt.positions or start >= sequence.prompt_len:
        return []
    generated = range(sequence.prompt_len + prompt.shift, stop + prompt.shift)
    return [[*axis[start:stop], *generated] for axis in prompt.positions]


def _inserts(sequence: Sequence, start: int) -> list[Insert]:
    """Return Chunk.inserts of the tokens from `start` to `sequence.cached`."""
    inserts = []
    for place in sequence.prompt.places if start < sequence.prompt_len else ():
        begin, end = max(place.start, start), min(place.start + place.count, sequence.cached)
        if begin < end:
            number = sequence.encodings[place.medium].number
            inserts.append(Insert(begin - start, place.first + begin - place.start, end - begin, number))
    return inserts
