"""The likelihood of windows of tokens, and how a model's distributions differ from those of a baseline."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import numpy as np
import torch
from torch import Tensor

from tilerank.runtime.lead.engine import Engine
from tilerank.runtime.protocol.prompt import Prompt

from ..harness import Row

_ROWS = 64
"""Rows of logits that are compared at a time, in fp64."""


class Likelihood:
    """Sums over the counted tokens of windows: every token but the first of its window.

    file: the baseline's log-probabilities of all tokens of the vocabulary, in fp32, row after row. A run that `writes`
    them leaves them there; another one reads them, a few rows at a time. None: nothing is compared.
    """

    def __init__(self, file: Path | None, *, writes: bool = False) -> None:
        self._path, self._writes = file, writes
        self._file: IO[bytes] | None = None
        self._tokens = self._same_top_1 = 0
        self._loss = self._kl = self._seconds = 0.0

    def __enter__(self) -> Self:
        if self._path is not None:
            self._file = self._path.open("wb" if self._writes else "rb")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, engine: Engine, window: Sequence[int]) -> None:
        """Predict a window with the model of `engine` and add its tokens to the sums."""
        began = time.monotonic()
        logits = engine.score(Prompt(list(window)))
        self._seconds += time.monotonic() - began
        self.add_logits(logits, window)

    def add_logits(self, logits: Tensor, window: Sequence[int]) -> None:
        """Add the tokens of a window. logits: [len(window), vocab]; the last row predicts nothing."""
        following = torch.tensor(window[1:])
        for rows in _slices(len(following)):
            found = torch.log_softmax(logits[rows].double(), dim=-1)
            self._loss -= float(found.gather(1, following[rows, None]).sum())
            self._tokens += found.shape[0]
            if self._file is not None:
                self._compare(self._file, found)

    def _compare(self, file: IO[bytes], found: Tensor) -> None:
        """Add KL(baseline || found), the sum of p (log p - log q), and where both have the same most likely token."""
        if self._writes:
            file.write(found.float().numpy().tobytes())
            return
        rows = np.fromfile(file, dtype=np.float32, count=found.numel())
        expected = torch.from_numpy(rows).view_as(found).double()
        self._kl += float((expected.exp() * (expected - found)).sum())
        self._same_top_1 += int((expected.argmax(-1) == found.argmax(-1)).sum())

    def sums(self) -> Row:
        """Return the sums. loss: -log p of the tokens. kl: in nats. score_s: the time in the model alone."""
        return {
            "tokens": self._tokens,
            "loss": self._loss,
            "kl": self._kl,
            "same_top_1": self._same_top_1,
            "score_s": self._seconds,
        }


def _slices(count: int) -> Iterator[slice]:
    for first in range(0, count, _ROWS):
        yield slice(first, min(first + _ROWS, count))
