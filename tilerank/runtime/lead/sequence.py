"""A text sequence: the tokens of one request while it waits and runs, and the chunks of them that the ranks compute."""

import time
from dataclasses import dataclass, field
from itertools import accumulate

from ..protocol.params import Start
from ..protocol.prompt import Prompt
from ..protocol.rank_messages import Chunk
from .grammar_masks import GrammarMask
from .logits_rules import Bits, TextRules
from .pooled_tokens import PooledTokens
from .sampling import SamplingParams
from .talker_prompt import TalkerPrompt

OPENING_TOKENS = 8
"""As many of the last tokens of a prompt may open the answer of a chat, such as "<think>". The prompt of the next turn
does not repeat them."""


@dataclass(eq=False)
class Sequence:
    """A request that waits or runs.

    request: its number, in order of arrival.
    rules: how its logits are changed.
    encoding_bytes: what the encodings of its media take on each rank, in the order of `prompt.media`.
    talker: what the talker reads of it; None for text that is not spoken.
    all_logits: whether the logits of all of its tokens are computed, so that none of them comes from the cache.
    whole_tokens: as in Encoder; 0 for a model without one.
    is_whole: whether all of its tokens attend to each other, so that one chunk has all of them, and none of them comes
        from the cache.
    slots: of each area, with what prefill ranks have computed of its prompt (transfers/given_pages.py).
    tokens: the prompt and the tokens generated so far; the KV cache holds the first `cached` of them.
    keys: what their pages are shared by (prompt.py). A prompt that is cut has two more keys than tokens.
    number: names the sequence in messages to the ranks; a new one for each admission, -1 while it waits.
    is_lost: whether some of what was in the slots is gone, so that it has to wait again.
    takes: whether what is in the slots is read, once it runs.
    has_source: whether the keys and values of its source are there, if it has one.
    snapshots_at: numbers of cached tokens at which snapshots of its states are to be taken.
    admitted_s: when it was first admitted, on the clock of `time.monotonic`, with the first `hits` tokens in the cache;
        None before that.
    has_begun: whether the engine has reported its first event.
    scored: how many tokens of the prompt have given the scores of the tokens after them.
    pooled: what the pooling has read of its tokens since it was last admitted.
    """

    request: int
    params: SamplingParams
    prompt: Prompt
    rules: TextRules
    encoding_bytes: list[int] = field(default_factory=list)
    talker: TalkerPrompt | None = None
    all_logits: bool = False
    whole_tokens: int = 0
    is_whole: bool = False
    slots: list[list[int]] = field(default_factory=list)
    tokens: list[int] = field(init=False)
    keys: list[int] = field(init=False)
    number: int = -1
    grammar_mask: GrammarMask | None = None
    cached: int = 0
    is_lost: bool = False
    takes: bool = False
    has_source: bool = True
    snapshots_at: set[int] = field(default_factory=set)
    admitted_s: float | None = None
    hits: int = 0
    has_begun: bool = False
    scored: int = 0
    pooled: PooledTokens | None = None

    def __post_init__(self) -> None:
        self.tokens, self.keys = list(self.prompt.token_ids), list(self.prompt.keys)

    def cut(self, tokens: int) -> None:
        """Compute only the first tokens of the prompt: other ranks compute the rest. The cache may have all of them,
        because no logits are needed here."""
        del self.tokens[tokens:], self.keys[tokens + 2 :]

    def append(self, token_id: int) -> None:
        """Add a generated token."""
        self.tokens.append(token_id)
        self.keys.append(self.prompt.key_of_generated(token_id))

    def begin(self) -> Start | None:
        """Return how the request began, once: for its first event."""
        if self.has_begun or self.admitted_s is None:
            return None
        self.has_begun = True
        return Start(self.hits, time.monotonic() - self.admitted_s)

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def prompt_len(self) -> int:
        return len(self.prompt.token_ids)

    @property
    def stores_source(self) -> bool:
        """Whether its source has to be stored, for which it needs the encodings of all of its media."""
        return not self.has_source and not self.takes

    @property
    def is_running(self) -> bool:
        return self.number >= 0

    @property
    def ready(self) -> bool:
        """False while the mask that its next token needs is being computed."""
        return self.grammar_mask is None or self.grammar_mask.ready

    @property
    def allowed(self) -> Bits | None:
        """Bits of the tokens that may come next (logits_rules.py). None if all may."""
        return None if self.grammar_mask is None else self.grammar_mask.allowed

    @property
    def known_tokens(self) -> list[int]:
        """Return its tokens, and those of the prompt that other ranks compute."""
        return self.tokens if self.length >= self.prompt_len else self.prompt.token_ids

    @property
    def uncached(self) -> int:
        """The number of tokens to compute before the next one can be sampled."""
        return len(self.tokens) - self.cached

    def whole_rows(self, rows: int) -> int:
        """Return how many of the next `rows` tokens a chunk may have that does not end within a medium, or a text,
        whose tokens attend to all of it."""
        if self.is_whole and rows < self.uncached:
            return 0
        end = self.cached + rows
        for run in self.prompt.placeholder_ranges if self.whole_tokens else ():
            if run.start < end < run.start + run.count:
                return max(run.start - self.cached, 0)
        return rows

    @property
    def scoring(self) -> bool:
        """Whether the request asks for scores of tokens of the prompt that have none yet."""
        return self.params.prompt_logprobs is not None and self.scored < self.prompt_len - 1

    @property
    def reusable_keys(self) -> list[int]:
        if self.all_logits or self.is_whole:
            return []
        if self.talker is not None and self.prompt.placeholder_ranges and len(self.tokens) == self.prompt_len:
            # The talker needs the hidden states of media, which the cache does not have.
            return self.keys[: self.prompt.placeholder_ranges[0].start + 1]
        return self.keys[: self.scored + 1] if self.scoring else self.keys

    @property
    def finish_reason(self) -> str | None:
        """Why the last token ends the text; None if it does not."""
        if self.tokens[-1] in self.rules.of_request.ends:
            return "stop"
        return "length" if len(self.tokens) - self.prompt_len >= self.params.max_new_tokens else None

    @property
    def overflow(self) -> str:
        """Why it ends if its logits are NaN or infinite."""
        return (
            f"the model computes NaN or infinity for some of the {len(self.tokens)} tokens of this text: it "
            "overflows in this precision, or its weights are damaged"
        )

    @property
    def max_drafts(self) -> int:
        """How many tokens may be drafted after the next one: none before the first token is generated, nor in a text
        that is spoken or whose hidden states are asked for."""
        generated = len(self.tokens) - self.prompt_len
        if generated <= 0 or self.talker is not None or self.all_logits:
            return 0
        return max(self.params.max_new_tokens - generated - 1, 0)

    @property
    def max_cached(self) -> int:
        """The largest number of tokens that it ever caches. The last generated token is never computed."""
        return self.prompt_len + max(self.params.max_new_tokens - 1, 0)


