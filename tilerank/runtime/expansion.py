"""How latent attention computes the sequences of a step: absorbed, expanded (kernels/latent.py), or split over ranks.

The expanded form takes fewer operations for many rows. If ranks share contexts out, a sequence with one row is split:
every rank attends to a part of its tokens for the heads of all. The choice depends on a sequence's own rows and length
alone, so that the bits of a row do not depend on the other sequences of a step; they do depend on how its prompt is
cut.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from tilerank.kernels.kv_pages import PAGE_TOKENS

from .cache import num_pages

MAX_TOKENS = 8192
"""Keys and values of a longer sequence are not expanded: with 128 heads on one rank, these take 1.2 GB."""

Expands = Callable[[int, int], bool]
"""Returns whether a sequence with so many rows in a step, and so many tokens, is computed in the expanded form."""


@dataclass(frozen=True)
class Runs:
    """Sequences of a batch without the others.

    rows: [m] int64, their rows in the batch, None if these are all; the others as in Batch. kv_starts: [s] int32, if
    they are split: the first token of this rank's parts, of which seq_lens are then the lengths.
    """

    rows: Tensor | None
    page_tables: Tensor
    seq_lens: Tensor
    query_starts: Tensor
    kv_starts: Tensor | None = None


@dataclass(frozen=True)
class Expansion:
    """expanded: for each expanded sequence its pages in the cache [p] int32, and the sequence itself, whose page i is
    pages[i]. split, absorbed: the sequences that are split, and the others; None if there are none."""

    expanded: tuple[tuple[Tensor, Runs], ...]
    split: Runs | None
    absorbed: Runs | None


@dataclass(frozen=True)
class ContextPart:
    """The part of every context that one of `ranks` ranks reads: whole pages, as many as the others or one more."""

    rank: int
    ranks: int

    def tokens(self, length: int) -> tuple[int, int]:
        """Return the first token and the number of tokens, of a sequence of `length` tokens."""
        pages = num_pages(length)
        first, end = (pages * edge // self.ranks * PAGE_TOKENS for edge in (self.rank, self.rank + 1))
        return first, min(end, length) - first


def expansion(
    expands: Expands,
    starts: Sequence[int],
    lengths: Sequence[int],
    tables: Sequence[Sequence[int]],
    part: ContextPart | None = None,
) -> Expansion | None:
    """Return the expansion of a step; None if all sequences are absorbed.

    starts: the first row of every sequence, and the number of rows. lengths: tokens of the sequences, those of the step
    included. tables: their pages. part: what this rank reads of a context, if ranks share contexts out.
    """
    counts = [stop - start for start, stop in pairwise(starts)]
    split, expanded, absorbed = list[int](), list[int](), list[int]()
    for i, (rows, length) in enumerate(zip(counts, lengths, strict=True)):
        if part is not None and rows == 1:
            split.append(i)
        elif length <= MAX_TOKENS and expands(rows, length):
            expanded.append(i)
        else:
            absorbed.append(i)
    if not split and not expanded:
        return None

    def runs(numbers: list[int], pages: list[list[int]], parts: Sequence[tuple[int, int]] = ()) -> Runs:
        rows = [row for i in numbers for row in range(starts[i], starts[i + 1])]
        width = max(map(len, pages))
        firsts = [0]
        for i in numbers:
            firsts.append(firsts[-1] + counts[i])
        return Runs(
            None if len(rows) == starts[-1] else torch.tensor(rows, dtype=torch.int64),
            torch.tensor([table + [0] * (width - len(table)) for table in pages], dtype=torch.int32),
            _int32([tokens for _, tokens in parts] or [lengths[i] for i in numbers]),
            _int32(firsts),
            _int32([first for first, _ in parts]) if parts else None,
        )

    used = [list(table[: num_pages(length)]) for table, length in zip(tables, lengths, strict=True)]
    parts = [part.tokens(lengths[i]) for i in split] if part is not None else []
    return Expansion(
        tuple((_int32(used[i]), runs([i], [list(range(len(used[i])))])) for i in expanded),
        runs(split, [used[i] for i in split], parts) if split else None,
        runs(absorbed, [used[i] for i in absorbed]) if absorbed else None,
    )


def _int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
