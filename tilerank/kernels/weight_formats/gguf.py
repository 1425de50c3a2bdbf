"""Weights in the block formats of GGUF files, in as many bits as the files have; activations stay bfloat16.

    value = scale * subscale * number(code) + minimum * subminimum

Codes have 2 to 6 or 8 bits. A scale, and in some formats a minimum, is fp16 and belongs to an output and a block of 32
or 256 inputs. Blocks of 256 have factors of both for each group of 16 or 32 inputs. Numbers are exact in bfloat16.
Products with x are summed group by group in fp32, and then scaled, so only sums are rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from .. import core
from ..contract import Contract
from ..errors import KernelError
from ..reference import ops as reference_ops
from ..weight import BLOCK_N, Layout, Operands, chosen_blocks
from . import block_scaled
from .block_scaled import HALF_N
from .byte_codes import pack_bytes, unpack_bytes
from .checks import check_rectangle, check_sizes

IQ4_NUMBERS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the codes of IQ4_NL and IQ4_XS stand for."""


@dataclass(frozen=True)
class GgufType:
    """A block format of the files. kind: the kernels that read it, whose codes have `bits` bits and share a subscale in
    groups of `group` inputs. block: inputs of a block. minimums: whether it has some."""

    kind: str
    bits: int
    group: int
    block: int
    minimums: bool = False

    @property
    def middle(self) -> int:
        """The code that stands for 0, where codes are numbers."""
        return 0 if self.minimums or self.kind in ("iq4", "s8") else 1 << (self.bits - 1)

    @property
    def has_subscales(self) -> bool:
        return self.block > self.group

    def numbers(self, codes: Tensor) -> Tensor:
        """Return what codes uint8 stand for, in fp32."""
        if self.kind == "iq4":
            return torch.tensor(IQ4_NUMBERS, dtype=torch.float32)[codes.int()]
        return codes.view(torch.int8).float() if self.kind == "s8" else codes.float() - self.middle


GGUF_TYPES = {
    "Q4_0": GgufType("u4", 4, 32, 32),
    "Q4_1": GgufType("u4", 4, 32, 32, True),
    "Q5_0": GgufType("u5", 5, 32, 32),
    "Q5_1": GgufType("u5", 5, 32, 32, True),
    "Q8_0": GgufType("s8", 8, 32, 32),
    "Q2_K": GgufType("u2", 2, 16, 256, True),
    "Q3_K": GgufType("u3", 3, 16, 256),
    "Q4_K": GgufType("u4", 4, 32, 256, True),
    "Q5_K": GgufType("u5", 5, 32, 256, True),
    "Q6_K": GgufType("u6", 6, 16, 256),
    "IQ4_NL": GgufType("iq4", 4, 32, 32),
    "IQ4_XS": GgufType("iq4", 4, 32, 256),
}
"""By the names of ggml."""


def gguf_layout(type: GgufType, activations: str = "") -> Layout:
    """Return the layout of a kind of types. activations: the end of the names of kernels for other ones than bf16."""
    tile_bytes = HALF_N * type.group * type.bits // 8
    arrays = f"values[_, _, 1, 2, {tile_bytes}]:u8 scales[_, _, _, {BLOCK_N}]:f16 subscales[_, _, _, _, {BLOCK_N}]?:i8"
    return Layout(f"gguf_{type.kind}{activations}", "GgufWeight", arrays)


GGUF_LAYOUTS = {type.kind: gguf_layout(type) for type in GGUF_TYPES.values()}

_PACK = Contract("pack_gguf: w.values codes[_, _]:u8 row:int bits:int")
_EMBEDDING = {
    kind: Contract(
        "GgufWeight.embedding: ids[t]:i64 w:weight first_row:int n:int k:int kind:int -> out[t, k]:bf16",
        kernel="embedding_gguf",
        layout=layout,
    )
    for kind, layout in GGUF_LAYOUTS.items()
}


