"""Calibration files: the mean squares of the inputs of each projection, by which quantising weighs errors.

A safetensors file with a vector [in] float32 for each projection, under the name of its module. `tilerank calibrate`
writes it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from tilerank.kernels.weight_formats import OutputScaledFormat
from tilerank.parallel.parameters import Rectangle, WeightParameter

from .checkpoint import map_file, some
from .errors import CheckpointError

log = logging.getLogger(__name__)

_KIND = {"format": "pt", "kind": "tilerank calibration"}
_LEAST = 0.01
"""The least importance of a column, of the mean: a text of a few hundred tokens does not show what others need."""


class Calibration:
    """A calibration file.

    Raises CheckpointError if `path` is none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known, self._unknown = set[str](), set[str]()
        self._means = _read(path)

    def importance(self, rectangle: Rectangle) -> Tensor | None:
        """Return by how much errors in the columns of a rectangle count, 1 in the mean of all columns of its tensor.

        None if the weight's format does not weigh errors, or if the file does not have the projection. Raises
        CheckpointError if the file has it with another width.
        """
        parameter = rectangle.parameter
        if not isinstance(parameter, WeightParameter) or not isinstance(parameter.format, OutputScaledFormat):
            return None
        module = rectangle.name.removesuffix(".weight")
        means = self._means.get(module)
        if means is None:
            self._unknown.add(module)
            return None
        self._known.add(module)
        if means.shape != rectangle.shape[1:]:
            raise CheckpointError(
                f"{self.path}: {module}: expected shape {list(rectangle.shape[1:])}, found {list(means.shape)}"
            )
        return (means / means.mean() + _LEAST)[rectangle.index[1]]

    def check_use(self, *, log_unknown: bool) -> None:
        """Raise CheckpointError if no rectangle asked for was in the file. log_unknown: log which were not."""
        if self._unknown and not self._known:
            raise CheckpointError(
                f"{self.path}: expected a file of this model, found none of its projections: {some(self._unknown)}"
            )
        if self._unknown and log_unknown:
            log.info("%s: not in the file, so that all columns count alike: %s", self.path, some(self._unknown))


def write_calibration(path: Path, means: Mapping[str, Tensor]) -> None:
    """Write the mean squares [in] of the inputs of each projection, by the name of its module."""
    path.write_bytes(save(dict(means), _KIND))


def _read(path: Path) -> dict[str, Tensor]:
    file = map_file(path)
    kind = (file.metadata() or {}).get("kind")
    if kind != _KIND["kind"]:
        raise CheckpointError(f"{path}: expected a file of `tilerank calibrate`, found one of kind {kind!r}")
    means = {name: file.get_tensor(name) for name in file.offset_keys()}
    for name, vector in means.items():
        valid = vector.dtype is torch.float32 and vector.isfinite().all() and (vector >= 0).all() and vector.any()
        if not valid:
            raise CheckpointError(f"{path}: {name}: expected mean squares in float32, finite and not all zero")
    return means
