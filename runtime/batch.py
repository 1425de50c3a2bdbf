"""One step as tensors: what the kernels want to know of a batch of sequences of different lengths."""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from tilerank.kernels import ops
from tilerank.kernels.attention import KV_BLOCK

from .step import Step


@dataclass(frozen=True)
class Wanted:
    """The m rows of a batch whose logits are wanted, the last ones of each sequence.

    rows: [m] int64. starts: [s + 1] int32, a sequence's first one among them.
    """

    rows: Tensor
    starts: Tensor

    def take(self, x: Tensor) -> Tensor:
        """x[t, d] -> [m, d]"""
        return ops.take_rows(x, self.rows)


@dataclass(frozen=True)
class Batch:
    """t tokens of s sequences, one sequence after the other.

    token_ids, positions: [t] int64. slots: [t] int64, where keys and values go: page * KV_BLOCK + offset.
    block_tables: [s, b] int32, the pages of every sequence in order. seq_lens: [s] int32, tokens of a sequence once
    this step's are in. query_starts: [s + 1] int32, a sequence's first row. wanted: the rows to project on the
    vocabulary, None if that is all of them.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    query_starts: Tensor
    wanted: Wanted | None = None

    @staticmethod
    def of(step: Step, tables: Mapping[int, list[int]]) -> "Batch":
        """`tables` are the pages of the sequences, by number."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        wanted: list[int] = []
        starts = [0]
        for chunk in step.chunks:
            table = tables[chunk.sequence]
            span = range(chunk.start, chunk.start + len(chunk.token_ids))
            token_ids += chunk.token_ids
            positions += span
            slots += [table[position // KV_BLOCK] * KV_BLOCK + position % KV_BLOCK for position in span]
            starts.append(len(token_ids))
            wanted += range(starts[-1] - chunk.logits, starts[-1])
        pages = [tables[chunk.sequence] for chunk in step.chunks]
        width = max(map(len, pages))
        return Batch(
            token_ids=_of_longs(token_ids),
            positions=_of_longs(positions),
            slots=_of_longs(slots),
            block_tables=torch.tensor([row + [0] * (width - len(row)) for row in pages], dtype=torch.int32),
            seq_lens=torch.tensor([c.start + len(c.token_ids) for c in step.chunks], dtype=torch.int32),
            query_starts=torch.tensor(starts, dtype=torch.int32),
            wanted=None if len(wanted) == len(token_ids) else _wanted(wanted, step),
        )


def _wanted(rows: list[int], step: Step) -> Wanted:
    starts = accumulate((chunk.logits for chunk in step.chunks), initial=0)
    return Wanted(torch.tensor(rows, dtype=torch.int64), torch.tensor(list(starts), dtype=torch.int32))


def _of_longs(values: list[int]) -> Tensor:
    """An int64 tensor of one or more numbers, in a seventh of the time that torch takes for a prompt's."""
    return torch.frombuffer(array("q", values), dtype=torch.int64)
