"""What the steps of a rank have taken so far. Counted between steps, on the rank itself. No torch: clients know it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from .step import Step

if TYPE_CHECKING:
    from .traffic import Traffic


class RankCounters(msgspec.Struct, frozen=True, array_like=True):
    """Since the rank was started. A step in which every sequence computes one token is a decode step; one with a piece
    of a prompt is a prefill step. `decode_bytes`: what decode steps had to read (traffic.py). `waited_s`: for other
    ranks in collectives, during steps of both kinds."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    decode_bytes: float = 0.0
    waited_s: float = 0.0

    def __sub__(self, before: RankCounters) -> RankCounters:
        ours, theirs = msgspec.structs.astuple(self), msgspec.structs.astuple(before)
        return RankCounters(*(a - b for a, b in zip(ours, theirs, strict=True)))


class StepCounter:
    """Counts the steps of this rank."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._prefill_s = self._decode_s = self._decode_bytes = self._waited_s = 0.0

    def count(self, step: Step, seconds: float, waited_s: float) -> None:
        self._waited_s += waited_s
        tokens = 0
        for chunk in step.chunks:
            if len(chunk.token_ids) != 1:
                self._prefill_s += seconds
                return
            tokens += chunk.start + 1
        self._decode_s += seconds
        self._decode_bytes += self._traffic.decode(len(step.chunks), tokens)

    @property
    def counters(self) -> RankCounters:
        return RankCounters(self._prefill_s, self._decode_s, self._decode_bytes, self._waited_s)
