"""Counters of the steps of each rank. Imports no torch, because clients of the engine use them as well."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ..protocol.rank_messages import Step

if TYPE_CHECKING:
    from ..step.bytes_per_step import BytesPerStep


class RankCounters(msgspec.Struct, frozen=True, array_like=True):
    """Totals since the start of a rank.

    A step in which every sequence computes one token, or one and its drafts, is a decode step; any other one is a
    prefill step. prefill_s, decode_s: seconds in steps. decode_bytes: bytes that decode steps have to read. waited_s:
    seconds that collectives waited for other ranks, in steps of both kinds. encode_s: seconds in encoding media.
    """

    prefill_s: float = 0.0
    decode_s: float = 0.0
    decode_bytes: float = 0.0
    waited_s: float = 0.0
    encode_s: float = 0.0

    def __sub__(self, before: RankCounters) -> RankCounters:
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(before), strict=True)
        return RankCounters(*(now - then for now, then in pairs))


class StepCounter:
    """Counts the steps of this rank."""

    def __init__(self, bytes_per_step: BytesPerStep) -> None:
        self._bytes = bytes_per_step
        self._prefill_s = self._decode_s = self._decode_bytes = self._waited_s = self._encode_s = 0.0

    def count(self, step: Step, seconds: float, waited_s: float) -> None:
        """Add a step that took `seconds`, of which collectives waited `waited_s` for other ranks."""
        self._waited_s += waited_s
        tokens = drafts = 0
        for chunk in step.chunks:
            if len(chunk.token_ids) != 1 + chunk.drafts:
                self._prefill_s += seconds
                return
            tokens += chunk.start + len(chunk.token_ids)
            drafts += chunk.drafts
        self._decode_s += seconds
        self._decode_bytes += self._bytes.decode(len(step.chunks), tokens, drafts)

    def count_encode(self, seconds: float) -> None:
        """Add pieces of an encode that took `seconds`."""
        self._encode_s += seconds

    @property
    def counters(self) -> RankCounters:
        return RankCounters(self._prefill_s, self._decode_s, self._decode_bytes, self._waited_s, self._encode_s)
