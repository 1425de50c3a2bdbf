"""Drafts from what a text and other recent ones repeat (prompt lookup, n-gram speculation).

A text often quotes its prompt, or goes on as it did before. The source looks for the last two tokens in the text so
far and in what was lately generated for any request, and proposes what came after them there. Among several places, the
one with the most equal tokens before it wins. Their number is the grade of the proposal: more make it more often right.
"""

from array import array
from collections import abc
from weakref import WeakKeyDictionary

from ..sequence import Sequence
from .draft_counts import Proposal
from .drafts import DraftSource

PLACES = 8
"""Places of a pair of tokens that are compared, the latest ones."""
LONGEST_MATCH = 8
"""More equal tokens than this before a place make no difference."""
INDEXED = 512
"""Tokens of a text that are indexed between two steps: a long prompt takes several steps until it is known whole."""
SHARED_TOKENS = 1 << 15
"""Tokens of the texts of all requests after which a new pool of them begins. The one before it is kept as well."""
SHARED_BLOCK = 64
"""Generated tokens of a text that become known to other texts together."""
SHARED_MATCH = 3
"""Equal tokens that a place in the text of another request needs: pairs of tokens are too common there."""
NOWHERE = 0
"""Stands for no place."""


class PlacesOfPairs:
    """Where pairs of tokens occur in a list of tokens that grows. The place of a pair is that of the token after it.

    A table has the last place of each pair, and an array has for each place the one before it of the same pair. Both
    hold numbers alone, which the garbage collector does not visit: a long text has as many pairs as tokens.
    """

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self._last: dict[int, int] = {}
        self._before = array("i", [NOWHERE, NOWHERE])  # by place; the first pair has place 2

    def catch_up(self) -> None:
        """Index new tokens, up to the last one but one: nothing has followed the last one yet."""
        tokens, last, before = self.tokens, self._last, self._before
        for place in range(len(before), min(len(tokens), len(before) + INDEXED)):
            pair = tokens[place - 2] << 32 | tokens[place - 1]
            before.append(last.get(pair, NOWHERE))
            last[pair] = place

    def find(self, text: abc.Sequence[int]) -> tuple[int, int]:
        """Return how many tokens before the best place equal the last ones of `text`, and the place; (0, NOWHERE) if
        its last two tokens do not occur."""
        best, place = (0, NOWHERE), self._last.get(text[-2] << 32 | text[-1], NOWHERE)
        for _ in range(PLACES):
            if place == NOWHERE:
                break
            best = max(best, (self._equal_before(place, text), place))
            place = self._before[place]
        return best

    def following(self, place: int, count: int) -> list[int]:
        """Return `count` tokens from a place on. Where the tokens end, they are repeated from there."""
        tokens = self.tokens[place : place + count]
        period = len(tokens)
        return [tokens[i % period] for i in range(count)]

    def _equal_before(self, place: int, text: abc.Sequence[int]) -> int:
        equal, most = 2, min(LONGEST_MATCH, place, len(text))
        while equal < most and self.tokens[place - 1 - equal] == text[-1 - equal]:
            equal += 1
        return equal


class NgramDrafts(DraftSource):
    """Proposes what followed the same tokens before."""

    def __init__(self) -> None:
        self._own: WeakKeyDictionary[Sequence, PlacesOfPairs] = WeakKeyDictionary()
        self._shared: WeakKeyDictionary[Sequence, int] = WeakKeyDictionary()  # how many tokens the pool has
        self._pools = [PlacesOfPairs([]), PlacesOfPairs([])]  # the current one and the one before it

    def propose(self, sequences: abc.Sequence[Sequence], most: abc.Sequence[int]) -> list[Proposal]:
        return [self._of(sequence, count) for sequence, count in zip(sequences, most, strict=True)]

    def _of(self, sequence: Sequence, count: int) -> Proposal:
        own = self._own.get(sequence)
        if own is None:
            own = self._own[sequence] = PlacesOfPairs(sequence.tokens)
        own.catch_up()
        self._share(sequence)
        if sequence.length < 2:
            return Proposal([])
        (equal, place), source = own.find(sequence.tokens), own
        for pool in self._pools if equal < LONGEST_MATCH else ():
            found, there = pool.find(sequence.tokens)
            if found > equal and found >= SHARED_MATCH:
                equal, place, source = found, there, pool
        return Proposal(source.following(place, count) if equal else [], equal)

    def _share(self, sequence: Sequence) -> None:
        """Add the next block of generated tokens to the pool."""
        start = self._shared.setdefault(sequence, sequence.prompt_len)
        if sequence.length - start < SHARED_BLOCK:
            return
        if len(self._pools[0].tokens) > SHARED_TOKENS:
            self._pools = [PlacesOfPairs([]), self._pools[0]]
        self._pools[0].tokens += sequence.tokens[start : start + SHARED_BLOCK]
        self._pools[0].catch_up()
        self._shared[sequence] = start + SHARED_BLOCK
