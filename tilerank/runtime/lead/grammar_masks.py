"""Grammar-constrained decoding on rank 0: for each sequence with a grammar, the mask of allowed next tokens.

A grammar's author decides how long compilation and masks take, so neither runs in the thread that computes steps. Two
threads of their own compile grammars and compute masks (llguidance releases the interpreter's lock). A sequence whose
mask is late skips a step. Most masks take some ten microseconds.
"""

from __future__ import annotations

import logging
import os
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..protocol.errors import RequestError
from ..protocol.events import EndedEvent, FailedEvent
from ..protocol.grammar import Vocabulary, allowed_tokens
from .logits_rules import Bits

if TYPE_CHECKING:
    from llguidance import LLMatcher

log = logging.getLogger(__name__)

GRACE_S = 0.005
"""Longest time that a step waits for all of its masks together."""
BASE_BUDGET_S, TOKEN_BUDGET_S = 0.5, 0.01
"""CPU time that the masks of one sequence may take: a fixed part, and a part for each token."""
MAX_COMPILED = 64
"""Compiled grammars to keep: most requests repeat an earlier grammar."""
NICENESS = 10
"""Both threads share a core with the thread that computes steps, which goes first."""


@dataclass(frozen=True)
class _MatcherState:
    """The matcher after some tokens, and its mask.

    allowed: bits of the tokens that may come next (logits_rules.py); None if the grammar allows no further token.
    """

    matcher: LLMatcher
    allowed: Bits | None


class GrammarMask:
    """The mask of one sequence. It changes only in `advance` and in `collect_masks`.

    ready: the mask is computed. Only then the other attributes hold: `error` is a sentence if the grammar cannot be
    followed any further, `complete` is True if no token can follow, and otherwise `allowed` has bits of the tokens that
    may come next (logits_rules.py).
    """

    def __init__(self, masks: GrammarMasks, start: Future[_MatcherState]) -> None:
        self.ready = False
        self.error: str | None = None
        self._masks = masks
        self._cpu_s, self._tokens = 0.0, 0
        self._state = start

    @property
    def complete(self) -> bool:
        return self.allowed is None

    @property
    def allowed(self) -> Bits | None:
        return self._state.result().allowed

    def end_of(self, request: int) -> EndedEvent | FailedEvent | None:
        """Return how the mask ends a request; None if it does not, or is not ready."""
        if self.ready and self.error is not None:
            return FailedEvent(request, self.error)
        return EndedEvent(request) if self.ready and self.complete else None

    def advance(self, token_id: int) -> None:
        """Append a token to the sequence and start computing the next mask."""
        # All sequences of a grammar share its first state, so the first token needs a copy of the matcher.
        matcher = self._state.result().matcher
        if self._tokens == 0:
            matcher = matcher.deep_copy()
        self._tokens += 1
        self.ready = False
        self._state = self._masks.mask_thread.submit(self._consume, matcher, token_id)

    def _collect(self) -> None:
        self.ready = self._state.done()
        failure = self._state.exception() if self.ready else None
        if isinstance(failure, RequestError):
            self.error = str(failure)
        elif failure is not None:  # a panic inside the library fails this request only
            log.error("a grammar failed", exc_info=failure)
            self.error = "the grammar failed; see the server's log"

    def _consume(self, matcher: LLMatcher, token_id: int) -> _MatcherState:
        began = time.thread_time()
        matcher.consume_token(token_id)
        state = self._masks.compute_state(matcher)
        self._cpu_s += time.thread_time() - began
        if self._cpu_s > BASE_BUDGET_S + TOKEN_BUDGET_S * self._tokens:
            raise RequestError("the grammar: computing the allowed next tokens takes too long")
        return state


class GrammarMasks:
    """Compiles grammars, keeps the last MAX_COMPILED, and makes masks for sequences.

    vocab_size: number of columns of the logits, which may exceed the tokenizer's vocabulary.
    """

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        # Two threads, so that masks never wait for the compilation of another request's grammar.
        self.mask_thread = ThreadPoolExecutor(1, "mask", _lower_priority)
        self._compile_thread = ThreadPoolExecutor(1, "grammar", _lower_priority)
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._compiled: OrderedDict[str, Future[_MatcherState]] = OrderedDict()

    def open(self, grammar: str) -> GrammarMask:
        """Return the mask of a new sequence that follows `grammar` (grammar.py describes the format)."""
        if grammar not in self._compiled:
            self._compiled[grammar] = self._compile_thread.submit(self._compile, grammar)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return GrammarMask(self, self._compiled[grammar])

    def compute_state(self, matcher: LLMatcher) -> _MatcherState:
        """Return the state of `matcher` with its mask. Raises RequestError if the mask cannot be computed."""
        if matcher.is_stopped() and not matcher.is_error():
            return _MatcherState(matcher, None)
        return _MatcherState(matcher, np.frombuffer(allowed_tokens(matcher), np.uint8)[: -(-self._vocab_size // 8)])

    def _compile(self, grammar: str) -> _MatcherState:
        return self.compute_state(self._vocabulary.matcher(grammar))


def collect_masks(masks: Sequence[GrammarMask], urgent: Sequence[GrammarMask]) -> None:
    """Set `ready` and `error` of all `masks`. Waits up to GRACE_S for the `urgent` ones."""
    if urgent:
        wait([mask._state for mask in urgent], GRACE_S)
    for mask in masks:
        mask._collect()


def _lower_priority() -> None:
    os.nice(NICENESS)  # Linux applies it to the calling thread only.
