"""How many drafts a step checks: as many as yield the most tokens a second.

Two things are measured while the engine runs: how often the proposals for each sequence are right, also those that are
not checked, and how long decode steps of each recorded size take. Rows up to the recorded size cost nothing more. The
number of drafts goes down to none where further rows take longer than the tokens they yield.
"""

from collections import abc, defaultdict
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from ...step.batch import padded_size
from ..sequence import Sequence

SMALLEST_GAIN, LARGER_STEP_GAIN = 1.02, 1.1
"""Drafts are checked if they yield so many times the tokens a second of a step without them, in a step of its recorded
size and in a larger one. A smaller gain is within the errors of what a larger step is expected to take: with 1.02,
texts of 16 requests lost 6 %."""
TRIAL_GAIN = 1.1
"""A size whose time speaks against it is tried where it would yield so many times the tokens a second if it took no
longer than the step without drafts, or half as long as it did."""
TRIAL_EVERY, TRIAL_STEPS = 400, 4
"""Among so many choices, so many are the one that seems worse, drafts or none: its time may have changed."""
MOST_MEASUREMENTS = 8
"""The time of a size is the mean of about so many of its latest steps."""
SMALLEST_CHANCE = 0.02
"""Drafts that are accepted with a lower probability are not checked."""
GROWTH = 1.05
"""A size that was not measured is expected to take so many times as long as half of it: little, so that it is tried."""
FADING, PRIOR_WEIGHT = 0.95, 4.0
"""Each result counts so much less with every later one. The results of all sequences count as so many of a sequence's
own."""


@dataclass(frozen=True)
class Proposal:
    """Tokens that may follow those of a sequence; maybe none. grade: proposals of a source and grade are about equally
    often right."""

    tokens: list[int]
    grade: int = 0


@dataclass
class Share:
    """The share of right guesses among the latest ones."""

    right: float = 0.0
    guesses: float = 0.0

    def add(self, is_right: bool) -> None:
        self.right = self.right * FADING + is_right
        self.guesses = self.guesses * FADING + 1

    def after(self, prior: "Share") -> float:
        """Return the share, with that of `prior` in place of guesses that are missing."""
        return (self.right + PRIOR_WEIGHT * prior.right / prior.guesses) / (self.guesses + PRIOR_WEIGHT)


@dataclass
class Acceptance:
    """How often proposals are right: their first token, and one after another that was right."""

    first: Share = field(default_factory=Share)
    later: Share = field(default_factory=Share)

    def add(self, proposed: abc.Sequence[int], chosen: abc.Sequence[int]) -> None:
        """Count the proposed tokens up to the first that is not the chosen one."""
        share = self.first
        for guess, token in zip(proposed, chosen, strict=False):
            share.add(guess == token)
            if guess != token:
                return
            share = self.later


def _unknown() -> Acceptance:
    """Return the acceptance to begin with."""
    return Acceptance(Share(2.0, 4.0), Share(3.0, 4.0))


class StepTimes:
    """The seconds that decode steps take, by their recorded size."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._counts: dict[int, int] = {}

    def add(self, size: int, seconds: float) -> None:
        """Count a step. The first one of a size is left out, because it records the step."""
        count = self._counts[size] = self._counts.get(size, -1) + 1
        if count == 1:
            self._seconds[size] = seconds
        elif count:
            mean = self._seconds[size]
            self._seconds[size] += (min(seconds, 2 * mean) - mean) / min(count, MOST_MEASUREMENTS)

    def expected(self, size: int) -> float | None:
        """Return the mean of a size, or a guess from the next smaller one that was measured; None if none was."""
        factor = 1.0
        while size not in self._seconds:
            if size == 1:
                return None
            size, factor = padded_size(size // 2), factor * GROWTH
        return self._seconds[size] * factor


class DraftCounts:
    """Decides how many of the proposed tokens are checked."""

    def __init__(self) -> None:
        self.times = StepTimes()
        self._all: defaultdict[int, Acceptance] = defaultdict(_unknown)  # by grade
        self._of: WeakKeyDictionary[Sequence, defaultdict[int, Acceptance]] = WeakKeyDictionary()
        self._choices = TRIAL_STEPS  # no trial at first

    def choose(self, proposals: abc.Sequence[tuple[Sequence, Proposal]], rows: int) -> list[int]:
        """Return how many tokens of each proposal a step checks that has `rows` rows without them."""
        gains = sorted(self._gains(proposals), reverse=True)
        plain = self.times.expected(padded_size(rows))
        counts = [0] * len(proposals)
        if plain is None or not gains:
            return counts
        best, tried, yielded = (rows / plain, 0), (rows / plain * TRIAL_GAIN, 0), float(rows)
        for count, (gain, _) in enumerate(gains, 1):
            yielded += gain
            size = padded_size(rows + count)
            if count == len(gains) or size != padded_size(rows + count + 1):
                expected = self.times.expected(size) or plain
                needed = SMALLEST_GAIN if size == padded_size(rows) else LARGER_STEP_GAIN
                best = max(best, (yielded / expected / needed, count))
                tried = max(tried, (yielded / max(plain, expected / 2), count))
        self._choices += 1
        is_trial = self._choices % TRIAL_EVERY < TRIAL_STEPS
        count = (0 if best[1] else tried[1]) if is_trial else best[1]
        for _, index in gains[:count]:
            counts[index] += 1
        return counts

    def learn(self, sequence: Sequence, proposal: Proposal, chosen: abc.Sequence[int]) -> None:
        """A sequence got the tokens `chosen` next, for which there was a proposal."""
        self._acceptance(sequence, proposal.grade).add(proposal.tokens, chosen)
        self._all[proposal.grade].add(proposal.tokens, chosen)

    def time(self, rows: int, seconds: float) -> None:
        """A decode step of so many rows, and what rank 0 did for it, took so long."""
        self.times.add(padded_size(rows), seconds)

    def _acceptance(self, sequence: Sequence, grade: int) -> Acceptance:
        grades = self._of.get(sequence)
        if grades is None:
            grades = self._of[sequence] = defaultdict(Acceptance)
        return grades[grade]

    def _gains(self, proposals: abc.Sequence[tuple[Sequence, Proposal]]) -> abc.Iterator[tuple[float, int]]:
        """Yield for every proposed token the probability that it is accepted, and the index of its proposal."""
        for index, (sequence, proposal) in enumerate(proposals):
            acceptance, everyones = self._acceptance(sequence, proposal.grade), self._all[proposal.grade]
            gain, later = acceptance.first.after(everyones.first), acceptance.later.after(everyones.later)
            for _ in proposal.tokens:
                if gain < SMALLEST_CHANCE:
                    break
                yield gain, index
                gain *= later
