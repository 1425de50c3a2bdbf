"""Rank 0 leads the encoding of media: one medium at a time, in pieces between the steps of other sequences.

The keys and values of sources for cross-attention are computed in the same way.
"""

import time
from collections import deque
from collections.abc import Iterator
from itertools import accumulate

import torch

from tilerank.kernels import core
from tilerank.kernels.kv_pages import PAGE_TOKENS

from ..protocol.prompt import Medium
from ..protocol.rank_messages import Encode, EncodePiece, Frames, StopEncode, StoreSource
from ..rank.worker import Worker
from .encodings import EncoderCache, Encoding
from .source_pool import Source, Unstored

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
    """The encode that runs on all ranks, or the source that they store, if any."""

    def __init__(self, worker: Worker, cache: EncoderCache) -> None:
        self._worker = worker
        self._cache = cache
        self._running: Encoding | Source | None = None
        self._unsent = memoryview(b"")  # the rest of its frames
        self._unstored = deque[StoreSource]()  # the rest of its pieces
        self._recent = deque[float](maxlen=_RECENT)  # seconds of the last pieces

    def advance(self, following: Encoding | Unstored | None, *, alone: bool) -> None:
        """Go on with what runs, or start `following`. Sends a part of the frames or computes a piece, and further ones
        as long as the longest of the last pieces would end within BESIDE_S, or ALONE_S if `alone`."""
        end = time.perf_counter() + (ALONE_S if alone else BESIDE_S)
        if self._running is None:
            if following is None:
                return
            self._start(following)
        while self._running is not None:
            if self._unsent:
                self._prepare(Frames(self._next_part()))
            elif isinstance(self._running, Source):
                self._store_piece(self._running)
            else:
                self._encode_piece(self._running)
            if time.perf_counter() + max([_PIECE_S, *self._recent]) > end:
                return

    def stop_if_unused(self) -> None:
        """Stop what runs if no sequence needs it any more."""
        running = self._running
        if running is not None and not running.users:
            self._end()
            if isinstance(running, Encoding):
                self._prepare(StopEncode())

    def _start(self, following: Encoding | Unstored) -> None:
        operations = operations_of_piece(self._worker.dtype, self._worker.team.group.size)
        if isinstance(following, Unstored):
            self._running = following.source
            tokens = operations / max(self._worker.source_operations(following.message.parts[0][0]), 1)
            self._unstored += pieces_of_source(following.message, max(int(tokens) // PAGE_TOKENS, 1))
            return
        encoding, medium = following, following.medium
        assert medium is not None
        self._running, self._unsent = encoding, memoryview(medium.frames)
        first = Medium(medium.kind, self._next_part(), medium.size, medium.grid)
        self._prepare(Encode(encoding.number, first, operations, list(self._cache.forgotten)))
        self._cache.forgotten.clear()

    def _end(self) -> None:
        self._running, self._unsent = None, memoryview(b"")
        self._unstored.clear()

    def _next_part(self) -> bytes:
        part, self._unsent = self._unsent[:PART_BYTES], self._unsent[PART_BYTES:]
        return bytes(part)

    def _prepare(self, message: Encode | Frames | StopEncode) -> None:
        self._worker.announce(message)
        self._worker.prepare_encode(message)

    def _store_piece(self, source: Source) -> None:
        began = time.perf_counter()
        piece = self._unstored.popleft()
        self._worker.announce(piece)
        self._worker.store_source(piece)
        self._recent.append(time.perf_counter() - began)
        if not self._unstored:
            source.stored = True
            self._end()

    def _encode_piece(self, encoding: Encoding) -> None:
        began = time.perf_counter()
        self._worker.announce(EncodePiece())
        complete = self._worker.encode_piece()
        self._recent.append(time.perf_counter() - began)
        if complete:
            encoding.medium = None
            self._end()


def pieces_of_source(whole: StoreSource, pages: int) -> Iterator[StoreSource]:
    """Cut a source into pieces of so many pages each; the last may be smaller."""
    total = sum(count for _, _, count in whole.parts)
    ends = list(accumulate((count for _, _, count in whole.parts), initial=0))
    for start in range(0, total, pages * PAGE_TOKENS):
        stop = min(start + pages * PAGE_TOKENS, total)
        parts = [
            (number, first + max(start - begin, 0), min(stop, begin + count) - max(start, begin))
            for (number, first, count), begin in zip(whole.parts, ends, strict=False)
            if start < begin + count and begin < stop
        ]
        first_page = start // PAGE_TOKENS
        positions = [axis[start:stop] for axis in whole.positions]
        yield StoreSource(whole.pages[first_page : first_page + pages], parts, positions)


def operations_of_piece(dtype: torch.dtype, ranks: int) -> float:
    """Return the operations of a piece of an encode, on all ranks together: so many that it takes about 20 ms."""
    rung = core.isa()
    if dtype is torch.float32 and rung in ("amx", "avx512_bf16"):
        rung = "avx512"
    return _OPERATIONS[rung] * core.num_threads() * ranks
