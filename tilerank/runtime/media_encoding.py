"""Rank 0 leads the encoding of media: one medium at a time, in pieces between the steps of other sequences."""

import time
from collections import deque

import torch

from tilerank.kernels import core

from .caches.encodings import EncoderCache, Encoding
from .prompt import Medium
from .rank_messages import Encode, EncodePiece, Frames, StopEncode
from .worker import Worker

BESIDE_S = 0.05
"""How long other sequences wait between two of their steps."""
ALONE_S = 0.25
"""How long new requests wait to be looked at, if no sequence can go on meanwhile."""
_PIECE_S = 0.025
"""How long a piece is expected to take at least, since pieces of different layers differ."""
_RECENT = 16
"""The next piece is expected to take as long as the longest of so many before it."""
_OPERATIONS = {"amx": 16e9, "avx512_bf16": 5e9, "avx512": 2e9, "avx2": 1e9, "reference": 0.5e9}
"""Operations that a thread computes in 10 to 25 ms on each rung."""
PART_BYTES = 1 << 20
"""Bytes of frames in a message. Copying them to all ranks takes a few milliseconds."""


class MediaEncoding:
    """The encode that runs on all ranks, if any."""

    def __init__(self, worker: Worker, cache: EncoderCache) -> None:
        self._worker = worker
        self._cache = cache
        self._running: Encoding | None = None
        self._unsent = memoryview(b"")  # the rest of its frames
        self._recent = deque[float](maxlen=_RECENT)  # seconds of the last pieces

    def advance(self, following: Encoding | None, *, alone: bool) -> None:
        """Go on with the encode that runs, or start `following`. Sends a part of its frames or computes a piece, and
        further ones as long as the longest of the last pieces would end within BESIDE_S, or ALONE_S if `alone`."""
        end = time.perf_counter() + (ALONE_S if alone else BESIDE_S)
        if self._running is None:
            if following is None:
                return
            self._start(following)
        while self._running is not None:
            if self._unsent:
                self._prepare(Frames(self._next_part()))
            else:
                self._encode_piece()
            if time.perf_counter() + max([_PIECE_S, *self._recent]) > end:
                return

    def stop_if_unused(self) -> None:
        """Stop the encode that runs if no sequence needs it any more."""
        if self._running is not None and not self._running.users:
            self._end()
            self._prepare(StopEncode())

    def _start(self, encoding: Encoding) -> None:
        assert encoding.medium is not None
        medium = encoding.medium
        self._running, self._unsent = encoding, memoryview(medium.frames)
        first = Medium(medium.kind, self._next_part(), medium.size, medium.grid)
        operations = operations_of_piece(self._worker.dtype, self._worker.team.group.size)
        self._prepare(Encode(encoding.number, first, operations, list(self._cache.forgotten)))
        self._cache.forgotten.clear()

    def _end(self) -> None:
        self._running, self._unsent = None, memoryview(b"")

    def _next_part(self) -> bytes:
        part, self._unsent = self._unsent[:PART_BYTES], self._unsent[PART_BYTES:]
        return bytes(part)

    def _prepare(self, message: Encode | Frames | StopEncode) -> None:
        self._worker.announce(message)
        self._worker.prepare_encode(message)

    def _encode_piece(self) -> None:
        began = time.perf_counter()
        self._worker.announce(EncodePiece())
        complete = self._worker.encode_piece()
        self._recent.append(time.perf_counter() - began)
        if complete and self._running is not None:
            self._running.medium = None
            self._end()


def operations_of_piece(dtype: torch.dtype, ranks: int) -> float:
    """Return the operations of a piece of an encode, on all ranks together: so many that it takes about 20 ms."""
    rung = core.isa()
    if dtype is torch.float32 and rung in ("amx", "avx512_bf16"):
        rung = "avx512"
    return _OPERATIONS[rung] * core.num_threads() * ranks
