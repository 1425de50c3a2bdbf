"""Weights whose codes of 4 or 8 bits are packed into int32: AWQ, GPTQ, and compressed-tensors' pack-quantized.

The dequantised weight is weight[o, i] = (code[o, i] - zero[g, o]) * scale[g, o], with g = i // group, or the group that
g_idx gives for i.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from tilerank.kernels.weight_formats import OutputScaledFormat
from tilerank.kernels.weight_formats.output_scaled import OutputScaledWeight
from tilerank.parallel.parameters import Rectangle, WeightParameter

from ..rectangle import FLOATS, Read, StoredRectangle
from .weight_encoding import WeightEncoding, module_of, repeated, unless_empty, whole, write_codes

_ONES = {4: 0x11111111, 8: 0x01010101}
"""Words in which every code is 1, by the bits of a code."""


class PackedEncoding(WeightEncoding):
    """Codes, scales and zero points, each read by a method of a subclass; all are returned in the order of a weight."""

    @property
    def per_word(self) -> int:
        """Codes in an int32."""
        return 32 // self.scheme.bits

    def encoded(self, rectangle: Rectangle, parameter: WeightParameter) -> Iterator[Read]:
        held, row = parameter.format, rectangle.row
        assert isinstance(held, OutputScaledFormat)
        self.check_sizes(rectangle)
        codes = partial(self.codes, rectangle)
        yield Read(self.stored_codes(rectangle), parameter, row, codes, write_codes, parameter.k)
        groups = -(-parameter.k // held.group) if held.group else 1
        zeros = self.stored_zeros(rectangle)
        if held.zero_points:
            assert zeros is not None
            held_zeros = partial(self._held_zeros, rectangle, held.group)
            yield Read((zeros,), parameter, row, held_zeros, OutputScaledWeight.write_zeros, groups)
            zeros = None
        stored = self.stored_scales(rectangle)
        of_scales = (stored,) if zeros is None else (stored, zeros)
        scales = partial(self._held_scales, rectangle, held.group)
        yield Read(of_scales, parameter, row, scales, OutputScaledWeight.write_scales, groups)

    def floats(self, rectangle: Rectangle) -> Read:
        self.check_sizes(rectangle)
        k, rows = rectangle.shape[1], rectangle.index[0]
        order: StoredRectangle | None = self.stored_order(rectangle)
        if not self.scheme.act_order and order is not None and order.name not in self.checkpoint.tensors:
            order = None
        # Columns of a rank have parts of all groups if groups are permuted.
        of_scales = rectangle
        if order is not None:
            of_scales = Rectangle(rectangle.name, rectangle.shape, (rows, slice(0, k)), rectangle.parameter)
        zeros = self.stored_zeros(of_scales)
        stored = [self.stored_codes(rectangle)[0], self.stored_scales(of_scales)]
        stored += [part for part in (zeros, order) if part is not None]

        def dequantised(packed: Tensor, scales: Tensor, *rest: Tensor) -> Tensor:
            by_group, parts = self.scales(scales).float(), list(rest)
            zero = self.zeros(of_scales, parts.pop(0)).float() if zeros is not None else None
            groups = self._checked_groups(order.name, parts.pop(0), by_group.shape[1]) if order is not None else None

            def by_column(values: Tensor) -> Tensor:
                return self._regrouped(values, rectangle, 1) if groups is None else values[:, groups]

            middle = 1 << self.scheme.bits - 1
            codes = self.codes(rectangle, packed).float() - (middle if zero is None else by_column(zero))
            return codes * by_column(by_group)

        return Read(tuple(stored), rectangle.parameter, rectangle.row, dequantised)

    @abstractmethod
    def stored_codes(self, rectangle: Rectangle) -> tuple[StoredRectangle, ...]:
        """Return the tensors that `codes` takes."""

    @abstractmethod
    def codes(self, rectangle: Rectangle, packed: Tensor, groups: Tensor | None = None) -> Tensor:
        """Return codes [rows, columns] uint8 of the rectangle."""

    @abstractmethod
    def stored_scales(self, rectangle: Rectangle) -> StoredRectangle:
        """Return the tensor that `scales` takes."""

    @abstractmethod
    def scales(self, stored: Tensor) -> Tensor:
        """Return scales [rows, stored groups]."""

    @abstractmethod
    def stored_zeros(self, rectangle: Rectangle) -> StoredRectangle | None:
        """Return the tensor that `zeros` takes; None if there are no zero points."""

    @abstractmethod
    def zeros(self, rectangle: Rectangle, packed: Tensor) -> Tensor:
        """Return zero points [rows, stored groups] uint8."""

    @abstractmethod
    def stored_order(self, rectangle: Rectangle) -> StoredRectangle:
        """Return the tensor of the group of every column."""

    def check_sizes(self, rectangle: Rectangle) -> None:
        """Raise CheckpointError for a weight whose codes do not fill words."""

    def group(self, k: int) -> int:
        """Return how many of `k` columns share a scale."""
        return self.scheme.group or k

    def groups(self, rectangle: Rectangle) -> tuple[int, slice]:
        """Return the number of groups, and those of the rectangle."""
        k = rectangle.shape[1]
        return -(-k // self.group(k)), whole(rectangle.index[1], self.group(k))

    def _held_zeros(self, rectangle: Rectangle, group: int, packed: Tensor) -> Tensor:
        return self._regrouped(self.zeros(rectangle, packed), rectangle, group)

    def _held_scales(self, rectangle: Rectangle, group: int, scales: Tensor, packed: Tensor | None = None) -> Tensor:
        """packed: the zero points of a symmetric quantisation, which are checked."""
        if packed is not None:
            self.zeros(rectangle, packed)
        return self._regrouped(self.scales(scales), rectangle, group)

    def _regrouped(self, by_group: Tensor, rectangle: Rectangle, group: int) -> Tensor:
        """Return values [rows, groups of `group` columns] of those of stored groups; 0: one for all columns."""
        stored = self.scheme.group
        return repeated(by_group, 1, rectangle.index[1], stored, group).contiguous()

    def _checked_groups(self, name: str, groups: Tensor, count: int) -> Tensor:
        if not ((groups >= 0) & (groups < count)).all():
            raise self.refusal(name, f"groups from 0 to {count - 1}, found others")
        return groups.long()

    def trim(self, part: slice) -> slice:
        """Return where `part` lies within the elements of its whole words."""
        first = part.start % self.per_word
        return slice(first, first + part.stop - part.start)

    def unpacked(self, packed: Tensor, order: tuple[int, ...] | None = None) -> Tensor:
        """Unpack int32 [r, c] to codes uint8 [per_word * c, r].

        order: for each code of an int32, from the lowest bits, which of them it is (default: in order).
        """
        rows, columns = packed.shape
        words = packed.T.contiguous().flatten()
        of_bytes = words.view(torch.uint8).view(columns, rows, 4)  # little-endian: lowest first
        if self.scheme.bits == 8:
            return of_bytes.permute(0, 2, 1).reshape(columns * 4, rows)
        order = order or tuple(range(8))
        codes = torch.empty(columns, 8, rows, dtype=torch.uint8)
        for byte in range(4):
            codes[:, order[2 * byte]] = of_bytes[..., byte] & 15
            codes[:, order[2 * byte + 1]] = of_bytes[..., byte] >> 4
        return codes.view(columns * 8, rows)


class _Transposed(PackedEncoding):
    """Tensors of inputs by outputs: qzeros [groups, n / per_word], packed along the outputs, and scales [groups, n]."""

    order: tuple[int, ...] | None = None

    def check_sizes(self, rectangle: Rectangle) -> None:
        n, k = rectangle.shape
        if n % self.per_word or k % self.per_word:
            name = f"{module_of(rectangle)}.qweight"
            raise self.refusal(name, f"sizes in multiples of {self.per_word}, found a weight [{n}, {k}]")

    def stored_scales(self, rectangle: Rectangle) -> StoredRectangle:
        count, own = self.groups(rectangle)
        index = unless_empty(rectangle, own, rectangle.index[0])
        return StoredRectangle(f"{module_of(rectangle)}.scales", (count, rectangle.shape[0]), FLOATS, index)

    def scales(self, stored: Tensor) -> Tensor:
        return stored.T

    def stored_zeros(self, rectangle: Rectangle) -> StoredRectangle | None:
        count, own = self.groups(rectangle)
        index = unless_empty(rectangle, own, whole(rectangle.index[0], self.per_word))
        shape = (count, rectangle.shape[0] // self.per_word)
        return StoredRectangle(f"{module_of(rectangle)}.qzeros", shape, ("I32",), index)

    def zeros(self, rectangle: Rectangle, packed: Tensor) -> Tensor:
        return self.unpacked(packed, self.order)[self.trim(rectangle.index[0])]

    def stored_order(self, rectangle: Rectangle) -> StoredRectangle:
        index = unless_empty(rectangle, rectangle.index[1])
        return StoredRectangle(f"{module_of(rectangle)}.g_idx", rectangle.shape[1:], ("I32",), index)


class AWQ(_Transposed):
    """Activation-aware weight quantisation (arXiv 2306.00978) as AutoAWQ's "gemm" files: qweight [k, n / 8]."""

    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def stored_codes(self, rectangle: Rectangle) -> tuple[StoredRectangle, ...]:
        (n, k), (rows, columns) = rectangle.shape, rectangle.index
        index = unless_empty(rectangle, columns, whole(rows, self.per_word))
        return (StoredRectangle(f"{module_of(rectangle)}.qweight", (k, n // self.per_word), ("I32",), index),)

    def codes(self, rectangle: Rectangle, packed: Tensor, groups: Tensor | None = None) -> Tensor:
        return self.unpacked(packed, self.order)[self.trim(rectangle.index[0])]


class GPTQ(_Transposed):
    """GPTQ (arXiv 2210.17323) as AutoGPTQ and GPTQModel write it: qweight [k / per_word, n], and g_idx [k], the group
    of a column."""

    def stored_codes(self, rectangle: Rectangle) -> tuple[StoredRectangle, ...]:
        (n, k), (rows, columns) = rectangle.shape, rectangle.index
        index = unless_empty(rectangle, whole(columns, self.per_word), rows)
        packed = StoredRectangle(f"{module_of(rectangle)}.qweight", (k // self.per_word, n), ("I32",), index)
        groups = self.stored_order(rectangle)
        return (packed, groups) if groups.name in self.checkpoint.tensors else (packed,)

    def codes(self, rectangle: Rectangle, packed: Tensor, groups: Tensor | None = None) -> Tensor:
        columns = rectangle.index[1]
        if groups is not None:
            in_order = torch.arange(columns.start, columns.stop) // self.group(rectangle.shape[1])
            if not torch.equal(groups, in_order):
                raise self.refusal(
                    self.stored_order(rectangle).name,
                    "columns in the order of their groups, found another order, without desc_act in config.json",
                )
        return self.unpacked(packed.T).T[:, self.trim(columns)].contiguous()

    def zeros(self, rectangle: Rectangle, packed: Tensor) -> Tensor:
        """Return the zero points.

        Some writers of symmetric files claim to store zero points less one and do not; they are the middle in any case.
        Writers subtract one from every zero point of a word at once (GPTQModel) or add up zero points less one
        (AutoRound), so that a zero point of 0 borrows from the next.
        """
        middle = 1 << self.scheme.bits - 1
        if self.scheme.symmetric:
            stored = super().zeros(rectangle, packed)
            if not (torch.all(stored == middle - 1) or torch.all(stored == middle)):
                expected = f"zero points {middle} (stored as {middle}, or less one as {middle - 1}) of a symmetric"
                raise self.refusal(f"{module_of(rectangle)}.qzeros", f"{expected} quantisation")
            return torch.full_like(stored, middle)
        return super().zeros(rectangle, packed + _ONES[self.scheme.bits] * self.scheme.zeros_minus_one)


class CompressedInts(PackedEncoding):
    """compressed-tensors' pack-quantized: weight_packed [n, k / per_word], weight_scale [n, groups], and
    weight_zero_point [n / per_word, groups], packed along the outputs, unless the quantisation is symmetric; codes and
    zero points are packed with the middle added. weight_g_idx [k]: the group of a column, if groups are permuted."""

    def stored_codes(self, rectangle: Rectangle) -> tuple[StoredRectangle, ...]:
        (n, k), (rows, columns) = rectangle.shape, rectangle.index
        index = unless_empty(rectangle, rows, whole(columns, self.per_word))
        shape = (n, -(-k // self.per_word))
        return (StoredRectangle(f"{module_of(rectangle)}.weight_packed", shape, ("I32",), index),)

    def codes(self, rectangle: Rectangle, packed: Tensor, groups: Tensor | None = None) -> Tensor:
        return self.unpacked(packed).T[:, self.trim(rectangle.index[1])].contiguous()

    def stored_scales(self, rectangle: Rectangle) -> StoredRectangle:
        count, own = self.groups(rectangle)
        index = unless_empty(rectangle, rectangle.index[0], own)
        return StoredRectangle(f"{module_of(rectangle)}.weight_scale", (rectangle.shape[0], count), FLOATS, index)

    def scales(self, stored: Tensor) -> Tensor:
        return stored

    def stored_zeros(self, rectangle: Rectangle) -> StoredRectangle | None:
        if self.scheme.symmetric:
            return None
        count, own = self.groups(rectangle)
        index = unless_empty(rectangle, whole(rectangle.index[0], self.per_word), own)
        shape = (-(-rectangle.shape[0] // self.per_word), count)
        return StoredRectangle(f"{module_of(rectangle)}.weight_zero_point", shape, ("I32",), index)

    def zeros(self, rectangle: Rectangle, packed: Tensor) -> Tensor:
        return self.unpacked(packed.T)[self.trim(rectangle.index[0])]

    def stored_order(self, rectangle: Rectangle) -> StoredRectangle:
        index = unless_empty(rectangle, rectangle.index[1])
        return StoredRectangle(f"{module_of(rectangle)}.weight_g_idx", rectangle.shape[1:], ("I32",), index)
