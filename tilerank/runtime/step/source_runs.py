"""The ranges of sources that the rows of a step attend to by cross-attention, as tensors."""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..protocol.rank_messages import Step


@dataclass
class RankSource:
    """The source of a sequence, as a worker keeps it between steps. pages: its page table. visible: first, count and
    shown of the last row (prompt.py: VisibleRange)."""

    pages: list[int] = field(default_factory=list)
    visible: tuple[int, int, bool] = (0, 0, False)


@dataclass(frozen=True)
class SourceRuns:
    """r runs of rows that see the same: a run is a sequence of the attention kernel.

    page_tables: [r, p] int32. starts, lengths: [r] int32, the range of the source in these pages; nothing if the length
    is 0. run_starts: [r + 1] int32, a run's first row. shown: [t] float32, 0 for rows that leave out the MLPs of layers
    of cross-attention.
    """

    page_tables: Tensor
    starts: Tensor
    lengths: Tensor
    run_starts: Tensor
    shown: Tensor


class SourceFiller:
    """Makes the runs of steps: new tensors, or, for decode steps of up to `rows` rows, those that recorded steps read.

    max_pages: of a source.
    """

    def __init__(self, rows: int, max_pages: int) -> None:
        # Zeros take no memory before they are written.
        self._page_tables = torch.zeros((rows, max_pages), dtype=torch.int32)
        self._table_of: list[list[int] | None] = [None] * rows
        self._starts, self._lengths = (array("i", bytes(4 * rows)) for _ in range(2))
        self._shown = array("f", bytes(4 * rows))
        self._run_starts = torch.arange(rows + 1, dtype=torch.int32)

    def fresh(self, step: Step, held: Mapping[int, RankSource]) -> SourceRuns | None:
        """Return None if no row sees anything. held: by the number of the sequence; as the worker remembers it before
        the step."""
        rows_of = {seen.sequence: seen.rows for seen in step.sources}
        tables, starts, lengths, run_starts, shown = [], [], [], [0], list[float]()
        for chunk in step.chunks:
            source = held[chunk.sequence]
            visible_ranges = rows_of.get(chunk.sequence) or [(0, *source.visible)]
            ends = [*(row for row, *_ in visible_ranges[1:]), len(chunk.token_ids)]
            for (row, first, count, is_shown), end in zip(visible_ranges, ends, strict=True):
                tables.append(source.pages)
                starts.append(first)
                lengths.append(count)
                run_starts.append(run_starts[-1] + end - row)
                shown += [float(is_shown)] * (end - row)
        if not any(lengths):
            return None
        width = max(1, *map(len, tables))
        return SourceRuns(
            page_tables=torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32),
            starts=torch.tensor(starts, dtype=torch.int32),
            lengths=torch.tensor(lengths, dtype=torch.int32),
            run_starts=torch.tensor(run_starts, dtype=torch.int32),
            shown=torch.tensor(shown, dtype=torch.float32),
        )

    def fill(self, step: Step, held: Mapping[int, RankSource], size: int) -> None:
        """Write a decode step of `size` rows to the shared tensors; its padding rows see nothing."""
        rows_of = {seen.sequence: seen.rows for seen in step.sources}
        for row, chunk in enumerate(step.chunks):
            source = held[chunk.sequence]
            _, first, count, is_shown = rows_of.get(chunk.sequence, [(0, *source.visible)])[0]
            self._starts[row], self._lengths[row], self._shown[row] = first, count, float(is_shown)
            if self._table_of[row] is not source.pages:
                self._table_of[row] = source.pages
                self._page_tables[row, : len(source.pages)] = torch.tensor(source.pages, dtype=torch.int32)
        for row in range(len(step.chunks), size):
            self._starts[row], self._lengths[row], self._shown[row] = 0, 0, 0.0

    def shared(self, size: int) -> SourceRuns:
        """Return the first `size` rows of the shared tensors."""
        return SourceRuns(
            page_tables=self._page_tables[:size],
            starts=torch.frombuffer(self._starts, dtype=torch.int32)[:size],
            lengths=torch.frombuffer(self._lengths, dtype=torch.int32)[:size],
            run_starts=self._run_starts[: size + 1],
            shown=torch.frombuffer(self._shown, dtype=torch.float32)[:size],
        )