Scheduled = list[tuple[Sequence, Chunk]]
"""The sequences of a step, and the chunk of each."""


def rows_of(scheduled: Scheduled) -> list[range]:
    """Return the rows of logits of every chunk of a step."""
    stops = list(accumulate(chunk.logits for _, chunk in scheduled))
    return [range(stop - chunk.logits, stop) for stop, (_, chunk) in zip(stops, scheduled, strict=True)]


def common_tokens(one: Sequence, other: Sequence, block: int, limit: int) -> int:
    """Return with how many equal tokens two sequences begin, at most `limit`, in whole blocks of `block` tokens."""
    parts, end = 0, limit // block * block
    while parts < end and one.keys[parts : parts + block] == other.keys[parts : parts + block]:
        parts += block
    return parts


def next_chunk(sequence: Sequence, rows: int) -> Chunk:
    """Return the next tokens of a sequence, at most `rows`, and count them as cached.

    Logits are computed for the last token of the sequence, for the tokens of a prompt that are to be scored, or for all
    tokens of the chunk. The kinds of cache add what the ranks need for it (CacheKind.announce).
    """
    prompt, start = sequence.prompt, sequence.cached
    token_ids = sequence.tokens[start : start + rows]
    sequence.cached = stop = start + len(token_ids)
    logits = len(token_ids) if sequence.all_logits else int(sequence.uncached == 0)
    if sequence.scoring:
        logits = max(stop - max(start, sequence.scored), 0)
    positions = []
    if prompt.positions and start < sequence.prompt_len:
        generated = range(sequence.prompt_len + prompt.shift, stop + prompt.shift)
        positions = [[*axis[start:stop], *generated] for axis in prompt.positions]
    return Chunk(sequence.number, start, token_ids, [], logits, positions, prompt.shift)
