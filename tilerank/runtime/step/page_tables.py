"""Page tables of a batch: in which slots its rows store keys and values, and which pages they read.

All layers share these tensors, except that layers with a window have pages of their own.
"""

from array import array

import torch
from torch import Tensor

from tilerank.kernels.kv_pages import PAGE_TOKENS

from ..protocol.rank_messages import Step


class PageTables:
    """Fills slots and page tables: new tensors, or those that recorded steps read.

    rows, pages: the most rows of a recorded step, and the longest page table. spare_page: belongs to no sequence;
    padding rows store there.
    """

    def __init__(self, rows: int, pages: int, spare_page: int) -> None:
        self._spare_page = spare_page
        # A tensor over an array: writing to an array takes a fraction of the time of writing to a tensor.
        self._slots = array("q", bytes(8 * rows))
        self._tables = torch.full((rows, pages), spare_page, dtype=torch.int32)
        self._table_of: list[tuple[int, int] | None] = [None] * rows  # the sequence in a row, and how many pages of it

    def fresh(self, step: Step, tables: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Return the slots [t] int64 and the page tables [s, p] int32 of a step. tables: of each chunk."""
        slots = array("q")
        for chunk, table in zip(step.chunks, tables, strict=True):
            span = range(chunk.start, chunk.start + len(chunk.token_ids))
            slots.extend(table[index // PAGE_TOKENS] * PAGE_TOKENS + index % PAGE_TOKENS for index in span)
        width = max(map(len, tables))
        padded = torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32)
        return torch.frombuffer(slots, dtype=torch.int64), padded

    def fill(self, step: Step, tables: list[list[int]], size: int, copied: int | None) -> None:
        """Fill the tensors of a decode step of `size` rows. tables: of each chunk. copied: the chunk whose page table
        padding rows read; None if they read one token of the spare page."""
        slots = array("q")
        for row, (chunk, table) in enumerate(zip(step.chunks, tables, strict=True)):
            slots.append(table[chunk.start // PAGE_TOKENS] * PAGE_TOKENS + chunk.start % PAGE_TOKENS)
            self._set_table(row, chunk.sequence, table)
        for row in range(len(tables), size):
            slots.append(self._spare_page * PAGE_TOKENS + row % PAGE_TOKENS)
            if copied is not None:
                self._set_table(row, step.chunks[copied].sequence, tables[copied])
            elif self._table_of[row] is not None:
                self._tables[row, 0] = self._spare_page
                self._table_of[row] = None
        self._slots[:size] = slots

    def filled(self, size: int) -> tuple[Tensor, Tensor]:
        """Return the slots [size] and the page tables [size, p] that `fill` fills."""
        return torch.frombuffer(self._slots, dtype=torch.int64)[:size], self._tables[:size]

    def _set_table(self, row: int, sequence: int, table: list[int]) -> None:
        if self._table_of[row] != (sequence, len(table)):
            self._tables[row, : len(table)] = torch.tensor(table, dtype=torch.int32)
            self._table_of[row] = sequence, len(table)
