"""One step as tensors: what the model's kernels read of a batch of sequences of different lengths.

BatchFiller is the one place where positions, slots and page tables are derived from a step.
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor

from tilerank.kernels import ops

from ..protocol.rank_messages import Chunk, Step
from . import media_rows
from .hidden_rows import HiddenRows, hidden_rows
from .latent_forms import ContextPart, Expands, LatentForms, Runs, latent_forms
from .media_rows import Inserts, Kept, int64
from .page_tables import PageTables
from .source_runs import RankSource, SourceFiller, SourceRuns
from .visible import VisibleEnds, ends_on_both_sides, ends_with_media

TILE_ROWS = 16
"""From this batch size on, padded sizes are this far apart: a matrix tile computes so many rows anyway."""


@dataclass
class RankSequence:
    """A sequence as a worker keeps it between steps.

    pages: its page table. window_pages: that of layers with a window, whose entries before the window are out of date.
    state_tokens: how many of its tokens its states have taken in. Tokens after them, if any, are drafts of the last
        step that were right.
    """

    pages: list[int] = field(default_factory=list)
    source: RankSource = field(default_factory=RankSource)
    window_pages: list[int] = field(default_factory=list)
    state_tokens: int = 0

    def add_window_pages(self, index: int, pages: list[int]) -> None:
        """Let the page table of layers with a window go on with `pages` at this index."""
        self.window_pages.extend([0] * (index - len(self.window_pages)))
        self.window_pages.extend(pages)


@dataclass(frozen=True)
class LogitRows:
    """The m rows of a batch whose logits are computed, the last ones of each sequence.

    rows: [m] int64. starts: [s + 1] int32, the first of a sequence's rows among them. visible: as in Batch.
    """

    rows: Tensor
    starts: Tensor
    visible: VisibleEnds | None = None

    def take(self, x: Tensor) -> Tensor:
        """x[t, d] -> [m, d]"""
        return ops.take_rows(x, self.rows)


@dataclass(frozen=True)
class WindowTables:
    """The slots and page tables of layers with a window, as in Batch. Entries before the window are out of date."""

    slots: Tensor
    page_tables: Tensor


@dataclass(frozen=True)
class Batch:
    """t tokens of s sequences, one sequence after the other.

    token_ids: [t] int64.
    positions: [axes, t] int64.
    slots: [t] int64, where keys and values are stored: page * PAGE_TOKENS + offset.
    page_tables: [s, p] int32, the pages of every sequence in order.
    seq_lens: [s] int32, tokens of a sequence including this step's.
    query_starts: [s + 1] int32, a sequence's first row.
    logit_rows: None if the logits of all rows are computed.
    inserts: None in recorded decode steps.
    state_slots: [s] int32, where the states of a sequence are; None for models without states. A sequence whose tokens
        are all in this step begins with states of zeros. A draft has the slot of the row before it, and no other
        sequence has the slot of another one. A padding row that repeats row j has the slot -1 - j: it gets the output
        of row j and touches no state (kernels/delta.py).
    kept_drafts: [s] int32, how many drafts in the slot of a sequence are tokens before its row. Those of drafts are not
        read. None for models without states.
    latent_forms: None if no sequence is in another form of latent attention than the absorbed one.
    source: None if no row sees anything by cross-attention; recorded decode steps of models with cross-attention always
        have it.
    kept: None in recorded decode steps.
    hidden: None unless a request asks for hidden states.
    windows: None for models without layers with a window.
    visible: up to where rows attend. None if all attend to themselves and those before them, as in texts of models that
        generate text.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    page_tables: Tensor
    seq_lens: Tensor
    query_starts: Tensor
    logit_rows: LogitRows | None = None
    inserts: Inserts | None = None
    state_slots: Tensor | None = None
    kept_drafts: Tensor | None = None
    latent_forms: LatentForms | None = None
    source: SourceRuns | None = None
    kept: Kept | None = None
    hidden: HiddenRows | None = None
    windows: WindowTables | None = None
    visible: VisibleEnds | None = None

    def last_rows(self) -> "Batch":
        """Return a batch for layers that store nothing and compute only the rows with logits.

        Tokens, positions and slots remain those of all rows.
        """
        assert self.logit_rows is not None
        only = self.logit_rows
        return replace(self, query_starts=only.starts, visible=only.visible, logit_rows=None)

    def tables(self, window: int) -> "Batch | WindowTables":
        """Return what has the slots and page tables of layers with this window, 0 for those without."""
        if not window:
            return self
        assert self.windows is not None
        return self.windows


