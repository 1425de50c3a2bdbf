"""Guides lead texts along their grammars, on rank 0: for each next token they say which ones may come.

How long that takes is up to whoever wrote the grammar, so it is never done where all sequences would wait: threads of
its own compile grammars and compute masks (the library lets go of the interpreter's lock), and a sequence whose mask is
not there in time stays out of a step or two. Most masks take some ten microseconds.
"""

import logging
import os
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from llguidance import LLMatcher
from torch import Tensor

from .errors import RequestError
from .grammar import Vocabulary, allowed

log = logging.getLogger(__name__)

GRACE_S = 0.005
"""How long a step waits for masks, all in all."""
SPENT_S, SPENT_PER_TOKEN_S = 0.5, 0.01
"""What the masks of a text may take of their thread: so much, and so much more for every token."""
KEPT = 64
"""Compiled grammars: most requests come with one that has been there before."""
NICENESS = 10
"""These threads share a core with one that computes steps, which others wait for."""


@dataclass(frozen=True)
class _Place:
    """A place in a text: the grammar's state, and the tokens that may not come next, or None if none may."""

    matcher: LLMatcher
    forbidden: Tensor | None


class Guide:
    """Along one text. What it tells changes in `take` and in `settle` alone, not behind the caller's back.

    ready: is it known how to go on? Then `error` says why there is no going on, `complete` that nothing can follow any
    more, and else `forbidden`, bool [vocab], which tokens may not come next.
    """

    def __init__(self, guides: "Guides", begin: Future[_Place]) -> None:
        self.ready = False
        self.error: str | None = None
        self._guides = guides
        self._spent_s, self._tokens = 0.0, 0
        self._place = begin

    @property
    def complete(self) -> bool:
        return self.forbidden is None

    @property
    def forbidden(self) -> Tensor | None:
        return self._place.result().forbidden

    def take(self, token_id: int) -> None:
        """The text goes on with this token."""
        # All texts of a grammar begin at the same place, which stays where it is.
        place = self._place.result()
        matcher = place.matcher if self._tokens else place.matcher.deep_copy()
        self._tokens += 1
        self.ready = False
        self._place = self._guides.masking.submit(self._advance, matcher, token_id)

    def _settle(self) -> None:
        self.ready = self._place.done()
        failure = self._place.exception() if self.ready else None
        if isinstance(failure, RequestError):
            self.error = str(failure)
        elif failure is not None:  # a panic of the library is this text's misfortune alone
            log.error("a grammar failed", exc_info=failure)
            self.error = "the grammar: it could not be followed; the server's log says why"

    def _advance(self, matcher: LLMatcher, token_id: int) -> _Place:
        began = time.thread_time()
        matcher.consume_token(token_id)
        place = self._guides.look(matcher)
        self._spent_s += time.thread_time() - began
        if self._spent_s > SPENT_S + SPENT_PER_TOKEN_S * self._tokens:
            raise RequestError("the grammar: it takes too long to tell which tokens may come next")
        return place


class Guides:
    """Where guides come from. `vocab_size`: columns of logits."""

    def __init__(self, model_dir: Path, vocab_size: int) -> None:
        # A thread each: whoever waits for a mask does not wait for what others have to compile.
        self.masking = ThreadPoolExecutor(1, "mask", _step_back)
        self._compiling = ThreadPoolExecutor(1, "grammar", _step_back)
        self._vocabulary = Vocabulary(model_dir)
        self._vocab_size = vocab_size
        self._kept: OrderedDict[str, Future[_Place]] = OrderedDict()

    def open(self, grammar: str) -> Guide:
        """For one more text of this grammar (see grammar.py)."""
        if grammar not in self._kept:
            self._kept[grammar] = self._compiling.submit(self._begin, grammar)
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(grammar)
        return Guide(self, self._kept[grammar])

    def look(self, matcher: LLMatcher) -> _Place:
        """Where it stands. RequestError if there is no telling."""
        if matcher.is_stopped() and not matcher.is_error():
            return _Place(matcher, None)
        bits = np.unpackbits(np.frombuffer(allowed(matcher), np.uint8), bitorder="little")
        return _Place(matcher, torch.from_numpy(bits[: self._vocab_size]) == 0)

    def _begin(self, grammar: str) -> _Place:
        return self.look(self._vocabulary.matcher(grammar))


def settle(guides: Sequence[Guide], urgent: Sequence[Guide]) -> None:
    """Takes in what is known by now; of the urgent ones also what will be in no time."""
    if urgent:
        wait([guide._place for guide in urgent], GRACE_S)
    for guide in guides:
        guide._settle()


def _step_back() -> None:
    os.nice(NICENESS)  # of this thread, on Linux
