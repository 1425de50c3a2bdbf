"""The common part of formats with a scale for each output and group of inputs: int4, mxfp4, nvfp4, int8 in groups, fp8
by channel.

    value = (code - zero) * scale

Codes and zero points are numbers around 0. Scales and zero points are arrays [n / 32, groups, 32]
(csrc/block_scaled/block_scaled.h). The sum of a K-block is scaled at once; a K-block is a group, or some of the inputs
if they all share a scale.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from ..contract import Contract
from ..errors import KernelError
from ..weight import BLOCK_N, Layout, Operands, chosen_blocks
from . import block_scaled
from .block_scaled import TILE_K
from .checks import check_rectangle, check_sizes, packable

SCALE_UNIT = 1 / 256
"""The unit of scales in float16, which represents the float16 and bfloat16 scales of checkpoints exactly."""

_LARGEST_SCALE = 65504 * SCALE_UNIT
_K_BLOCK = 128
"""Inputs of a K-block where all inputs share a scale."""


def output_scaled_layout(format: str, tile_bytes: int, scale: str) -> Layout:
    """Return the layout of a format. tile_bytes: of the codes of a tile; scale: "f16", "f32" or "u8" (exponents)."""
    arrays = f"values[_, _, _, 2, {tile_bytes}]:u8 scales[_, _, {BLOCK_N}]:{scale} zeros[_, _, {BLOCK_N}]?:i8"
    return Layout(format, "OutputScaledWeight", arrays)


@dataclass(frozen=True)
class OutputScaledFormat(ABC):
    """One scale per output and `group` inputs, or per output alone (0); optionally zero points."""

    group: int
    zero_points: bool = False

    layout: ClassVar[Layout]
    scale_dtype: ClassVar[torch.dtype] = torch.float16
    tile_inputs: ClassVar[int] = TILE_K
    """Groups are multiples of this."""

    activations = torch.bfloat16
    operands: ClassVar[Operands] = "bf16"
    is_quantised = True

    @abstractmethod
    def values(self, n: int, k: int) -> tuple[tuple[int, ...], torch.dtype]:
        """Return the shape and dtype of the packed codes of a weight[n, k]."""

    @abstractmethod
    def empty(self, n: int, k: int) -> OutputScaledWeight: ...

    def scale_values(self, stored: Tensor) -> Tensor:
        """Return what stored scales stand for, as float32."""
        return stored.float() * SCALE_UNIT if self.scale_dtype is torch.float16 else stored.float()

    @property
    def k_block(self) -> int:
        return self.group or _K_BLOCK

    @property
    def k_unit(self) -> int:
        return self.k_block

    def nbytes(self, n: int, k: int) -> int:
        return block_scaled.nbytes(self.arrays(n, k))

    def arrays(self, n: int, k: int) -> block_scaled.Arrays:
        """Return the shapes and dtypes of values, scales and zero points."""
        name = type(self).__name__
        check_sizes(name, n, k)
        block_scaled.check_unit(name, "group", self.k_block, self.tile_inputs)
        by_group = block_scaled.blocks(n), -(-k // self.group) if self.group else 1, BLOCK_N
        zeros = [(by_group, torch.int8)] if self.zero_points else []
        return [self.values(n, k), (by_group, self.scale_dtype), *zeros]


@dataclass(frozen=True)
class OutputScaledWeight(block_scaled.BlockScaledWeight):
    """A weight[n, k] of codes, scales and zero points, in the layout of csrc/block_scaled/block_scaled.h.

    Where kernels run in plain torch, `values` are [n, k].
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor | None
    n: int
    k: int
    format: OutputScaledFormat

    middle: ClassVar[int] = 0
    """The stored code of the number 0."""

    quantise_kernel: ClassVar[Contract | None] = None
    """Does what `quantise` does for scales of groups, on all threads; None: there is no such kernel."""

    @abstractmethod
    def quantise(self, rows: Tensor, importance: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Quantise rows[r, c] float32 in plain torch: codes as `write_codes` takes them, scales and zero points
        [r, groups]. importance: as in `write`."""

    @abstractmethod
    def write_codes(self, codes: Tensor, row: int = 0, col: int = 0) -> None:
        """Pack codes[r, c] into weight[row : row + r, col : col + c]."""

    @abstractmethod
    def codes(self) -> Tensor:
        """Return the codes as numbers around 0, [n, k]."""

    def write(self, rows: Tensor, row: int = 0, col: int = 0, importance: Tensor | None = None) -> None:
        """Quantise rows[r, c] into weight[row : row + r, col : col + c]; col must start a group.

        rows: any floating-point dtype and strides. A group with an infinity or NaN becomes NaN. importance[c] float32:
        by how much the squared errors of each column count, in formats that search for the best scales. Without it,
        those of fp8 count alike, and those of int4 by the magnitude of the weight.
        """
        group, where = self.format.group, f"{type(self).__name__}.write: rows"
        rows = packable(where, rows)
        check_rectangle(where, rows, (self.n, self.k), (row, col), (1, group or self.k))
        if importance is not None and importance.shape != rows.shape[1:]:
            raise KernelError(
                f"{type(self).__name__}.write: importance: expected [{rows.shape[1]}], found {list(importance.shape)}"
            )
        if self.quantise_kernel is not None and group and not self.is_plain:
            self.quantise_kernel.run(self, rows, row, col, importance)
            return
        codes, scales, zeros = self.quantise(rows.float(), importance)
        self.write_codes(codes[:, : self.k - col], row, col)
        first = col // group if group else 0
        self.write_scales(scales, row, first)
        if zeros is not None:
            self.write_zeros(zeros, row, first)

    def write_scales(self, scales: Tensor, row: int = 0, group: int = 0) -> None:
        """Write scales[r, groups], floats or exponents, from row `row` and group `group` on; in float16 of magnitude up
        to 255."""
        self._check_groups("write_scales: scales", scales, row, group)
        if self.format.scale_dtype is torch.float16:
            most = scales.abs().amax().item() if scales.numel() else 0
            if most > _LARGEST_SCALE:
                where = f"{type(self).__name__}.write_scales: scales"
                raise KernelError(f"{where}: expected magnitudes up to {_LARGEST_SCALE}, found {most}")
            scales = scales.float() / SCALE_UNIT
        self._put(self.scales, scales.to(self.format.scale_dtype), row, group)

    def write_zeros(self, zeros: Tensor, row: int = 0, group: int = 0) -> None:
        """Write the codes that stand for 0, zeros[r, groups] uint8, from row `row` and group `group` on."""
        name = type(self).__name__
        if self.zeros is None or zeros.dtype is not torch.uint8:
            raise KernelError(
                f"{name}.write_zeros: zeros: expected uint8 for a weight with zero points, found {zeros.dtype} for "
                f"one with{'out' if self.zeros is None else ''}"
            )
        self._check_groups("write_zeros: zeros", zeros, row, group)
        self._put(self.zeros, (zeros.to(torch.int16) - self.middle).to(torch.int8), row, group)

    def _check_groups(self, name: str, values: Tensor, row: int, group: int) -> None:
        check_rectangle(f"{type(self).__name__}.{name}", values, (self.n, self.scales.shape[1]), (row, group))

    @staticmethod
    def _put(array: Tensor, values: Tensor, row: int, group: int) -> None:
        """Write values[rows, groups] into array[blocks, groups, 32]."""
        rows = torch.arange(row, row + values.shape[0])
        array[rows // BLOCK_N, group : group + values.shape[1], rows % BLOCK_N] = values

    def part(self, row: int, n: int, step: int = 1) -> Self:
        chosen = chosen_blocks(row, n, step)
        values = self.values[row : row + n] if self.is_plain else self.values[chosen]
        zeros = None if self.zeros is None else self.zeros[chosen]
        return replace(self, values=values, scales=self.scales[chosen], zeros=zeros, n=n)

    def unpack(self) -> Tensor:
        """Return the quantised weight[n, k] as float32."""
        values = self.codes().float()
        scales = self._by_input(self.format.scale_values(self.scales))
        return values * scales if self.zeros is None else (values - self._by_input(self.zeros)) * scales

    def _by_input(self, array: Tensor) -> Tensor:
        """Expand array[blocks, groups, 32] to [n, k]."""
        return self._by_group(array).repeat_interleave(self.format.group or self.k, 1)[:, : self.k]

    def _by_group(self, array: Tensor) -> Tensor:
        """Return array[blocks, groups, 32] as [n, groups]."""
        return array.transpose(1, 2).flatten(0, 1)[: self.n]

    def embedding(self, ids: Tensor, first_row: int = 0) -> Tensor:
        raise KernelError(
            f"{type(self).__name__}.embedding: expected a bfloat16, float32 or int8 embedding table, "
            f"found {type(self.format).__name__}"
        )


def quantise_rows(rows: Tensor, group: int, most: int, unit: float) -> tuple[Tensor, Tensor]:
    """Return rows[r, c] / scale, from -most to most, and scales [r, groups], which are float16 multiples of `unit` if
    it is not 0. The scale of a group maps its largest magnitude to `most`; a group with an infinity or NaN becomes
    zeros with a scale of NaN."""
    r, c = rows.shape
    size = group or c
    padded = torch.nn.functional.pad(rows, (0, -c % size)).view(r, -1, size)
    largest = padded.abs().amax(-1)
    finite = largest.isfinite()
    scales = torch.where(finite, largest / most, 0.0)
    if unit:
        scales = (scales / unit).to(torch.float16).float() * unit
    steps = torch.where(finite[..., None] & (scales[..., None] > 0), padded / scales[..., None], 0.0)
    return steps.clamp(-most, most).flatten(1)[:, :c], torch.where(finite, scales, torch.nan)
