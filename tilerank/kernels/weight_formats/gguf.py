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
from .block_scaled import HALF_N, TILE_K
from .byte_codes import unpack_bytes
from .checks import check_sizes
from .gguf_blocks import decode

IQ4_NUMBERS = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.int8)
"""What the codes of IQ4_NL and IQ4_XS stand for."""


@dataclass(frozen=True)
class GgufType:
    """A block format of the files. number: in files. kind: the kernels that read it, whose codes have `bits` bits and
    share a subscale in groups of `group` inputs. block: inputs of a block. minimums: whether it has some."""

    number: int
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

    @property
    def has_table(self) -> bool:
        """Whether codes stand for the numbers of a table."""
        return self.kind == "iq4"

    def numbers(self, codes: Tensor) -> Tensor:
        """Return what codes uint8 stand for, in fp32."""
        if self.has_table:
            return IQ4_NUMBERS.float()[codes.int()]
        return codes.view(torch.int8).float() if self.kind == "s8" else codes.float() - self.middle


GGUF_TYPES = {
    "Q4_0": GgufType(2, "u4", 4, 32, 32),
    "Q4_1": GgufType(3, "u4", 4, 32, 32, True),
    "Q5_0": GgufType(6, "u5", 5, 32, 32),
    "Q5_1": GgufType(7, "u5", 5, 32, 32, True),
    "Q8_0": GgufType(8, "s8", 8, 32, 32),
    "Q2_K": GgufType(10, "u2", 2, 16, 256, True),
    "Q3_K": GgufType(11, "u3", 3, 16, 256),
    "Q4_K": GgufType(12, "u4", 4, 32, 256, True),
    "Q5_K": GgufType(13, "u5", 5, 32, 256, True),
    "Q6_K": GgufType(14, "u6", 6, 16, 256),
    "IQ4_NL": GgufType(20, "iq4", 4, 32, 32),
    "IQ4_XS": GgufType(23, "iq4", 4, 32, 256),
}
"""By the names of ggml."""


_TENSORS = "values[_, _, 1, 2, {}]:{} scales[_, _, _, 32]:f16 subscales[_, _, _, 32]?:i8"


def gguf_layout(type: GgufType, activations: str = "") -> Layout:
    """Return the layout of a kind of types. activations: the end of the names of kernels for other ones than bf16."""
    tile_bytes = HALF_N * type.group * type.bits // 8
    dtype = "i8" if type.has_table else "u8"
    return Layout(f"gguf_{type.kind}{activations}", "GgufWeight", _TENSORS.format(tile_bytes, dtype))


GGUF_LAYOUTS = {type.kind: gguf_layout(type) for type in GGUF_TYPES.values()}
ANY_GGUF = Layout("gguf", "GgufWeight", _TENSORS.format("_", "u8|i8"))
"""The layout of all kinds together, because the projections of experts may have several."""

_PACK = Contract(
    "GgufWeight.write_blocks: w:weight stored[_, _, _]:u8 sources[_]:i32 row:int type:int bits:int block:int",
    kernel="pack_gguf",
    layout=ANY_GGUF,
)
_EMBEDDING = Contract(
    "GgufWeight.embedding: ids[t]:i64 w:weight first_row:int n:int k:int kind:int -> out[t, k]:bf16",
    kernel="embedding_gguf",
    layout=ANY_GGUF,
)


