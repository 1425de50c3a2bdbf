"""Drafts of tests: from texts that are known, right and wrong ones, all of which are checked."""

from collections import abc
from collections.abc import Callable, Mapping
from typing import Any

from tilerank.runtime.lead.drafting.draft_counts import DraftCounts, Proposal
from tilerank.runtime.lead.drafting.draft_depth import DraftDepth
from tilerank.runtime.lead.drafting.drafts import MAX_PROPOSED, Drafting, DraftSource
from tilerank.runtime.lead.drawing import Draw
from tilerank.runtime.lead.engine import Engine, Request
from tilerank.runtime.lead.scheduler import Scheduler
from tilerank.runtime.lead.sequence import Sequence
from tilerank.runtime.protocol.rank_messages import Chunk

Lengths = Callable[[int], tuple[int, int]]
"""Returns, for a text of so many generated tokens, how many of the next tokens are drafted right, and how many wrong
ones follow."""


def mixed(generated: int) -> tuple[int, int]:
    """No drafts after every fifth token, and else up to four right ones and up to two wrong ones."""
    return (generated % 4, generated % 3) if generated % 5 else (0, 0)


def always_right(_: int) -> tuple[int, int]:
    return 15, 0


def always_wrong(_: int) -> tuple[int, int]:
    return 0, 3


class AllDrafts(DraftCounts):
    """All drafts are checked, whatever they take."""

    def choose(self, proposals: abc.Sequence[tuple[Sequence, Proposal]], rows: int) -> list[int]:
        return [len(proposal.tokens) for _, proposal in proposals]


class NoDrafts(DraftCounts):
    """No draft is checked."""

    def choose(self, proposals: abc.Sequence[tuple[Sequence, Proposal]], rows: int) -> list[int]:
        return [0] * len(proposals)


class Depths(DraftDepth):
    """As many tokens as there may be are drafted after `drafting` steps, and none after the next `resting` ones, in
    turn."""

    def __init__(self, most: int, drafting: int = 1, resting: int = 0) -> None:
        super().__init__(1.0, most)
        self._drafting, self._turn, self._steps = drafting, drafting + resting, 0

    def choose(self, sequences: int) -> int:
        self._steps += 1
        most = min(self._most, max(MAX_PROPOSED // sequences, 1))
        return most if self._steps % self._turn < self._drafting else 0


class KnownTexts(DraftSource):
    """Drafts the texts that are known to follow prompts. vocab: of the model."""

    def __init__(self, texts: Mapping[tuple[int, ...], list[int]], vocab: int, lengths: Lengths) -> None:
        self._texts, self._vocab, self._lengths = texts, vocab, lengths

    def propose(self, sequences: abc.Sequence[Sequence], most: abc.Sequence[int]) -> list[Proposal]:
        return [Proposal(self._of(sequence)[:count]) for sequence, count in zip(sequences, most, strict=True)]

    def _of(self, sequence: Sequence) -> list[int]:
        generated = sequence.length - sequence.prompt_len
        right, wrong = self._lengths(generated)
        left = self._texts.get(tuple(sequence.prompt.token_ids), [])[generated:]
        drafts = left[:right]
        return drafts + [(token + 1) % self._vocab for token in left[right : right + wrong]]


def with_drafts(engine: Engine, some: list[Request], texts: list[list[Any]], lengths: Lengths = mixed) -> Engine:
    """Let an engine draft the texts, which are the answers (batching.py) to some requests. Returns it."""
    known = {
        tuple(request.prompt.token_ids): [token for token, *_ in text]
        for request, text in zip(some, texts, strict=True)
    }
    source = KnownTexts(known, engine.card.vocab_size, lengths)
    engine.drafting = Drafting(source, engine.scheduler, AllDrafts())
    return engine


def without_drafts(engine: Engine) -> Engine:
    """Let an engine draft nothing. Returns it."""
    engine.drafting = Drafting(None, engine.scheduler, AllDrafts())
    return engine


class Guesses(DraftSource):
    """Drafts `right` times `token`, and then `wrong` times another one."""

    token = right = wrong = 0

    def propose(self, sequences: abc.Sequence[Sequence], most: abc.Sequence[int]) -> list[Proposal]:
        guess = [self.token] * self.right + [self.token + 1] * self.wrong
        return [Proposal(guess[:count]) for count in most]


def keys_with_drafts(sequence: Sequence, chunk: Chunk) -> list[int]:
    """Return the keys of the tokens of a sequence, and of the drafts of its chunk."""
    drafts = chunk.token_ids[len(chunk.token_ids) - chunk.drafts :]
    return sequence.keys[: sequence.cached] + [sequence.prompt.key_of_generated(token) for token in drafts]


def choose_always(token: int, scheduler: Scheduler, sequence: Sequence, chunk: Chunk) -> None:
    """Let `token` be what is chosen after every row of a chunk, as Engine does."""
    draw = Draw(sequence, chunk, range(chunk.logits))
    while draw.is_open:
        draw.take(token)
        scheduler.publish([(sequence, chunk)])
