"""Which sequences of a step latent attention computes in the expanded form (kernels/latent.py).

The expanded form takes fewer operations for many rows. The choice depends on a sequence's own rows and length alone, so
that the bits of a row do not depend on the other sequences of a step; they do depend on how its prompt is cut.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .cache import num_pages

MAX_TOKENS = 8192
"""Keys and values of a longer sequence are not expanded: with 128 heads on one rank, these take 1.2 GB."""

Expands = Callable[[int, int], bool]
"""Returns whether a sequence with so many rows in a step, and so many tokens, is computed in the expanded form."""


@dataclass(frozen=True)
class Runs:
    """Sequences of a batch without the others.

    rows: [m] int64, their rows in the batch, None if these are all; the others as in Batch.
    """

    rows: Tensor | None
    page_tables: Tensor
    seq_lens: Tensor
    query_starts: Tensor


@dataclass(frozen=True)
class Expansion:
    """expanded: for each expanded sequence its pages in the cache [p] int32, and the sequence itself, whose page i is
    pages[i]. absorbed: the other sequences, None if there are none."""

    expanded: tuple[tuple[Tensor, Runs], ...]
    absorbed: Runs | None


def expansion(
    expands: Expands, starts: Sequence[int], lengths: Sequence[int], tables: Sequence[Sequence[int]]
) -> Expansion | None:
    """Return the expansion of a step; None if it has no expanded sequence.

    starts: the first row of every sequence, and the number of rows. lengths: tokens of the sequences, those of the step
    included. tables: their pages.
    """
    counts = [stop - start for start, stop in pairwise(starts)]
    chosen = [length <= MAX_TOKENS and expands(rows, length) for rows, length in zip(counts, lengths, strict=True)]
    if not any(chosen):
        return None

    def runs(numbers: list[int], pages: list[list[int]]) -> Runs:
        rows = [row for i in numbers for row in range(starts[i], starts[i + 1])]
        width = max(map(len, pages))
        firsts = [0]
        for i in numbers:
            firsts.append(firsts[-1] + counts[i])
        return Runs(
            None if len(rows) == starts[-1] else torch.tensor(rows, dtype=torch.int64),
            torch.tensor([table + [0] * (width - len(table)) for table in pages], dtype=torch.int32),
            torch.tensor([lengths[i] for i in numbers], dtype=torch.int32),
            torch.tensor(firsts, dtype=torch.int32),
        )

    used = [list(table[: num_pages(length)]) for table, length in zip(tables, lengths, strict=True)]
    expanded = [i for i, is_chosen in enumerate(chosen) if is_chosen]
    absorbed = [i for i, is_chosen in enumerate(chosen) if not is_chosen]
    return Expansion(
        tuple((torch.tensor(used[i], dtype=torch.int32), runs([i], [list(range(len(used[i])))])) for i in expanded),
        runs(absorbed, [used[i] for i in absorbed]) if absorbed else None,
    )
