"""Fills a sharded model from a checkpoint: this rank's slices only, each packed and let go before the next is read."""

import logging
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from tilerank.kernels import core
from tilerank.parallel.layers import Layer, Piece

from .checkpoint import Checkpoint, TensorInfo, some
from .errors import CheckpointError

log = logging.getLogger(__name__)

# The dtypes that a weight may be stored in; anything else is a quantised checkpoint or no weight.
FLOAT_SIZES = {"BF16": 2, "F16": 2, "F32": 4}

Placed = tuple[Piece, TensorInfo]


@dataclass(frozen=True)
class LoadReport:
    """What loading took: tensors of the checkpoint that this rank has a part of, bytes of them read, seconds, and the
    process's peak resident bytes since it began."""

    tensors: int
    bytes_read: int
    seconds: float
    peak_rss: int


def load_weights(model: Layer, checkpoint: Checkpoint, *, ignore: Callable[[str], bool], progress: bool) -> LoadReport:
    """Allocates `model` and fills it from `checkpoint`; nothing is allocated or read if the two do not agree.

    `ignore` says which tensors of the checkpoint the model leaves out on purpose. `progress` (one rank's) draws a bar
    if stderr is a terminal, else logs every tenth. Slices are packed on the kernel pool.

    Memory: beside the model itself, one piece of a tensor (parallel.layer.PIECE_ELEMENTS). Raises CheckpointError for a
    tensor that is missing, superfluous, or of the wrong shape or dtype.
    """
    started = time.monotonic()
    placed = _place(model, checkpoint, ignore)
    model.allocate()
    total = sum(_nbytes(*item) for item in placed)
    meter = Progress(total, progress)
    try:
        for piece, info in placed:
            view = checkpoint.read(piece.name, piece.index)
            piece.store(view)
            # All of the tensor: pages that the kernel mapped around the slice's edges go as well.
            core.drop_pages(torch.empty(0, dtype=torch.uint8).set_(view.untyped_storage()))
            meter.advance(_nbytes(piece, info))
    finally:
        meter.close()
    report = LoadReport(len({piece.name for piece, _ in placed}), total, time.monotonic() - started, peak_rss())
    log.debug(
        "loaded %d tensors, %.3f GB in %.1f s; peak resident memory %.3f GB",
        report.tensors,
        report.bytes_read / 1e9,
        report.seconds,
        report.peak_rss / 1e9,
    )
    return report


def peak_rss() -> int:
    """The most bytes that this process has had resident (getrusage would count what it was forked from)."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def _place(model: Layer, checkpoint: Checkpoint, ignore: Callable[[str], bool]) -> list[Placed]:
    """This rank's pieces with the tensors they come from, in storage order; checks that model and checkpoint agree."""
    pieces = list(model.pieces())
    wanted = {piece.name for piece in pieces}
    if missing := {piece.name for piece in pieces if not piece.optional} - checkpoint.tensors.keys():
        raise CheckpointError(f"{checkpoint.model_dir}: the model needs tensor {some(missing)}, found in no file")
    if extra := {name for name in checkpoint.tensors if name not in wanted and not ignore(name)}:
        file = checkpoint.info(min(extra)).file
        raise CheckpointError(f"{file}: the model has no place for tensor {some(extra)}")
    placed = [(piece, checkpoint.info(piece.name)) for piece in pieces if piece.name in checkpoint.tensors]
    for piece, info in placed:
        _check(piece, info)
    order = {name: position for position, name in enumerate(checkpoint.tensors)}
    placed = [(piece, info) for piece, info in placed if piece.elements]
    return sorted(placed, key=lambda item: (order[item[0].name], [part.start for part in item[0].index]))


def _check(piece: Piece, info: TensorInfo) -> None:
    if info.shape != piece.shape:
        raise CheckpointError(
            f"{info.file}: tensor {piece.name}: expected shape {list(piece.shape)}, found {list(info.shape)}"
        )
    if info.dtype not in FLOAT_SIZES:
        raise CheckpointError(
            f"{info.file}: tensor {piece.name}: expected one of {', '.join(FLOAT_SIZES)}, found {info.dtype}"
        )


def _nbytes(piece: Piece, info: TensorInfo) -> int:
    return piece.elements * FLOAT_SIZES[info.dtype]


class Progress:
    """How much of `total` bytes is loaded: a bar if stderr is a terminal, else a debug line for every tenth."""

    WIDTH = 30
    SECONDS_BETWEEN_FRAMES = 0.1

    def __init__(self, total: int, shown: bool) -> None:
        self._total = max(total, 1)
        self._done = 0
        self._started = time.monotonic()
        self._frame = self._started
        self._bar = shown and sys.stderr.isatty()
        self._lines = shown and not self._bar

    def advance(self, nbytes: int) -> None:
        before, self._done = self._done, self._done + nbytes
        now = time.monotonic()
        if self._bar and (self._done == self._total or now - self._frame > self.SECONDS_BETWEEN_FRAMES):
            self._frame = now
            sys.stderr.write("\r" + self._text(now))
            sys.stderr.flush()
        elif self._lines and before * 10 // self._total != self._done * 10 // self._total:
            log.debug("%s", self._text(now))

    def close(self) -> None:
        if self._bar:
            sys.stderr.write("\n")
            sys.stderr.flush()

    def _text(self, now: float) -> str:
        share = self._done / self._total
        filled = int(share * self.WIDTH)
        rate = self._done / 1e9 / max(now - self._started, 1e-9)
        bar = "#" * filled + "." * (self.WIDTH - filled)
        return f"loading [{bar}] {share:4.0%} {self._done / 1e9:.2f}/{self._total / 1e9:.2f} GB {rate:.2f} GB/s"
