"""One step as tensors: what the model's kernels read of a batch of sequences of different lengths.

BatchFiller is the one place where positions, slots and page tables are derived from a step.
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from tilerank.kernels import ops
from tilerank.kernels.kv_pages import PAGE_TOKENS

from .rank_messages import Chunk, Step

TILE_ROWS = 16
"""From this batch size on, padded sizes are this far apart: a matrix tile computes so many rows anyway."""


@dataclass
class Held:
    """What a worker remembers of a sequence between steps. pages: its page table."""

    pages: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class LogitRows:
    """The m rows of a batch whose logits are computed, the last ones of each sequence.

    rows: [m] int64. starts: [s + 1] int32, the first of a sequence's rows among them.
    """

    rows: Tensor
    starts: Tensor

    def take(self, x: Tensor) -> Tensor:
        """x[t, d] -> [m, d]"""
        return ops.take_rows(x, self.rows)


@dataclass(frozen=True)
class Batch:
    """t tokens of s sequences, one sequence after the other.

    token_ids: [t] int64. positions: [1, t] int64. slots: [t] int64, where keys and values are stored: page *
    PAGE_TOKENS + offset. page_tables: [s, p] int32, the pages of every sequence in order. seq_lens: [s] int32, tokens
    of a sequence including this step's. query_starts: [s + 1] int32, a sequence's first row. logit_rows: None if the
    logits of all rows are computed.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    page_tables: Tensor
    seq_lens: Tensor
    query_starts: Tensor
    logit_rows: LogitRows | None = None