def padded_size(sequences: int) -> int:
    """Return the batch size that is recorded for so many sequences: 1, 2, 4, 8, 16, then multiples of 16."""
    if sequences <= TILE_ROWS:
        return 1 << (sequences - 1).bit_length()
    return -(-sequences // TILE_ROWS) * TILE_ROWS


class _StepRows:
    """The rows of a step as Python lists, chunk by chunk. positions: one list for each axis."""

    def __init__(self, axes: int) -> None:
        self.token_ids: list[int] = []
        self.positions: list[list[int]] = [[] for _ in range(axes)]
        self.starts = [0]
        self.lengths: list[int] = []

    def add(self, chunk: Chunk) -> None:
        span = range(chunk.start, chunk.start + len(chunk.token_ids))
        self.token_ids += chunk.token_ids
        shifted = range(span.start + chunk.shift, span.stop + chunk.shift)
        for axis, positions in enumerate(self.positions):
            positions += chunk.positions[axis] if chunk.positions else shifted
        self.starts.append(len(self.token_ids))
        self.lengths.append(span.stop)

    def add_padding(self, token_id: int, position: int, index: int) -> None:
        """A row of a sequence that has `index` tokens before it."""
        self.token_ids.append(token_id)
        for positions in self.positions:
            positions.append(position)
        self.lengths.append(index + 1)


@dataclass(frozen=True)
class BatchContent:
    """The contents of the batches of a model.

    position_axes: the number of positions of a token.
    has_states: whether layers keep states.
    copy_padding: padding rows repeat a row of the batch, so that in a mixture they choose no other experts; otherwise
        they are sequences of one token, whose attention reads next to nothing.
    expands: which sequences latent attention expands (latent_forms.py); None for a model without it.
    context_part: what this rank reads of a context, if ranks share contexts out.
    kept_layer: as in Kept; 0 for a model that does not speak.
    whole_media: whether the tokens of a medium attend to all of it. whole_texts: whether those of a text do. reach: to
        how many tokens after it a token attends in layers with a window, if so.
    """

    position_axes: int = 1
    has_states: bool = False
    copy_padding: bool = False
    expands: Expands | None = None
    context_part: ContextPart | None = None
    kept_layer: int = 0
    whole_media: bool = False
    whole_texts: bool = False
    reach: int = 0


@dataclass(frozen=True)
class BatchLimits:
    """The largest batches of a rank.

    sequences, pages: the largest decode batch, and the longest page table.
    spare_page: a page of the cache that belongs to no sequence; padding rows store their keys and values there.
    source_pages: of all sources together; 0 for models without cross-attention.
    spare_window_page: as spare_page, of layers with a window; None for models without.
    """

    sequences: int
    pages: int
    spare_page: int
    source_pages: int = 0
    spare_window_page: int | None = None


class BatchFiller:
    """Turns steps into batches: into new tensors, or, for decode steps, into the tensors that recorded steps read."""

    def __init__(self, content: BatchContent, limits: BatchLimits) -> None:
        self._content, self._limits = content, limits
        rows = padded_size(limits.sequences)
        # Tensors over arrays: writing to an array takes a fraction of the time of writing to a tensor.
        self._token_ids = array("q", bytes(8 * rows))
        self._positions = array("q", bytes(8 * rows * content.position_axes))  # axis by axis
        self._rows = rows
        self._lengths, self._state_slots, self._kept_drafts = (array("i", bytes(4 * rows)) for _ in range(3))
        self._part_starts, self._part_lengths = (array("i", bytes(4 * rows)) for _ in range(2))
        self._pages = PageTables(rows, limits.pages, limits.spare_page)
        spare = limits.spare_window_page
        self._window_pages = None if spare is None else PageTables(rows, limits.pages, spare)
        self._query_starts = torch.arange(rows + 1, dtype=torch.int32)
        self._sources = SourceFiller(rows, limits.source_pages) if limits.source_pages else None
        self._padded: dict[int, Batch] = {}

    def is_decode(self, step: Step) -> bool:
        """Return whether a recorded step can compute this one: every sequence has one token and one row of logits, and
        neither encoded media nor positions of its own, and none asks for hidden states."""
        return (
            len(step.chunks) <= self._limits.sequences
            and not step.hidden_layers
            and all(
                len(chunk.token_ids) == 1 and chunk.logits == 1 and not chunk.placeholder_ranges and not chunk.positions
                for chunk in step.chunks
            )
        )

    def fresh(self, step: Step, held: Mapping[int, RankSequence], encodings: Mapping[int, Tensor]) -> Batch:
        """Return a batch of new tensors. held: by the number of the sequence. encodings: [levels, tokens, hidden] each,
        by the number that placeholder ranges name."""
        content, rows = self._content, _StepRows(self._content.position_axes)
        for chunk in step.chunks:
            rows.add(chunk)
        tables, window_tables = _tables(step, held)
        slots, page_tables = self._pages.fresh(step, tables)
        logit_rows = [
            row
            for chunk, stop in zip(step.chunks, rows.starts[1:], strict=True)
            for row in range(stop - chunk.logits, stop)
        ]
        visible = self._visible(step, rows.starts)
        return Batch(
            token_ids=int64(rows.token_ids),
            positions=torch.stack([int64(positions) for positions in rows.positions]),
            slots=slots,
            page_tables=page_tables,
            seq_lens=torch.tensor(rows.lengths, dtype=torch.int32),
            query_starts=torch.tensor(rows.starts, dtype=torch.int32),
            logit_rows=None if len(logit_rows) == len(rows.token_ids) else _logit_rows(logit_rows, step, visible),
            inserts=media_rows.inserts(step, rows.starts, encodings),
            state_slots=torch.tensor(step.state_slots, dtype=torch.int32) if content.has_states else None,
            kept_drafts=torch.tensor(_kept_drafts(step, held), dtype=torch.int32) if content.has_states else None,
            latent_forms=latent_forms(content.expands, rows.starts, rows.lengths, tables, content.context_part)
            if content.expands
            else None,
            source=self._sources.fresh(step, _sources(step, held)) if self._sources else None,
            kept=media_rows.kept(step, rows.starts, content.kept_layer),
            hidden=hidden_rows(step.hidden_layers, logit_rows),
            windows=WindowTables(*self._window_pages.fresh(step, window_tables)) if self._window_pages else None,
            visible=visible,
        )

    def _visible(self, step: Step, starts: list[int]) -> VisibleEnds | None:
        if self._content.whole_texts:
            return ends_on_both_sides(step, self._content.reach)
        return ends_with_media(step, starts) if self._content.whole_media else None

    def padded(self, step: Step, held: Mapping[int, RankSequence]) -> Batch:
        """Fill the shared tensors with a decode step, padded to `padded_size` rows. The same size gives the same Batch,
        whose values the next call overwrites."""
        rows = _StepRows(self._content.position_axes)
        for chunk in step.chunks:
            rows.add(chunk)
        size = padded_size(len(step.chunks))
        # The copy of the shortest sequence reads least. Its hidden state is that of the row it repeats, bit for bit.
        copied = min(range(len(step.chunks)), key=lambda index: step.chunks[index].start)
        shortest = step.chunks[copied]
        for _ in range(len(step.chunks), size):
            if self._content.copy_padding:
                rows.add_padding(shortest.token_ids[0], shortest.start + shortest.shift, shortest.start)
            else:
                rows.add_padding(0, 0, 0)
        tables, window_tables = _tables(step, held)
        read = copied if self._content.copy_padding else None
        self._pages.fill(step, tables, size, read)
        if self._window_pages:
            self._window_pages.fill(step, window_tables, size, read)
        self._token_ids[:size] = array("q", rows.token_ids)
        for axis, positions in enumerate(rows.positions):
            start = axis * self._rows
            self._positions[start : start + size] = array("q", positions)
        self._lengths[:size] = array("i", rows.lengths)
        if self._content.context_part:
            for row, length in enumerate(rows.lengths):
                self._part_starts[row], self._part_lengths[row] = self._content.context_part.tokens(length)
        if self._content.has_states:
            missing = size - len(step.chunks)
            self._state_slots[:size] = array("i", step.state_slots + [-1 - copied] * missing)
            self._kept_drafts[:size] = array("i", _kept_drafts(step, held) + [0] * missing)
        if self._sources:
            self._sources.fill(step, _sources(step, held), size)
        if size not in self._padded:
            self._padded[size] = self._shared(size)
        return self._padded[size]

    def _shared(self, size: int) -> Batch:
        content = self._content
        slots, page_tables = self._pages.filled(size)
        return Batch(
            token_ids=torch.frombuffer(self._token_ids, dtype=torch.int64)[:size],
            positions=torch.frombuffer(self._positions, dtype=torch.int64).view(content.position_axes, self._rows)[
                :, :size
            ],
            slots=slots,
            page_tables=page_tables,
            seq_lens=torch.frombuffer(self._lengths, dtype=torch.int32)[:size],
            query_starts=self._query_starts[: size + 1],
            state_slots=torch.frombuffer(self._state_slots, dtype=torch.int32)[:size] if content.has_states else None,
            kept_drafts=torch.frombuffer(self._kept_drafts, dtype=torch.int32)[:size] if content.has_states else None,
            latent_forms=LatentForms((), self._split_runs(size), None) if content.context_part else None,
            source=self._sources.shared(size) if self._sources else None,
            windows=WindowTables(*self._window_pages.filled(size)) if self._window_pages else None,
        )

    def _split_runs(self, size: int) -> Runs:
        starts, lengths = (
            torch.frombuffer(values, dtype=torch.int32)[:size] for values in (self._part_starts, self._part_lengths)
        )
        return Runs(None, self._pages.filled(size)[1], lengths, self._query_starts[: size + 1], starts)


def _tables(step: Step, held: Mapping[int, RankSequence]) -> tuple[list[list[int]], list[list[int]]]:
    """Return the page tables of all chunks, and those of layers with a window."""
    sequences = [held[chunk.sequence] for chunk in step.chunks]
    return [sequence.pages for sequence in sequences], [sequence.window_pages for sequence in sequences]


def _kept_drafts(step: Step, held: Mapping[int, RankSequence]) -> list[int]:
    """Return how many tokens of the sequence of each chunk its states have not taken in before it."""
    return [chunk.start - held[chunk.sequence].state_tokens for chunk in step.chunks]


def _sources(step: Step, held: Mapping[int, RankSequence]) -> dict[int, RankSource]:
    return {chunk.sequence: held[chunk.sequence].source for chunk in step.chunks}


def _logit_rows(rows: list[int], step: Step, visible: VisibleEnds | None) -> LogitRows:
    starts = accumulate((chunk.logits for chunk in step.chunks), initial=0)
    numbers = torch.tensor(rows, dtype=torch.int64)
    of_rows = None if visible is None else visible.take(numbers)
    return LogitRows(numbers, torch.tensor(list(starts), dtype=torch.int32), of_rows)
