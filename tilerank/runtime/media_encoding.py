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
        self._unsent = memoryview(b"")  # the rest of its frames
        self._piece_s = 0.0  # the longest of its pieces so far; 0 before the first

    def advance(self, following: Encoding | None, *, alone: bool) -> None:
        """Go on with the encode that runs, or start `following`. Takes about STALL_S, or ALONE_S if `alone`, and at
        least one piece."""
        end = time.perf_counter() + (ALONE_S if alone else STALL_S)
        if self._running is None:
            if following is None:
                return
            self._start(following)
        while self._unsent:
            if time.perf_counter() >= end:
                return
            self._prepare(Frames(self._next_part()))
        count = 1
        while self._running is not None and count:
            self._encode_layers(count)
            count = pieces_until(end - time.perf_counter(), self._piece_s)

    def stop_if_unused(self) -> None:
        """Stop the encode that runs if no sequence needs it any more."""
        if self._running is not None and not self._running.users:
            self._end()
            self._prepare(StopEncode())

    def _start(self, encoding: Encoding) -> None:
        assert encoding.medium is not None
        medium = encoding.medium
        self._running, self._unsent, self._piece_s = encoding, memoryview(medium.frames), 0.0
        first = Medium(medium.kind, self._next_part(), medium.size, medium.grid)
        self._prepare(Encode(encoding.number, first, list(self._cache.forgotten)))
        self._cache.forgotten.clear()

    def _end(self) -> None:
        self._running, self._unsent = None, memoryview(b"")

    def _next_part(self) -> bytes:
        part, self._unsent = self._unsent[:PART_BYTES], self._unsent[PART_BYTES:]
        return bytes(part)

    def _prepare(self, message: Encode | Frames | StopEncode) -> None:
        self._worker.announce(message)
        self._worker.prepare_encode(message)

    def _encode_layers(self, count: int) -> None:
        began = time.perf_counter()
        self._worker.announce(EncodeLayers(count))
        complete = self._worker.encode_layers(count)
        self._piece_s = max(self._piece_s, (time.perf_counter() - began) / count)
        if complete and self._running is not None:
            self._running.medium = None
            self._end()


def pieces_until(seconds: float, piece_s: float) -> int:
    """Return how many pieces of `piece_s` fit into the time that is left."""
    return max(int(seconds / piece_s), 0)
