"""A sequence: the tokens of one request while it waits and runs, and the messages that send its next tokens to the
ranks."""

from dataclasses import dataclass, field

from torch import Tensor

from tilerank.kernels.kv_pages import PAGE_TOKENS
from tilerank.kernels.state_slots import BLOCK_TOKENS

from ..protocol.prompt import Place, Prompt
from ..protocol.rank_messages import Chunk, Insert, Sights
from .encodings import Encoding, Wanted
from .grammar_masks import GrammarMask
from .pages import Page, PageTable
from .sampling import SamplingParams
from .source_pool import Source
from .talker_prompt import TalkerPrompt


@dataclass(eq=False)
class Sequence:
    """A request that waits or runs.

    request: its number, in order of arrival.
    media: what its encodings take, in the order of `prompt.media`.
    talker: what its talker reads; None for text that is not spoken.
    tokens: the prompt and the tokens generated so far; the KV cache holds the first `cached` of them.
    keys: what their pages are shared by (prompt.py).
    number: names the sequence in messages to the ranks; a new one for each admission, -1 while it waits.
    encodings: by medium, those of which it still has to insert tokens; none while it waits.
    pages_sent: how many of its pages the other ranks have received.
    source: of a running sequence whose prompt has one.
    state_slot: of a running sequence of a model with states, else -1.
    snapshots_at: numbers of cached tokens at which snapshots are to be taken.
    newest_snapshot: the page of the last snapshot of generated tokens.
    admitted_s: when it was first admitted, on the clock of `time.monotonic`, with the first `hits` tokens in the cache;
        None before that.
    has_begun: the engine has reported this.
    scored: the tokens of the prompt whose logits have been used, if they are wanted.
    """

    request: int
    params: SamplingParams
    prompt: Prompt
    media: list[Wanted] = field(default_factory=list)
    talker: TalkerPrompt | None = None
    tokens: list[int] = field(init=False)
    keys: list[int] = field(init=False)
    number: int = -1
    encodings: dict[int, Encoding] = field(default_factory=dict)
    grammar_mask: GrammarMask | None = None
    table: PageTable = field(default_factory=PageTable)
    pages_sent: int = 0
    cached: int = 0
    source: Source | None = None
    state_slot: int = -1
    snapshots_at: set[int] = field(default_factory=set)
    newest_snapshot: Page | None = None
    admitted_s: float | None = None
    hits: int = 0
    has_begun: bool = False
    scored: int = 0

    def __post_init__(self) -> None:
        self.tokens, self.keys = list(self.prompt.token_ids), list(self.prompt.keys)

    def append(self, token_id: int) -> None:
        """Add a generated token."""
        self.tokens.append(token_id)
        self.keys.append(self.prompt.key_of_generated(token_id))

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
        """The first uncached place whose medium is not encoded yet. For a source that is not stored, a place before the
        first token, of a medium that is not encoded yet if there is one."""
        if not self.encodings:
            return None
        if self.source is not None:
            media = sorted(self.encodings, key=lambda medium: self.encodings[medium].ready)
            return None if self.source.stored else Place(0, 0, media[0], 0)
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
        end = full_blocks(self.cached + tokens)
        if end + 1 == len(self.tokens) and end - BLOCK_TOKENS > self.cached:
            end -= BLOCK_TOKENS  # no single token is left
        return max(end - self.cached, 0)

    @property
    def uncached(self) -> int:
        """The number of tokens to compute before the next one can be sampled."""
        return len(self.tokens) - self.cached

    @property
    def scoring(self) -> bool:
        """Whether logits of further tokens of the prompt are wanted, those of its last token aside."""
        return self.params.prompt_logprobs is not None and self.scored < self.prompt_len - 1

    @property
    def reusable_keys(self) -> list[int]:
        """The keys of the tokens that need not be computed if the cache has them, and of one more token."""
        if self.talker is not None and self.prompt.places and len(self.tokens) == self.prompt_len:
            # The talker needs the hidden states of media, which the cache does not have.
            return self.keys[: self.prompt.places[0].start + 1]
        return self.keys[: self.scored + 1] if self.scoring else self.keys

    @property
    def max_cached(self) -> int:
        """The largest number of tokens that it ever caches. The last generated token is never computed."""
        return self.prompt_len + max(self.params.max_new_tokens - 1, 0)


def full_blocks(tokens: int) -> int:
    """Return the tokens of the full blocks among the first `tokens`."""
    return tokens // BLOCK_TOKENS * BLOCK_TOKENS


def next_chunk(sequence: Sequence, rows: int, *, all_logits: bool = False) -> Chunk:
    """Return the next tokens of a sequence, at most `rows`, and count them as cached.

    Logits are computed for the last token of the sequence, for the tokens of a prompt that are to be scored, or for all
    tokens of the chunk.
    """
    start = sequence.cached
    token_ids = sequence.tokens[start : start + rows]
    sequence.cached += len(token_ids)
    new_pages = []
    if len(sequence.table) > sequence.pages_sent:
        new_pages = sequence.table.numbers[sequence.pages_sent :]
        sequence.pages_sent += len(new_pages)
    logits = len(token_ids) if all_logits else int(sequence.uncached == 0)
    if sequence.scoring:
        logits = max(sequence.cached - max(start, sequence.scored), 0)
    positions, inserts = _positions(sequence, start), _inserts(sequence, start)
    return Chunk(sequence.number, start, token_ids, new_pages, logits, positions, sequence.prompt.shift, inserts)


def sights_of(sequence: Sequence, chunk: Chunk) -> Sights | None:
    """Return what the rows of a chunk see of the source of its sequence; None if the ranks know it."""
    start, stop = chunk.start, chunk.start + len(chunk.token_ids)
    is_first = sequence.pages_sent == len(chunk.new_pages)
    if sequence.source is None or not (is_first or start < sequence.prompt_len):
        return None
    sights = [sight for sight in sequence.prompt.sights if sight.start < stop]
    before = [sight for sight in sights if sight.start <= start]
    rows = [(0, sight.first, sight.count, sight.shown) for sight in before[-1:]] or [(0, 0, 0, False)]
    rows += [(sight.start - start, sight.first, sight.count, sight.shown) for sight in sights[len(before) :]]
    return Sights(sequence.number, sequence.source.pages if is_first else [], rows)


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
