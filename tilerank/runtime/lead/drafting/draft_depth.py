"""How many tokens the ranks draft after a step: as many as are expected to yield more than drafting them takes."""

from collections import defaultdict

from ...step.batch import padded_size
from .draft_counts import Acceptance, Share
from .drafts import MAX_PROPOSED

FORGETTING = 0.99
"""The factor by which a share counts less after every token while too few tokens are drafted to measure it. Other texts
may be easier to draft, so after some time a draft is expected to pay, and the share is measured again."""
ROW_COST = 0.03
"""The time that one more row adds to a decode step of a few rows, as a share of that step (docs/performance.md)."""
NEVER = -1
"""A token that is never drafted."""


class DraftDepth:
    """Decides how many tokens are drafted after a step: one more as long as that yields more tokens a second.

    cost: the time of drafting a token, as a share of that of a step without drafts. most: tokens after a sequence.
    """

    def __init__(self, cost: float, most: int) -> None:
        self._cost, self._most = cost + ROW_COST, most
        # By batch size, the shares of drafts that were checked and right: first drafts, and drafts after a right one.
        self._useful: defaultdict[int, Acceptance] = defaultdict(Acceptance)

    def choose(self, sequences: int) -> int:
        """Return how many tokens are drafted after each of so many sequences."""
        useful = self._useful[padded_size(sequences)]
        gain = _expected(useful.first, 1.0)
        later = _expected(useful.later, gain)
        depth, tokens, seconds = 0, 1.0, 1.0
        while depth < min(self._most, max(MAX_PROPOSED // sequences, 1)):
            if gain * seconds <= self._cost * tokens:
                break
            depth, tokens, seconds, gain = depth + 1, tokens + gain, seconds + self._cost, gain * later
        if depth < 2:
            share = useful.later if depth else useful.first
            fading = FORGETTING ** (1 / sequences)
            share.right, share.guesses = share.right * fading, share.guesses * fading
        return depth

    def learn(self, sequences: int, drafts: list[int], checked: list[int]) -> None:
        """Drafts after a sequence, one of so many, were checked, and the tokens `checked` were chosen in their places.
        Drafts that were not checked count as wrong ones."""
        self._useful[padded_size(sequences)].add(drafts, [*checked, NEVER])


def _expected(share: Share, unknown: float) -> float:
    """Return the share of right guesses, with one more that is right with a probability of `unknown`."""
    return (share.right + unknown) / (share.guesses + 1.0)
