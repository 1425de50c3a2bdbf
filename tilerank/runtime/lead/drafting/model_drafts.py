"""Drafts of a small model with the same vocabulary (rank/draft_model.py)."""

from collections import abc, defaultdict
from itertools import takewhile

from ...protocol.rank_messages import Chunk
from ...rank.worker import Worker
from ...step.batch import padded_size
from ..scheduler import Scheduler
from ..sequence import Scheduled, Sequence
from .draft_counts import Acceptance, Proposal, Share
from .drafts import MAX_PROPOSED, common_prefix
from .led_drafts import Led, LedDrafts

MAX_MODEL_DRAFTS = 7
"""Tokens that the model drafts for a sequence. With the row of the token before them they fill a recorded step of 8
rows."""
FORGETTING = 0.99
"""What is not measured any more, because too few tokens are drafted, counts so much less after every token: other texts
may be easier. In the end it is expected to pay, and is measured again."""
ROW_COST = 0.03
"""What a row more adds to the time of a decode step of a few rows, as a share of it (docs/performance.md)."""
NEVER = -1
"""A token that is never drafted."""


class ModelDrafts(LedDrafts):
    """Leads the draft model over prompts, and over texts while its drafts pay."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        assert worker.draft_model is not None
        self._model, self._vocab_size = worker.draft_model, worker.card.vocab_size
        self._depth = DraftDepth(self._model.step_bytes.decode(1, 0) / worker.step_bytes.decode(1, 0))
        self._read: dict[Sequence, tuple[int, int]] = {}  # its number, and how many of its tokens the model has read
        self._sequences = 0  # after which tokens were drafted

    def propose(self, sequences: abc.Sequence[Sequence], most: abc.Sequence[int]) -> list[Proposal]:
        """As of any source, up to the first token that the vocabulary of the large model does not have."""
        return [
            Proposal(list(takewhile(lambda token: token < self._vocab_size, proposal.tokens)))
            for proposal in super().propose(sequences, most)
        ]

    def _learn(self, sequence: Sequence, chunk: Chunk, drafts: list[int], chosen: list[int]) -> None:
        if drafts:
            number, read = self._read[sequence]
            # It has read all of its drafts but the last.
            self._read[sequence] = number, read + min(common_prefix(drafts, chosen), len(drafts) - 1)
            self._depth.learn(self._sequences, drafts, chosen[: chunk.drafts])

    def _lead(self, scheduled: Scheduled, scheduler: Scheduler) -> list[Led]:
        running = [(sequence, chunk) for sequence, chunk in scheduled if sequence.is_running]
        self._sequences = sum(sequence.uncached == 1 and sequence.max_drafts > 0 for sequence, _ in running)
        depth = self._depth.choose(self._sequences) if self._sequences else 0
        led = [one for sequence, chunk in running if (one := self._led(sequence, chunk, depth, scheduler)) is not None]
        self._read = {sequence: found for sequence, found in self._read.items() if sequence.is_running}
        return led

    def _led(self, sequence: Sequence, chunk: Chunk, depth: int, scheduler: Scheduler) -> Led | None:
        """Return the tokens of a sequence that the model has not read, and how many it drafts after them. None if it
        has nothing to do: in decode steps after which nothing is drafted, and where its context ends."""
        count = min(sequence.max_drafts, depth) if sequence.uncached == 1 else 0
        count = scheduler.draft_room(sequence, count) if count else 0
        end = sequence.length if count else sequence.cached
        is_decode = len(chunk.token_ids) == 1 + chunk.drafts
        number, read = self._read.get(sequence, (-1, 0))
        read = read if number == sequence.number else chunk.start
        has_work = (count > 0 or not is_decode) and end + count <= self._model.context_length
        self._read[sequence] = sequence.number, end if has_work else read
        if not has_work:
            return None
        start = min(read, end - 1)
        token_ids = [token if token < self._model.vocab_size else 0 for token in sequence.tokens[start:end]]
        # In a recorded step, all rows have logits.
        following = len(token_ids) - 1 if count and len(token_ids) <= 1 + MAX_MODEL_DRAFTS else 0
        logits, pages = min(count, 1) + following, scheduler.new_pages(sequence)
        return sequence, Chunk(sequence.number, start, token_ids, pages, logits, drafts=following), count


class DraftDepth:
    """Decides how many tokens a model drafts after a step: one more as long as that yields more tokens a second.

    cost: the time of a pass of the model, as a share of that of a step without drafts.
    """

    def __init__(self, cost: float) -> None:
        self._cost = cost + ROW_COST
        # By batch size, the shares of drafts that were checked and right: first drafts, and drafts after a right one.
        self._useful: defaultdict[int, Acceptance] = defaultdict(Acceptance)

    def choose(self, sequences: int) -> int:
        """Return how many tokens are drafted after each of so many sequences."""
        useful = self._useful[padded_size(sequences)]
        gain = _expected(useful.first, 1.0)
        later = _expected(useful.later, gain)
        depth, tokens, seconds = 0, 1.0, 1.0
        while depth < min(MAX_MODEL_DRAFTS, max(MAX_PROPOSED // sequences, 1)):
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