@dataclass(frozen=True)
class Gguf:
    """A block format of GGUF by its name in ggml, such as Q4_K. block: inputs that share a scale; those of the format,
    or fewer, where a rank's part begins inside a block."""

    type: str
    block: int

    activations = torch.bfloat16
    operands: ClassVar[Operands] = "bf16"
    is_quantised = True

    @property
    def parts(self) -> GgufType:
        return GGUF_TYPES[self.type]

    @property
    def layout(self) -> Layout:
        return GGUF_LAYOUTS[self.parts.kind]

    @property
    def k_unit(self) -> int:
        return self.block

    def nbytes(self, n: int, k: int) -> int:
        return block_scaled.nbytes(self._arrays(n, k))

    def empty(self, n: int, k: int) -> GgufWeight:
        return GgufWeight(*self.allocate(n, k), n, k, self)

    def allocate(self, n: int, k: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return values, scales and subscales of zeros."""
        values, scales, *subscales = block_scaled.allocate(self._arrays(n, k))
        return values, scales, subscales[0] if subscales else None

    def _arrays(self, n: int, k: int) -> block_scaled.Arrays:
        check_sizes("Gguf", n, k)
        block_scaled.check_unit("Gguf", "block", self.block)
        parts, blocks, across = self.parts, block_scaled.blocks(n), -(-k // self.block)
        values: tuple[int, ...] = (blocks, -(-k // parts.group), 1, 2, HALF_N * parts.group * parts.bits // 8)
        kinds = 2 if parts.minimums else 1
        subscales = (blocks, across, self.block // parts.group, 1 if parts.bits == 2 else kinds, BLOCK_N)
        return [
            ((n, k) if core.isa() == "reference" else values, torch.uint8),
            ((blocks, across, kinds, BLOCK_N), torch.float16),
            *([(subscales, torch.int8)] if parts.has_subscales else []),
        ]


@dataclass(frozen=True)
class GgufWeight(block_scaled.BlockScaledWeight):
    """A weight[n, k] in the layout of csrc/block_scaled/gguf.h.

    Where kernels run in plain torch, `values` are the codes, [n, k] uint8.
    """

    values: Tensor
    scales: Tensor
    subscales: Tensor | None
    n: int
    k: int
    format: Gguf

    def scratch(self, m: int) -> int:
        return block_scaled.scratch_in_vectors(self.format.layout.format, m, self.k, self.format.parts.group)

    def write(self, rows: Tensor, row: int = 0, col: int = 0) -> None:
        raise KernelError(
            f"GgufWeight.write: rows: floats are not quantised to {self.format.type}, only read from files"
        )

    def write_codes(self, codes: Tensor, row: int) -> None:
        """Pack codes[r, c] uint8 into weight[row : row + r, : c]."""
        where = "GgufWeight.write_codes: codes"
        if self.is_plain:
            check_rectangle(where, codes, (self.n, self.k), (row, 0))
            self.values[row : row + codes.shape[0], : codes.shape[1]] = codes
        elif self.format.parts.kind == "s8":
            pack_bytes(where, self, codes, torch.uint8, (row, 0))
        else:
            check_rectangle(where, codes, (self.n, self.k), (row, 0))
            if codes.shape[1] % 8:
                raise KernelError(f"{where}: expected a multiple of 8 columns, found {codes.shape[1]}")
            _PACK.run(self, codes.contiguous(), row, self.format.parts.bits)

    def write_scales(
        self,
        row: int,
        scales: Tensor,
        subscales: Tensor | None,
        minimums: Tensor | None,
        subminimums: Tensor | None,
    ) -> None:
        """Write scales and minimums [r, blocks] float16, and their factors [r, groups] int8, from row `row` on."""
        if self.format.parts.bits == 2:
            assert subscales is not None and subminimums is not None
            subscales, subminimums = subscales | subminimums << 4, None
        pairs = ((self.scales, (scales, minimums)), (self.subscales, (subscales, subminimums)))
        for array, kinds in pairs:
            for kind, numbers in enumerate(kinds):
                if numbers is not None:
                    assert array is not None
                    rows = torch.arange(row, row + numbers.shape[0])
                    of_kind = array[..., kind, :].flatten(1, -2)
                    of_kind[rows // BLOCK_N, : numbers.shape[1], rows % BLOCK_N] = numbers

    def part(self, row: int, n: int, step: int = 1) -> GgufWeight:
        chosen = chosen_blocks(row, n, step)
        return replace(
            self,
            values=self.values[row : row + n] if self.is_plain else self.values[chosen],
            scales=self.scales[chosen],
            subscales=None if self.subscales is None else self.subscales[chosen],
            n=n,
        )

    def unpack(self) -> Tensor:
        """Return the values of weight[n, k] in float32, each rounded once."""
        parts = self.format.parts
        scales, minimums = (
            None if by_group is None else by_group.repeat_interleave(parts.group, 1)[:, : self.k]
            for by_group in self.group_scales()
        )
        assert scales is not None
        values = parts.numbers(self.codes()) * scales
        return values if minimums is None else values + minimums

    def group_scales(self) -> tuple[Tensor, Tensor | None]:
        """Return the scales and the minimums of all groups, [n, groups] float32."""
        parts = self.format.parts
        kinds = list(self.scales.unbind(2))
        factors: list[Tensor | None] = [None, None]
        if self.subscales is not None:
            both = self.subscales.unbind(3)
            factors = [both[0] & 15, both[0] >> 4 & 15] if parts.bits == 2 else [*both, None]
        minimums = self._by_group(kinds[1], factors[1]) if parts.minimums else None
        return self._by_group(kinds[0], factors[0]), minimums

    def codes(self) -> Tensor:
        """Return the codes, [n, k] uint8."""
        if self.is_plain:
            return self.values
        parts = self.format.parts
        if parts.kind == "s8":
            return unpack_bytes(self.values, self.n, self.k)
        return _unpack_planes(self.values, parts.bits, parts.group)[: self.n, : self.k]

    def _by_group(self, scales: Tensor, factors: Tensor | None) -> Tensor:
        """Return scales [blocks, blocks of inputs, 32] times their factors as [n, groups]."""
        numbers = scales.float()[:, :, None]
        if factors is not None:
            numbers = numbers * factors.float()
        return numbers.flatten(1, 2).transpose(1, 2).flatten(0, 1)[: self.n]

    def embedding(self, ids: Tensor, first_row: int = 0) -> Tensor:
        """Return rows [t, k] of the weight in bfloat16 for ids[t] int64; ids outside [first_row, first_row + n) give
        zeros."""
        parts = self.format.parts
        if core.isa() == "reference" or self.is_plain:
            return reference_ops.embedding(ids, self.unpack().to(torch.bfloat16), first_row)
        kind = 0 if parts.kind == "iq4" else parts.bits
        return _EMBEDDING[parts.kind](ids, self, first_row, self.n, self.k, kind)


def _unpack_planes(values: Tensor, bits: int, group: int) -> Tensor:
    """Return packed codes [outputs, inputs] uint8."""
    runs, blocks = group // 8, values.shape[0]
    tiles = values.flatten(2, 3).transpose(1, 2)  # [blocks, halves, groups, bytes]
    at, codes = 0, torch.zeros((), dtype=torch.uint8)
    place = 0

    def take(size: int, unpack: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the numbers [blocks, halves, groups, runs, outputs, 8 inputs] of the next plane."""
        nonlocal at
        plane = torch.unflatten(tiles[..., at : at + runs * HALF_N * size], -1, (runs, HALF_N, size))
        at += runs * HALF_N * size
        return unpack(plane)

    if bits >= 4:
        # The nibbles of the lower half of a word are the even inputs, those of the upper half the odd ones.
        nibbles = take(4, lambda plane: torch.stack([plane & 15, plane >> 4], -1).flatten(-2))
        codes = codes | torch.unflatten(nibbles, -1, (2, 4)).transpose(-1, -2).flatten(-2)
        place = 4
    if bits in (2, 3, 6):
        shifts = torch.arange(0, 8, 2, dtype=torch.uint8)
        codes = codes | take(2, lambda plane: (plane[..., None] >> shifts & 3).flatten(-2)) << place
        place += 2
    if bits in (3, 5):
        codes = (
            codes
            | take(1, lambda plane: (plane[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2)) << place
        )
    # [blocks, halves, groups, runs, outputs, inputs of a run] -> outputs, inputs
    return codes.permute(0, 1, 4, 2, 3, 5).reshape(blocks * BLOCK_N, -1)