@dataclass(frozen=True)
class Gguf:
    """A block format of GGUF by its name in ggml, such as Q4_K. block: inputs that share a scale; those of the format,
    or fewer, where columns move. first: inputs of the first block before those of the weight, where a rank's part
    begins inside a block."""

    type: str
    block: int
    first: int = 0

    activations = torch.bfloat16
    operands: ClassVar[Operands] = "bf16"
    is_quantised = True
    k_unit = TILE_K

    @property
    def parts(self) -> GgufType:
        return GGUF_TYPES[self.type]

    @property
    def layout(self) -> Layout:
        return GGUF_LAYOUTS[self.parts.kind]

    def nbytes(self, n: int, k: int) -> int:
        return block_scaled.nbytes(self._arrays(n, k))

    def empty(self, n: int, k: int) -> GgufWeight:
        return GgufWeight(*self.allocate(n, k), n, k, self)

    def allocate(self, n: int, k: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return values, scales and subscales of zeros."""
        values, scales, *subscales = block_scaled.allocate(self._arrays(n, k))
        if not subscales:
            return values, scales, None
        groups, kinds, first = -(-k // self.parts.group), self._subkinds, self.first // self.parts.group
        shape = (scales.shape[0], first + groups, kinds, BLOCK_N)
        steps = (groups * kinds * BLOCK_N, kinds * BLOCK_N, BLOCK_N, 1)
        return values, scales, subscales[0].as_strided(shape, steps)

    @property
    def _subkinds(self) -> int:
        """Return 2 where subminimums have bytes of their own."""
        return 2 if self.parts.minimums and self.parts.bits > 2 else 1

    def _arrays(self, n: int, k: int) -> block_scaled.Arrays:
        check_sizes("Gguf", n, k)
        block_scaled.check_unit("Gguf", "block", self.block)
        parts, blocks = self.parts, block_scaled.blocks(n)
        if not 0 <= self.first < self.block or self.first % parts.group:
            expected = f"a multiple of {parts.group} below {self.block}"
            raise KernelError(f"Gguf: first: expected {expected}, found {self.first}")
        groups, across = -(-k // parts.group), -(-(self.first + k) // self.block)
        values: tuple[int, ...] = (blocks, groups, 1, 2, HALF_N * parts.group * parts.bits // 8)
        # The subscales of groups before the first are allocated once, not for every 32 outputs.
        subscales = (self.first // parts.group + blocks * groups) * self._subkinds * BLOCK_N
        return [
            ((n, k) if core.isa() == "reference" else values, torch.int8 if parts.has_table else torch.uint8),
            ((blocks, across, 2 if parts.minimums else 1, BLOCK_N), torch.float16),
            *([((subscales,), torch.int8)] if parts.has_subscales else []),
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

    @property
    def groups(self) -> int:
        return -(-self.k // self.format.parts.group)

    def _blocks(self) -> Tensor:
        """Return the block of each group, [groups] int64."""
        return (self.format.first + torch.arange(self.groups) * self.format.parts.group) // self.format.block

    def scratch(self, m: int) -> int:
        return block_scaled.scratch_in_vectors(self.format.layout.format, m, self.k, self.format.parts.group)

    def write(self, rows: Tensor, row: int = 0, col: int = 0) -> None:
        raise KernelError(
            f"GgufWeight.write: rows: floats are not quantised to {self.format.type}, only read from files"
        )

    def write_blocks(self, stored: Tensor, sources: Tensor, row: int) -> None:
        """Pack blocks of a file, from row `row` on.

        stored: [r, blocks, bytes] uint8. sources: [groups] int32, the groups of the stored values that are those of the
        weight, or its first ones. Raises KernelError for scales that are not finite.
        """
        parts, rows = self.format.parts, slice(row, row + stored.shape[0])
        if rows.stop > self.n or len(sources) > self.groups:
            raise KernelError(
                f"GgufWeight.write_blocks: expected at most {self.n - row} rows and {self.groups} groups, "
                f"found {stored.shape[0]} rows and {len(sources)} groups"
            )
        if not self.is_plain:
            _PACK.run(self, stored, sources, row, parts.number, parts.bits, parts.block)
            return
        found, count = decode(self.format.type, stored), len(sources)
        codes = torch.unflatten(found.codes, 1, (-1, parts.group))[:, sources].flatten(1)[:, : self.k]
        self.values[rows, : codes.shape[1]] = codes.view(self.values.dtype)
        blocks, places = sources * parts.group // parts.block, self._blocks()[:count]
        numbers = torch.arange(rows.start, rows.stop)[:, None]

        def put(array: Tensor, at: Tensor, kind: int, chosen: Tensor) -> None:
            array[:, :, kind][numbers // BLOCK_N, at, numbers % BLOCK_N] = chosen

        for kind, of_blocks in enumerate((found.scales, found.minimums)):
            if of_blocks is not None:
                put(self.scales, places, kind, of_blocks[:, blocks])
        factors = [None if each is None else each[:, sources] for each in (found.subscales, found.subminimums)]
        if parts.bits == 2:
            assert factors[0] is not None and factors[1] is not None
            factors = [factors[0] | factors[1] << 4, None]
        for kind, of_groups in enumerate(factors):
            if of_groups is not None:
                assert self.subscales is not None
                put(self.subscales, torch.arange(count) + self.format.first // parts.group, kind, of_groups)

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
            both = self.subscales[:, -self.groups :].unbind(2)
            factors = [both[0] & 15, both[0] >> 4 & 15] if parts.bits == 2 else [*both, None]
        minimums = self._by_group(kinds[1], factors[1]) if parts.minimums else None
        return self._by_group(kinds[0], factors[0]), minimums

    def codes(self) -> Tensor:
        """Return the codes, [n, k] uint8."""
        values, parts = self.values.view(torch.uint8), self.format.parts
        if self.is_plain:
            return values
        if parts.kind == "s8":
            return unpack_bytes(values, self.n, self.k)
        return _unpack_planes(values, parts.bits, parts.group)[: self.n, : self.k]

    def _by_group(self, scales: Tensor, factors: Tensor | None) -> Tensor:
        """Return scales [blocks, blocks of inputs, 32] times their factors [blocks, groups, 32] as [n, groups]."""
        numbers = scales.float()[:, self._blocks()]
        if factors is not None:
            numbers = numbers * factors.float()
        return numbers.transpose(1, 2).flatten(0, 1)[: self.n]

    def embedding(self, ids: Tensor, first_row: int = 0) -> Tensor:
        """Return rows [t, k] of the weight in bfloat16 for ids[t] int64; ids outside [first_row, first_row + n) give
        zeros."""
        parts = self.format.parts
        if core.isa() == "reference" or self.is_plain:
            return reference_ops.embedding(ids, self.unpack().to(torch.bfloat16), first_row)
        kind = 0 if parts.kind == "iq4" else parts.bits
        return _EMBEDDING(ids, self, first_row, self.n, self.k, kind)


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
