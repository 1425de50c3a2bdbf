"""Fills a sharded model from a checkpoint: only this rank's part, one block at a time."""

import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from tilerank.kernels import core
from tilerank.kernels.errors import KernelError
from tilerank.parallel.parameters import Layer, Parameter

from .calibration import Calibration
from .checkpoint import Checkpoint, some
from .encodings.gguf_encoding import GGUFReads
from .errors import CheckpointError
from .packed_weights import NO_FILES, PackedWeights, WeightFiles, digest_of
from .progress_bar import ProgressBar
from .quantization_config import QuantizationConfig
from .quantized_checkpoint import CACHE_SCALES, QuantizedCheckpoint
from .rectangle import FLOATS, INTEGERS, Read, place_of, read_plain

log = logging.getLogger(__name__)

Quantized = GGUFReads | QuantizedCheckpoint
"""What reads weights that are not plain floats of safetensors files."""


@dataclass(frozen=True)
class LoadReport:
    """The time and the bytes of loading.

    tensors: number of checkpoint tensors of which this rank has read a part, none if the weights were packed before.
    bytes_read: of these. peak_rss: the process's peak resident bytes since it started.
    """

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
    calibration: Calibration | None = None,
    files: WeightFiles = NO_FILES,
) -> LoadReport:
    """Allocate `model` and fill it from `checkpoint`, or from `files` if they have its packed weights.

    ignore: returns whether the model leaves out a tensor of the checkpoint on purpose. progress (True on one rank):
    show a bar if stderr is a terminal, else log a line now and then. quantization: how the checkpoint stores the
    weights that the model holds in a quantised format; None: as floats, which are quantised here, by `calibration` if
    there is one. files: those that lack the packed weights get them. Blocks are packed on the kernel pool; beside the
    model itself, one block of a tensor (parallel.parameters.BLOCK_ELEMENTS) is in memory.

    Raises CheckpointError for a tensor that is missing, superfluous, or of the wrong shape or dtype, before anything is
    allocated or read, and for one that holds NaN, infinity or what its format cannot represent.
    """
    started = time.monotonic()
    packed = PackedWeights(model, files, partial(digest_of, model, checkpoint, calibration), verbose=progress)
    reads: list[Read] = []
    if not packed.restore():
        reads = _reads_of(model, checkpoint, ignore, quantization, calibration, verbose=progress)
        packed.allocate()
        _fill(model, checkpoint, reads, progress)
        packed.keep()
    tensors = {stored.name for read in reads for stored in read.stored}
    total = sum(read.nbytes(checkpoint) for read in reads)
    report = LoadReport(len(tensors), total, time.monotonic() - started, peak_rss())
    log.debug(
        "loaded %d tensors, %.3f GB in %.1f s; peak resident memory %.3f GB",
        report.tensors,
        report.bytes_read / 1e9,
        report.seconds,
        report.peak_rss / 1e9,
    )
    return report


def _reads_of(
    model: Layer,
    checkpoint: Checkpoint,
    ignore: Callable[[str], bool],
    quantization: QuantizationConfig | None,
    calibration: Calibration | None,
    *,
    verbose: bool,
) -> list[Read]:
    """Return what this rank has to read, in storage order. verbose: log what a user may not expect of the files."""
    quantized: Quantized | None = None
    if checkpoint.gguf:
        quantized = GGUFReads(checkpoint)
    elif quantization is not None:
        quantized = QuantizedCheckpoint(quantization, checkpoint)
    reads = _agreed(model, checkpoint, ignore, quantized, calibration)
    if calibration is not None:
        calibration.check_use(log_unknown=verbose)
    if verbose and quantization is not None:
        _log_formats(checkpoint, quantization, reads)
    if verbose:
        _log_zeros(checkpoint, model)
    return reads


def _fill(model: Layer, checkpoint: Checkpoint, reads: Sequence[Read], progress: bool) -> None:
    """Read and pack the weights of an allocated model."""
    for layer in model.walk():
        if isinstance(layer, Parameter):
            layer.preset()
    bar = ProgressBar(sum(read.nbytes(checkpoint) for read in reads), progress)
    try:
        for read in reads:
            views = [checkpoint.read(stored.name, stored.index) for stored in read.stored]
            try:
                read.write(views)
            except KernelError as failure:  # numbers that a format does not hold
                name = read.stored[0].name
                raise CheckpointError(f"{checkpoint.info(name).file}: tensor {name}: {failure}") from failure
            for stored, view in zip(read.stored, views, strict=True):
                # After the write, when the pages are mapped and the numbers are still in the cache.
                if not read.parameter.may_be_infinite:
                    stored.check_finite(checkpoint, view)
                # The whole tensor, because the kernel may have mapped pages around the slice's edges.
                core.drop_pages(torch.empty(0, dtype=torch.uint8).set_(view.untyped_storage()))
            bar.advance(read.nbytes(checkpoint))
    finally:
        bar.close()