def padded_size(sequences: int) -> int:
    """Return the batch size that is recorded for so many sequences: 1, 2, 4, 8, 16, then multiples of 16."""
    if sequences <= TILE_ROWS:
        return 1 << (sequences - 1).bit_length()
    return -(-sequences // TILE_ROWS) * TILE_ROWS


class _Rows:
    """The rows of a step as Python lists, chunk by chunk."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.positions: list[int] = []
        self.slots: list[int] = []
        self.starts = [0]
        self.lengths: list[int] = []

    def add(self, chunk: Chunk, pages: list[int]) -> None:
        span = range(chunk.start, chunk.start + len(chunk.token_ids))
        self.token_ids += chunk.token_ids
        self.positions += span
        self.slots += [pages[position // PAGE_TOKENS] * PAGE_TOKENS + position % PAGE_TOKENS for position in span]
        self.starts.append(len(self.token_ids))
        self.lengths.append(span.stop)

    def add_padding(self, token_id: int, position: int, slot: int) -> None:
        """A row of a sequence that has `position` tokens before it; its key and value are stored in `slot`."""
        self.token_ids.append(token_id)
        self.positions.append(position)
        self.slots.append(slot)
        self.lengths.append(position + 1)


class BatchFiller:
    """Turns steps into batches: into new tensors, or, for decode steps, into the tensors that recorded steps read.

    max_sequences, max_pages: the largest decode batch, and the longest page table. spare_page: a page of the cache that
    belongs to no sequence; padding rows store their keys and values there. copy_padding: padding rows repeat a row of
    the batch, so that in a mixture they choose no other experts; otherwise they are sequences of one token, whose
    attention reads next to nothing.
    """

    def __init__(self, *, max_sequences: int, max_pages: int, spare_page: int, copy_padding: bool) -> None:
        self._max_sequences = max_sequences
        self._spare_page = spare_page
        self._copy_padding = copy_padding
        rows = padded_size(max_sequences)
        # Tensors over arrays: writing to an array takes a fraction of the time of writing to a tensor.
        self._token_ids, self._positions, self._slots = (array("q", bytes(8 * rows)) for _ in range(3))
        self._lengths = array("i", bytes(4 * rows))
        self._page_tables = torch.full((rows, max_pages), spare_page, dtype=torch.int32)
        self._table_of: list[tuple[int, int] | None] = [None] * rows  # the sequence in a row, and how many pages of it
        self._query_starts = torch.arange(rows + 1, dtype=torch.int32)
        self._padded: dict[int, Batch] = {}

    def is_decode(self, step: Step) -> bool:
        """Return whether every sequence has one token and one row of logits, so that a recorded step can compute it."""
        return len(step.chunks) <= self._max_sequences and all(
            len(chunk.token_ids) == 1 and chunk.logits == 1 for chunk in step.chunks
        )

    def fresh(self, step: Step, held: Mapping[int, Held]) -> Batch:
        """Return a batch of new tensors. held: by the number of the sequence."""
        rows = _Rows()
        for chunk in step.chunks:
            rows.add(chunk, held[chunk.sequence].pages)
        tables = [held[chunk.sequence].pages for chunk in step.chunks]
        width = max(map(len, tables))
        logit_rows = [
            row
            for chunk, stop in zip(step.chunks, rows.starts[1:], strict=True)
            for row in range(stop - chunk.logits, stop)
        ]
        return Batch(
            token_ids=_int64(rows.token_ids),
            positions=_int64(rows.positions)[None],
            slots=_int64(rows.slots),
            page_tables=torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32),
            seq_lens=torch.tensor(rows.lengths, dtype=torch.int32),
            query_starts=torch.tensor(rows.starts, dtype=torch.int32),
            logit_rows=None if len(logit_rows) == len(rows.token_ids) else _logit_rows(logit_rows, step),
        )

    def padded(self, step: Step, held: Mapping[int, Held]) -> Batch:
        """Fill the shared tensors with a decode step, padded to `padded_size` rows. The same size gives the same Batch,
        whose values the next call overwrites."""
        rows = _Rows()
        for row, chunk in enumerate(step.chunks):
            pages = held[chunk.sequence].pages
            rows.add(chunk, pages)
            self._set_table(row, chunk.sequence, pages)
        size = padded_size(len(step.chunks))
        # The copy of the shortest sequence reads least. Its hidden state is that of the row it repeats, bit for bit.
        shortest = min(step.chunks, key=lambda chunk: chunk.start)
        for row in range(len(step.chunks), size):
            slot = self._spare_page * PAGE_TOKENS + row % PAGE_TOKENS
            if self._copy_padding:
                self._set_table(row, shortest.sequence, held[shortest.sequence].pages)
                rows.add_padding(shortest.token_ids[0], shortest.start, slot)
            else:
                self._clear_table(row)
                rows.add_padding(0, 0, slot)
        self._token_ids[:size] = array("q", rows.token_ids)
        self._positions[:size] = array("q", rows.positions)
        self._slots[:size] = array("q", rows.slots)
        self._lengths[:size] = array("i", rows.lengths)
        if size not in self._padded:
            self._padded[size] = self._shared(size)
        return self._padded[size]

    def _shared(self, size: int) -> Batch:
        return Batch(
            token_ids=torch.frombuffer(self._token_ids, dtype=torch.int64)[:size],
            positions=torch.frombuffer(self._positions, dtype=torch.int64)[None, :size],
            slots=torch.frombuffer(self._slots, dtype=torch.int64)[:size],
            page_tables=self._page_tables[:size],
            seq_lens=torch.frombuffer(self._lengths, dtype=torch.int32)[:size],
            query_starts=self._query_starts[: size + 1],
        )

    def _set_table(self, row: int, sequence: int, pages: list[int]) -> None:
        if self._table_of[row] != (sequence, len(pages)):
            self._page_tables[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
            self._table_of[row] = sequence, len(pages)

    def _clear_table(self, row: int) -> None:
        if self._table_of[row] is not None:
            self._page_tables[row, 0] = self._spare_page
            self._table_of[row] = None


def _logit_rows(rows: list[int], step: Step) -> LogitRows:
    starts = accumulate((chunk.logits for chunk in step.chunks), initial=0)
    return LogitRows(torch.tensor(rows, dtype=torch.int64), torch.tensor(list(starts), dtype=torch.int32))


def _int64(values: list[int]) -> Tensor:
    """Return a tensor of one or more numbers, in a seventh of the time that torch.tensor takes for a prompt's."""
    return torch.frombuffer(array("q", values), dtype=torch.int64)
