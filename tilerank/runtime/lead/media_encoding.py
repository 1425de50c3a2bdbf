"""Rank 0 leads the encoding of media, the storing of sources and the reading of pages: one at a time, in pieces between
the steps of other sequences.
"""

import time
from collections import deque
from collections.abc import Iterator

import torch

from tilerank.kernels import core

from ..rank.worker import Worker
from .cache_kind import WorkInPieces

BESIDE_S = 0.05
"""Seconds that other sequences wait between two of their steps."""
ALONE_S = 0.25
"""Seconds until new requests are read, if no sequence can go on meanwhile."""
_PIECE_S = 0.025
"""Least expected seconds of a piece, since pieces of different layers differ."""
_RECENT = 16
"""Pieces of which the longest gives the expected time of the next one."""
_OPERATIONS = {"amx": 16e9, "avx512_bf16": 5e9, "avx512": 2e9, "avx2": 1e9, "reference": 0.5e9}
"""Operations that a thread computes in 10 to 25 ms on each rung."""


class MediaEncoding:
    """The work that runs on all ranks, if any."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._running: WorkInPieces | None = None
        self._pieces: Iterator[bool] = iter(())
        self._recent = deque[float](maxlen=_RECENT)  # seconds of the last pieces

    @property
    def busy(self) -> bool:
        return self._running is not None

    def advance(self, following: WorkInPieces | None, *, alone: bool) -> None:
        """Go on with what runs, or start `following`. Sends a part of the frames or computes a piece, and further ones
        as long as the longest of the last pieces would end within BESIDE_S, or ALONE_S if `alone`."""
        end = time.perf_counter() + (ALONE_S if alone else BESIDE_S)
        if self._running is None:
            if following is None:
                return
            operations = operations_of_piece(self._worker.dtype, self._worker.team.group.size)
            self._running, self._pieces = following, following.pieces(self._worker, operations)
            next(self._pieces)
        while self._running is not None:
            began = time.perf_counter()
            if next(self._pieces):
                self._recent.append(time.perf_counter() - began)
            if self._running.entry.ready:
                self._running = None
            if time.perf_counter() + max([_PIECE_S, *self._recent]) > end:
                return

    def stop_if_unused(self) -> None:
        """Stop what runs if no sequence needs it any more."""
        if self._running is not None and not self._running.entry.users:
            self._running.stop(self._worker)
            self._running = None


def operations_of_piece(dtype: torch.dtype, ranks: int) -> float:
    """Return the operations of a piece of an encode, on all ranks together: so many that it takes about 20 ms."""
    rung = core.rung_of("bf16")
    if dtype is torch.float32 and rung in ("amx", "avx512_bf16"):
        rung = "avx512"
    return _OPERATIONS[rung] * core.num_threads() * ranks
