"""Quantised checkpoints: where the codes, scales and zero points of a weight are stored, and how they are packed.

A model asks for a rectangle of X.weight; here that becomes rectangles of the tensors which the checkpoint has in its
place (loader/quantization.py). Codes are written as they are: nothing is dequantised, but what GPTQ has put in an order
of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor

from tilerank.kernels.linear import Weight
from tilerank.kernels.linear_fp8 import Fp8Weight
from tilerank.kernels.linear_int4 import Int4Weight
from tilerank.kernels.linear_int8 import Int8Weight
from tilerank.parallel.layer import Piece, whole_rows

from .checkpoint import Checkpoint
from .errors import CheckpointError
from .quantization import QuantizationConfig
from .read import FLOATS, Read, Source

_NIBBLES = 8  # codes in an int32


def encoding_of(config: QuantizationConfig, checkpoint: Checkpoint) -> Encoding:
    kinds: dict[str, type[Encoding]] = {"awq": AWQ, "gptq": GPTQ, "fp8": BlockFp8, "int8": ChannelInt8}
    return kinds[config.layout](config, checkpoint)


class Encoding(ABC):
    """How one checkpoint stores its quantised weights."""

    def __init__(self, config: QuantizationConfig, checkpoint: Checkpoint) -> None:
        self.config = config
        self._checkpoint = checkpoint

    @abstractmethod
    def reads(self, piece: Piece) -> Iterator[Read]:
        """What to read in place of a piece that has a `place`. Rectangles are empty where the piece is."""

    def floats(self, piece: Piece) -> Iterator[Read]:
        """What to read for a piece that is held as floats."""
        yield Read.of(piece)

    def leaves_out(self, name: str) -> bool:
        """Is this tensor, which nobody asked for, without effect?"""
        return False

    def refusal(self, name: str, expected: str) -> CheckpointError:
        return CheckpointError(f"{self._checkpoint.model_dir}: tensor {name}: expected {expected}")


class ChannelInt8(Encoding):
    """weight [n, k] int8 and weight_scale [n, 1]."""

    def reads(self, piece: Piece) -> Iterator[Read]:
        rows, _ = piece.index

        def store(codes: Tensor, scales: Tensor) -> None:
            weight, row = _place(piece)
            cast(Int8Weight, weight).write_codes(whole_rows(codes, weight), scales.float().flatten(), row)

        codes = Source(piece.name, piece.shape, ("I8",), piece.index)
        scales = Source(f"{piece.name}_scale", (piece.shape[0], 1), FLOATS, _unless_empty(piece, rows, slice(0, 1)))
        yield Read((codes, scales), store)


class BlockFp8(Encoding):
    """weight [n, k] e4m3 and weight_scale_inv, one number for each block, those at the edges smaller."""

    def reads(self, piece: Piece) -> Iterator[Read]:
        (rows, columns), (block_n, block_k) = piece.index, self.config.block

        def store_codes(codes: Tensor) -> None:
            weight, row = _place(piece)
            cast(Fp8Weight, weight).write_codes(codes, row, 0)

        def store_scales(scales: Tensor) -> None:
            weight, row = _place(piece)
            held = cast(Fp8Weight, weight).format
            scales = _repeated(scales.float(), 0, rows, block_n, held.block_n)
            scales = _repeated(scales, 1, columns, block_k, held.block_k)
            cast(Fp8Weight, weight).write_scales(scales.contiguous(), row // held.block_n, 0)

        yield Read((Source(piece.name, piece.shape, ("F8_E4M3",), piece.index),), store_codes)
        blocks = _unless_empty(piece, _whole(rows, block_n), _whole(columns, block_k))
        shape = (-(-piece.shape[0] // block_n), -(-piece.shape[1] // block_k))
        yield Read((Source(f"{piece.name}_scale_inv", shape, FLOATS, blocks),), store_scales)


class PackedInt4(Encoding):
    """qweight, int32 of eight codes each; qzeros [groups, n / 8], packed along the outputs; scales [groups, n].

    dequantised weight[o, i] = (code[o, i] - zero[g, o]) * scale[g, o] with g = i // group.
    """

    order: tuple[int, ...]
    """Outputs, of the eight that share an int32, in the order of its nibbles from the lowest."""

    def reads(self, piece: Piece) -> Iterator[Read]:
        n, k = piece.shape
        module = piece.name.removesuffix(".weight")
        if n % _NIBBLES or k % _NIBBLES:
            raise self.refusal(f"{module}.qweight", f"sizes in multiples of {_NIBBLES}, found a weight [{n}, {k}]")
        rows, columns = piece.index
        group = self.config.group or k
        groups, eights = _whole(columns, group), _whole(rows, _NIBBLES)

        def store_scales(scales: Tensor) -> None:
            weight, row = _place(piece)
            held = cast(Int4Weight, weight).format.group
            scales = _repeated(scales.T, 1, columns, group, held)
            cast(Int4Weight, weight).write_scales(scales.contiguous(), row, 0)

        def store_zeros(packed: Tensor) -> None:
            zeros = self.zeros(f"{module}.qzeros", _nibbles(packed, self.order)[_trim(rows)])
            weight, row = _place(piece)
            if not self.config.symmetric:
                zeros = _repeated(zeros, 1, columns, group, cast(Int4Weight, weight).format.group)
                cast(Int4Weight, weight).write_zeros(zeros.contiguous(), row, 0)

        count = -(-k // group)
        yield self.codes(piece, f"{module}.qweight")
        index = _unless_empty(piece, groups, eights)
        yield Read((Source(f"{module}.qzeros", (count, n // _NIBBLES), ("I32",), index),), store_zeros)
        index = _unless_empty(piece, groups, rows)
        yield Read((Source(f"{module}.scales", (count, n), FLOATS, index),), store_scales)

    @abstractmethod
    def codes(self, piece: Piece, name: str) -> Read: ...

    def zeros(self, name: str, stored: Tensor) -> Tensor:
        """Zero points [n, groups] from the stored numbers."""
        return stored


class AWQ(PackedInt4):
    """Activation-aware weight quantisation (arXiv 2306.00978) as AutoAWQ's "gemm" files: qweight [k, n / 8]."""

    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def codes(self, piece: Piece, name: str) -> Read:
        (n, k), (rows, columns) = piece.shape, piece.index

        def store(packed: Tensor) -> None:
            weight, row = _place(piece)
            cast(Int4Weight, weight).write_codes(_nibbles(packed, self.order)[_trim(rows)], row, 0)

        index = _unless_empty(piece, columns, _whole(rows, _NIBBLES))
        return Read((Source(name, (k, n // _NIBBLES), ("I32",), index),), store)


class GPTQ(PackedInt4):
    """GPTQ (arXiv 2210.17323) as AutoGPTQ and GPTQModel write it: qweight [k / 8, n], g_idx [k]: the group of a column.

    Where g_idx is in another order than the columns', they are dequantised, once config.json says so (desc_act).
    """

    order = (0, 1, 2, 3, 4, 5, 6, 7)

    def reads(self, piece: Piece) -> Iterator[Read]:
        yield from super().reads(piece)
        columns, k = piece.index[1], piece.shape[1]
        name = f"{piece.name.removesuffix('.weight')}.g_idx"

        def check(groups: Tensor) -> None:
            if not torch.equal(groups, torch.arange(columns.start, columns.stop) // (self.config.group or k)):
                raise self.refusal(
                    name, "columns in groups as they come, found another order, without desc_act in config.json"
                )

        yield Read((Source(name, (k,), ("I32",), _unless_empty(piece, columns), optional=True),), check)

    def codes(self, piece: Piece, name: str) -> Read:
        def store(packed: Tensor) -> None:
            weight, row = _place(piece)
            codes = _nibbles(packed.T, self.order).T[:, _trim(piece.index[1])]
            cast(Int4Weight, weight).write_codes(codes.contiguous(), row, 0)

        return Read((self._packed(piece, name),), store)

    def _packed(self, piece: Piece, name: str) -> Source:
        (n, k), (rows, columns) = piece.shape, piece.index
        return Source(name, (k // _NIBBLES, n), ("I32",), _unless_empty(piece, _whole(columns, _NIBBLES), rows))

    def floats(self, piece: Piece) -> Iterator[Read]:
        module = piece.name.removesuffix(".weight")
        if not self.config.act_order or f"{module}.qweight" not in self._checkpoint.tensors:
            yield Read.of(piece)
            return
        (n, k), (rows, columns) = piece.shape, piece.index
        count = -(-k // self.config.group)

        def store(packed: Tensor, packed_zeros: Tensor, scales: Tensor, groups: Tensor) -> None:
            if not ((groups >= 0) & (groups < count)).all():
                raise self.refusal(f"{module}.g_idx", f"groups from 0 to {count - 1}, found others")
            codes = _nibbles(packed.T, self.order).T[:, _trim(columns)].float()
            zeros = self.zeros(f"{module}.qzeros", _nibbles(packed_zeros, self.order)[_trim(rows)]).float()
            piece.store((codes - zeros[:, groups]) * scales.T.float()[:, groups])

        every = slice(0, count)
        sources = (
            self._packed(piece, f"{module}.qweight"),
            Source(
                f"{module}.qzeros",
                (count, n // _NIBBLES),
                ("I32",),
                _unless_empty(piece, every, _whole(rows, _NIBBLES)),
            ),
            Source(f"{module}.scales", (count, n), FLOATS, _unless_empty(piece, every, rows)),
            Source(f"{module}.g_idx", (k,), ("I32",), _unless_empty(piece, columns)),
        )
        yield Read(sources, store)

    def zeros(self, name: str, stored: Tensor) -> Tensor:
        """A symmetric file's zero points are known: some writers say that they store them less one, and do not."""
        if self.config.symmetric:
            if not (torch.all(stored == 7) or torch.all(stored == 8)):
                raise self.refusal(name, "zero points 8 (stored as 8, or less one as 7) of a symmetric quantisation")
            return torch.full_like(stored, 8)
        return (stored + int(self.config.zeros_minus_one)) & 15

    def leaves_out(self, name: str) -> bool:
        """A bias of zeros: some writers give one to every module."""
        module, _, last = name.rpartition(".")
        if last != "bias" or f"{module}.qweight" not in self._checkpoint.tensors:
            return False
        info = self._checkpoint.info(name)
        return not self._checkpoint.read(name, tuple(slice(0, size) for size in info.shape)).any()


def _place(piece: Piece) -> tuple[Weight, int]:
    assert piece.place is not None
    return piece.place()


def _unless_empty(piece: Piece, *index: slice) -> tuple[slice, ...]:
    return index if piece.elements else tuple(slice(0, 0) for _ in index)


def _whole(part: slice, unit: int) -> slice:
    """Of items that serve `unit` elements each, those that serve any of `part`."""
    return slice(part.start // unit, -(-part.stop // unit))


def _trim(part: slice) -> slice:
    """`part` among the elements of its whole int32s."""
    first = part.start % _NIBBLES
    return slice(first, first + part.stop - part.start)


def _repeated(scales: Tensor, dim: int, part: slice, stored: int, held: int) -> Tensor:
    """Scales along `dim` of the blocks of `held` elements in `part`, from those of the blocks of `stored` around it."""
    starts = torch.arange(part.start, part.stop, held)
    return scales.index_select(dim, starts // stored - part.start // stored)


def _nibbles(packed: Tensor, order: tuple[int, ...]) -> Tensor:
    """int32 [r, c] -> codes uint8 [8 * c, r]; nibble j of packed[r, c] is number order[j] of column c's eight."""
    rows, columns = packed.shape
    pairs = packed.T.reshape(-1).view(torch.uint8).view(columns, rows, _NIBBLES // 2)  # little-endian: lowest first
    codes = torch.empty(columns, _NIBBLES, rows, dtype=torch.uint8)
    for byte in range(_NIBBLES // 2):
        codes[:, order[2 * byte]] = pairs[..., byte] & 15
        codes[:, order[2 * byte + 1]] = pairs[..., byte] >> 4
    return codes.view(columns * _NIBBLES, rows)
