"""NVFP4 as compressed-tensors and NVIDIA's Model Optimizer store it: codes [n, k / 2], two of E2M1 in a byte, the first
in the low bits; weight_scale [n, k / 16] in e4m3; and one number for the whole weight."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from tilerank.kernels.reference.weight_formats import E2M1
from tilerank.kernels.weight_formats.nvfp4 import GROUP, Nvfp4Weight
from tilerank.parallel.parameters import Rectangle, WeightParameter

from ..rectangle import Read, StoredRectangle
from .weight_encoding import WeightEncoding, module_of, repeated, unless_empty, whole, write_codes


class Nvfp4Encoding(WeightEncoding):
    """weight_packed and weight_global_scale, a divisor of the scales (compressed-tensors), or weight and
    weight_scale_2, a factor (Model Optimizer)."""

    def encoded(self, rectangle: Rectangle, parameter: WeightParameter) -> Iterator[Read]:
        row, groups = rectangle.row, -(-parameter.k // GROUP)
        codes, scales = partial(self._codes, rectangle), partial(self._scales, rectangle)
        yield Read((self._stored_codes(rectangle),), parameter, row, codes, write_codes, parameter.k)
        yield Read((self._stored_scales(rectangle),), parameter, row, scales, Nvfp4Weight.write_scales, groups)
        factors = partial(self._factors, rectangle)
        yield Read((self._stored_factor(rectangle),), parameter, row, factors, Nvfp4Weight.write_factors, 1)

    def floats(self, rectangle: Rectangle) -> Read:
        def dequantised(codes: Tensor, scales: Tensor, factor: Tensor) -> Tensor:
            found = self._scales(rectangle, scales).float()
            by_column = repeated(found, 1, rectangle.index[1], GROUP, 1)
            values = E2M1[self._codes(rectangle, codes).int()] * by_column
            return values * self._factors(rectangle, factor)

        stored = self._stored_codes(rectangle), self._stored_scales(rectangle), self._stored_factor(rectangle)
        return Read(stored, rectangle.parameter, rectangle.row, dequantised)

    def _stored_codes(self, rectangle: Rectangle) -> StoredRectangle:
        (n, k), (rows, columns) = rectangle.shape, rectangle.index
        name = self._first_of(rectangle, "weight_packed", "weight")
        if k % GROUP:
            raise self.refusal(name, f"inputs in groups of {GROUP}, found a weight of {k} inputs")
        return StoredRectangle(name, (n, k // 2), ("U8",), unless_empty(rectangle, rows, whole(columns, 2)))

    def _stored_scales(self, rectangle: Rectangle) -> StoredRectangle:
        (n, k), (rows, columns) = rectangle.shape, rectangle.index
        index = unless_empty(rectangle, rows, whole(columns, GROUP))
        return StoredRectangle(f"{module_of(rectangle)}.weight_scale", (n, k // GROUP), ("F8_E4M3",), index)

    def _stored_factor(self, rectangle: Rectangle) -> StoredRectangle:
        name = self._first_of(rectangle, "weight_global_scale", "weight_scale_2")
        found = self.checkpoint.tensors.get(name)
        shape = () if found is not None and found.shape == () else (1,)
        index = tuple(slice(0, 1) for _ in shape) if rectangle.elements else (slice(0, 0),)
        return StoredRectangle(name, shape, ("F32",), index)

    def _first_of(self, rectangle: Rectangle, usual: str, other: str) -> str:
        """Return the tensor of a module that ends with `other` if the checkpoint has it, else that with `usual`."""
        module = module_of(rectangle)
        return f"{module}.{other if f'{module}.{other}' in self.checkpoint.tensors else usual}"

    def _codes(self, rectangle: Rectangle, packed: Tensor) -> Tensor:
        """Return codes [rows, columns] uint8."""
        columns = rectangle.index[1]
        first = columns.start % 2
        codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1)
        return codes[:, first : first + columns.stop - columns.start].contiguous()

    def _scales(self, rectangle: Rectangle, scales: Tensor) -> Tensor:
        """Return the scales as they are, checked."""
        if (scales.view(torch.uint8) > 127).any():
            raise self.refusal(f"{module_of(rectangle)}.weight_scale", "scales from 0 on, found a negative one")
        return scales

    def _factors(self, rectangle: Rectangle, stored: Tensor) -> Tensor:
        """Return the factor of each row, [rows, 1] float32."""
        name = self._stored_factor(rectangle).name
        if not (stored > 0).all():
            raise self.refusal(name, f"a positive number, found {float(stored):g}")
        factor = 1 / stored if name.endswith("global_scale") else stored
        rows = rectangle.index[0]
        return factor.reshape(1, 1).expand(rows.stop - rows.start, 1)