def _log_formats(checkpoint: Checkpoint, quantization: QuantizationConfig, reads: list[Read]) -> None:
    """Log what differs from the settings of the checkpoint, which codes become floats, and what is not used."""
    where, scheme = checkpoint.model_dir, quantization.scheme
    if scheme.act_order:
        log.warning(
            "%s: weights are held as floats, not in %s: columns that share a scale lie apart (desc_act)", where, scheme
        )
        return
    if quantization.overrides is not None:
        log.info(
            "%s: quantised weights are %s by their tensors; config.json says %s", where, scheme, quantization.overrides
        )
    plain = {*FLOATS, *INTEGERS}
    dequantised = {r.stored[0].name for r in reads if r.part is None and plain.isdisjoint(r.stored[0].dtypes)}
    if dequantised:
        log.info("%s: held as floats, though quantised: %s", where, some(dequantised))
    scales = {name for name in checkpoint.tensors if name.rpartition(".")[2] in CACHE_SCALES}
    if scales or quantization.cache is not None:
        log.info(
            "%s: the cache is not quantised as the checkpoint announces (%s); its scales are not used",
            where,
            some(scales) if scales else quantization.cache,
        )


def _log_zeros(checkpoint: Checkpoint, model: Layer) -> None:
    """Log which tensors, such as biases that config.json announces, are in no file and so are zeros."""
    tensors = checkpoint.tensors
    zeros = {each.name for each in model.rectangles() if each.optional and each.name not in tensors}
    if zeros:
        log.info("%s: in no file, and taken as zeros: %s", checkpoint.model_dir, some(zeros))


def peak_rss() -> int:
    """Return the process's peak resident bytes; getrusage would include those of the process it was forked from."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def _agreed(
    model: Layer,
    checkpoint: Checkpoint,
    ignore: Callable[[str], bool],
    quantized: Quantized | None,
    calibration: Calibration | None,
) -> list[Read]:
    """Return what this rank has to read, in storage order, once model and checkpoint are known to agree."""
    reads = list(_reads(model, checkpoint, quantized, calibration))
    parts = [stored for read in reads for stored in read.stored]
    needed = {stored.name for stored in parts}
    if missing := {stored.name for stored in parts if not stored.optional} - checkpoint.tensors.keys():
        raise CheckpointError(f"{checkpoint.model_dir}: the model needs tensor {some(missing)}, found in no file")
    extra = {name for name in checkpoint.tensors if name not in needed and not ignore(name)}
    extra = {name for name in extra if quantized is None or not quantized.leaves_out(name)}
    if extra := {name for name in extra if not _is_zero_bias(name, checkpoint)}:
        file = checkpoint.info(min(extra)).file
        raise CheckpointError(f"{file}: the model has no place for tensor {some(extra)}")
    for stored in parts:
        if stored.name in checkpoint.tensors:
            stored.check(checkpoint)
    order = {name: position for position, name in enumerate(checkpoint.tensors)}

    def place(read: Read) -> tuple[int, list[int]]:
        first = read.stored[0]
        return order[first.name], [part.start for part in first.index]

    found = [read for read in reads if read.elements and all(stored.name in order for stored in read.stored)]
    return sorted(found, key=place)


def _is_zero_bias(name: str, checkpoint: Checkpoint) -> bool:
    """Some writers of GPTQ files add a bias of zeros to every module, and so do some conversions between families."""
    if not name.endswith(".bias"):
        return False
    return not checkpoint.read(name, tuple(slice(0, size) for size in checkpoint.info(name).shape)).any()


def _reads(
    model: Layer, checkpoint: Checkpoint, quantized: Quantized | None, calibration: Calibration | None
) -> Iterator[Read]:
    for rectangle in model.rectangles():
        if quantized is None:
            reads = iter([read_plain(rectangle, place_of(rectangle, checkpoint))])
        else:
            reads = quantized.reads(rectangle)
        for read in reads:
            importance = None if calibration is None or read.part is not None else calibration.importance(rectangle)
            yield read if importance is None else replace(read, importance=importance)
