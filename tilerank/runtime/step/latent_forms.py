"""The forms in which latent attention computes the sequences of a step: absorbed, expanded, or split over ranks.

The expanded form (kernels/latent.py) takes fewer operations for many rows. If ranks share contexts out, a sequence
with one row is split: every rank attends to a part of its tokens for the heads of all. The choice depends on a
sequence's own rows and length alone, so that the bits of a row do not depend on the other sequences of a step; they do
depend on how its prompt is cut.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from tilerank.kernels.kv_pages import PAGE_TOKENS

from .cache import num_pages

PIECE_TOKENS = 6144
"""Keys and values of so many tokens are expanded at a time, and of the rows of the step with the last ones. With 128
heads on one rank and 2,048 rows, these take 1.2 GB."""

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
class Expanded:
    """A sequence in the expanded form.

    rows: as in Runs. pieces: consecutive parts of its tokens, each with its pages in the cache [p] int32, and as a
    sequence whose page i is pages[i]. The rows attend to all tokens of a piece; they are the last tokens of the last.
    """

    rows: Tensor | None
    pieces: tuple[tuple[Tensor, Runs], ...]


@dataclass(frozen=True)
class LatentForms:
    """The sequences that are expanded, those that are split, and the others; None if there are none."""

    expanded: tuple[Expanded, ...]
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


def latent_forms(
    expands: Expands,
    starts: Sequence[int],
    lengths: Sequence[int],
    tables: Sequence[Sequence[int]],
    part: ContextPart | None = None,
) -> LatentForms | None:
    """Return the forms of the sequences of a step; None if all are absorbed.

    starts: the first row of every sequence, and the number of rows. lengths: tokens of the sequences, those of the step
    included. tables: their pages. part: what this rank reads of a context, if ranks share contexts out.
    """
    counts = [stop - start for start, stop in pairwise(starts)]
    split, expanded, absorbed = list[int](), list[int](), list[int]()
    for i, (rows, length) in enumerate(zip(counts, lengths, strict=True)):
        if part is not None and rows == 1:
            split.append(i)
        elif expands(rows, length):
            expanded.append(i)
        else:
            absorbed.append(i)
    if not split and not expanded:
        return None

    def rows_of(numbers: list[int]) -> Tensor | None:
        rows = [row for i in numbers for row in range(starts[i], starts[i + 1])]
        return None if len(rows) == starts[-1] else torch.tensor(rows, dtype=torch.int64)

    def runs(numbers: list[int], pages: list[list[int]], parts: Sequence[tuple[int, int]] = ()) -> Runs:
        width = max(map(len, pages))
        firsts = [0]
        for i in numbers:
            firsts.append(firsts[-1] + counts[i])
        return Runs(
            rows_of(numbers),
            torch.tensor([table + [0] * (width - len(table)) for table in pages], dtype=torch.int32),
            _int32([tokens for _, tokens in parts] or [lengths[i] for i in numbers]),
            _int32(firsts),
            _int32([first for first, _ in parts]) if parts else None,
        )

    used = [list(table[: num_pages(length)]) for table, length in zip(tables, lengths, strict=True)]
    parts = [part.tokens(lengths[i]) for i in split] if part is not None else []
    return LatentForms(
        tuple(Expanded(rows_of([i]), _pieces(used[i], counts[i], lengths[i])) for i in expanded),
        runs(split, [used[i] for i in split], parts) if split else None,
        runs(absorbed, [used[i] for i in absorbed]) if absorbed else None,
    )


def _pieces(pages: list[int], rows: int, length: int) -> tuple[tuple[Tensor, Runs], ...]:
    """Return the pieces of a sequence of `length` tokens, of which a step has the last `rows`."""
    firsts = list(range(0, length - rows + 1, PIECE_TOKENS))
    pieces = []
    for first, end in pairwise([*firsts, length]):
        own = pages[first // PAGE_TOKENS : num_pages(end)]
        table = torch.arange(len(own), dtype=torch.int32)[None]
        pieces.append((_int32(own), Runs(None, table, _int32([end - first]), _int32([0, rows]))))
    return tuple(pieces)


def _int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
