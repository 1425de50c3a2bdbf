"""Rank 0 leads the encoding of media: one medium at a time, in pieces between the steps of other sequences."""

import time

from .encodings import EncoderCache, Encoding
from .prompt import Medium
from .rank_messages import Encode, EncodeLayers, Frames, StopEncode
from .worker import Worker

STALL_S = 0.05
"""How long pieces of an encode may keep other sequences from their next step."""
ALONE_S = 0.25
"""How long pieces are computed before new requests are looked at, if no sequence can go on meanwhile."""
PART_BYTES = 16 << 20
"""Bytes of frames in a message."""


class MediaEncoding:
    """The encode that runs on all ranks, if any."""

    def __init__(self, worker: Worker, cache: EncoderCache) -> None:
        self._worker = worker
        self._cache = cache
        self._running: Encoding | None = None
        self._sent = 0  # bytes of its frames
        self._piece_s = 0.0  # the longest of its pieces so far; 0 before the first

    def advance(self, following: Encoding | None, *, alone: bool) -> None:
        """Go on with the encode that runs, or start `following`. Takes about STALL_S, or ALONE_S if `alone`, and at
        least one piece."""
        end = time.perf_counter() + (ALONE_S if alone else STALL_S)
        if self._running is None:
            if following is None:
                return
            self._start(following)
        frames = self._running.wanted.medium.frames if self._running else b""
        while self._sent < len(frames):
            if time.perf_counter() >= end:
                return
            self._prepare(Frames(self._next_part(frames)))
        count = 1
        while self._running is not None and count:
            self._encode_layers(count)
            count = pieces_until(end - time.perf_counter(), self._piece_s)

    def stop_if_unused(self) -> None:
        """Stop the encode that runs if no sequence needs it any more."""
        if self._running is not None and not self._running.users:
            self._running = None
            self._prepare(StopEncode())

    def _start(self, encoding: Encoding) -> None:
        self._running, self._sent, self._piece_s = encoding, 0, 0.0
        medium = encoding.wanted.medium
        first = Medium(medium.kind, self._next_part(medium.frames), medium.size, medium.grid)
        self._prepare(Encode(encoding.number, first, list(self._cache.forgotten)))
        self._cache.forgotten.clear()

    def _next_part(self, frames: bytes) -> bytes:
        part = frames[self._sent : self._sent + PART_BYTES]
        self._sent += len(part)
        return part

    def _prepare(self, message: Encode | Frames | StopEncode) -> None:
        self._worker.announce(message)
        self._worker.prepare_encode(message)

    def _encode_layers(self, count: int) -> None:
        began = time.perf_counter()
        self._worker.announce(EncodeLayers(count))
        complete = self._worker.encode_layers(count)
        self._piece_s = max(self._piece_s, (time.perf_counter() - began) / count)
        if complete and self._running is not None:
            self._running.ready, self._running = True, None


def pieces_until(seconds: float, piece_s: float) -> int:
    """Return how many pieces of `piece_s` fit into the time that is left."""
    return max(int(seconds / piece_s), 0)
