"""Fills a sharded model from a checkpoint: this rank's slices only, each packed and let go before the next is read."""

import logging
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from tilerank.kernels import core
from tilerank.kernels.errors import KernelError
from tilerank.parallel.layers import Layer

from .checkpoint import Checkpoint, some
from .errors import CheckpointError
from .quantization import QuantizationConfig
from .quantized import Encoding, encoding_of
from .read import Read

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadReport:
    """What loading took: tensors of the checkpoint that this rank has a part of, bytes of them read, seconds, and the
    process's peak resident bytes since it began."""

    tensors: int
    bytes_read: int
    seconds: float
    peak_rss: int


def load_weights(
    model: Layer,
    checkpoint: Checkpoint,
    *,
    ignore: Callable[[str], bool],
    progress: bool,
    quantization: QuantizationConfig | None = None,
) -> LoadReport:
    """Allocates `model` and fills it from `checkpoint`; nothing is allocated or read if the two do not agree.

    `ignore` says which tensors of the checkpoint the model leaves out on purpose. `progress` (one rank's) draws a bar
    if stderr is a terminal, else logs every tenth. `quantization`: how the checkpoint stores what the model holds in a
    quantised format; None: as floats, which are quantised here. Slices are packed on the kernel pool.

    Memory: beside the model itself, one piece of a tensor (parallel.layer.PIECE_ELEMENTS). Raises CheckpointError for a
    tensor that is missing, superfluous, or of the wrong shape or dtype.
    """
    started = time.monotonic()
    encoding = None if quantization is None else encoding_of(quantization, checkpoint)
    reads = _agreed(model, checkpoint, ignore, encoding)
    if progress and quantization is not None and quantization.act_order:
        log.warning(
            "%s: weights are held as floats, not in %s: columns that share a scale lie apart (desc_act)",
            checkpoint.model_dir,
            quantization,
        )
    model.allocate()
    total = sum(read.nbytes(checkpoint) for read in reads)
    meter = Progress(total, progress)
    try:
        for read in reads:
            views = [checkpoint.read(source.name, source.index) for source in read.sources]
            try:
                read.store(*views)
            except KernelError as failure:  # of numbers that a format does not hold; it knows no file
                name = read.sources[0].name
                raise CheckpointError(f"{checkpoint.info(name).file}: tensor {name}: {failure}") from failure
            for view in views:
                # All of the tensor: pages that the kernel mapped around the slice's edges go as well.
                core.drop_pages(torch.empty(0, dtype=torch.uint8).set_(view.untyped_storage()))
            meter.advance(read.nbytes(checkpoint))
    finally:
        meter.close()
    tensors = {source.name for read in reads for source in read.sources}
    report = LoadReport(len(tensors), total, time.monotonic() - started, peak_rss())
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


def _agreed(
    model: Layer, checkpoint: Checkpoint, ignore: Callable[[str], bool], encoding: Encoding | None
) -> list[Read]:
    """What this rank has to read, in storage order; checks that model and checkpoint agree."""
    reads = list(_reads(model, encoding))
    sources = [source for read in reads for source in read.sources]
    wanted = {source.name for source in sources}
    if missing := {source.name for source in sources if not source.optional} - checkpoint.tensors.keys():
        raise CheckpointError(f"{checkpoint.model_dir}: the model needs tensor {some(missing)}, found in no file")
    extra = {name for name in checkpoint.tensors if name not in wanted and not ignore(name)}
    if extra := {name for name in extra if encoding is None or not encoding.leaves_out(name)}:
        file = checkpoint.info(min(extra)).file
        raise CheckpointError(f"{file}: the model has no place for tensor {some(extra)}")
    for source in sources:
        if source.name in checkpoint.tensors:
            source.check(checkpoint)
    order = {name: position for position, name in enumerate(checkpoint.tensors)}

    def place(read: Read) -> tuple[int, list[int]]:
        first = read.sources[0]
        return order[first.name], [part.start for part in first.index]

    found = [read for read in reads if read.elements and all(source.name in order for source in read.sources)]
    return sorted(found, key=place)


def _reads(model: Layer, encoding: Encoding | None) -> Iterator[Read]:
    for piece in model.pieces():
        if encoding is None:
            yield Read.of(piece)
        else:
            yield from encoding.floats(piece) if piece.place is None else encoding.reads(piece)


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
