"""The interface of what drafts the next tokens of texts on a rank, and the draft head of the model behind it."""

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from ..protocol.rank_messages import Chunk, Step
from ..protocol.sizes import KEPT_ROWS
from ..step.batch import Batch, BatchContent, padded_size
from ..step.bytes_per_step import BytesPerStep, bytes_per_draft
from ..step.cache import Cache
from ..step.model import KeptStates, Model
from ..step.step_graphs import Forward


class Drafter(ABC):
    """Computes logits after the tokens of chunks. All ranks run it with the same chunks.

    content: of its batches. step_bytes: what a pass reads on this rank.
    """

    content: BatchContent
    step_bytes: BytesPerStep

    def begin(self, step: Step) -> None:
        """The model is about to compute a step."""
        return

    @abstractmethod
    def forward(self, chunks: Sequence[Chunk], batch: Batch, *, is_recorded: bool) -> Forward:
        """Return a pass over the tokens of `chunks`, which `batch` has, each as often as it is called. is_recorded:
        whether the batch is padded for recorded steps, in which all rows have logits."""

    def tokens(self, columns: list[int]) -> list[int]:
        """Return the tokens of columns of the logits."""
        return columns


class HeadDrafter(Drafter):
    """The draft head of `model`, over the hidden states that the model keeps of a step. sequences: of the largest
    decode batch."""

    def __init__(self, model: Model, caches: Sequence[Cache], sequences: int) -> None:
        self.content = replace(model.batch_content(), has_states=False)
        self.step_bytes = bytes_per_draft(model)
        head = model.draft_head
        assert head is not None
        self._token_ids = None if head.vocabulary is None else head.vocabulary.token_ids()
        self._model, self._caches = model, caches
        # Tensors over arrays, as in BatchFiller.
        self._read, self._replaced = (array("q", bytes(8 * padded_size(sequences))) for _ in range(2))
        self._padded_states: dict[int, KeptStates] = {}  # over these arrays, by the size of the batch
        self._rows: dict[int, range] = {}  # the kept ones of each sequence, by its number; those of its next pass first

    def begin(self, step: Step) -> None:
        starts = accumulate((len(chunk.token_ids) for chunk in step.chunks), initial=0)
        self._rows = {
            chunk.sequence: range(start, start + len(chunk.token_ids))
            for chunk, start in zip(step.chunks, starts, strict=False)
        }

    def forward(self, chunks: Sequence[Chunk], batch: Batch, *, is_recorded: bool) -> Forward:
        rows = [self._rows[chunk.sequence][: len(chunk.token_ids)] for chunk in chunks]
        for chunk, of_chunk in zip(chunks, rows, strict=True):
            self._rows[chunk.sequence] = of_chunk[-1:]
        read = [row for of_chunk in rows for row in of_chunk]
        if is_recorded:
            _, shortest = min(zip(chunks, rows, strict=True), key=lambda pair: pair[0].start)
            hidden = self._padded(read, shortest[0], len(batch.token_ids))
        else:
            replaced = [
                row
                for of_chunk, chunk in zip(rows, chunks, strict=True)
                for row in of_chunk[len(of_chunk) - chunk.logits :]
            ]
            hidden = KeptStates(torch.tensor(read), torch.tensor(replaced, dtype=torch.int64))
        return lambda: self._model.draft(batch, hidden, self._caches)

    def tokens(self, columns: list[int]) -> list[int]:
        return columns if self._token_ids is None else [self._token_ids[column] for column in columns]

    def _padded(self, read: list[int], copied: int, size: int) -> KeptStates:
        """Return the rows of a recorded step. Padding reads row `copied`, which is that of the sequence whose tokens it
        repeats, and replaces rows that no step has."""
        padding = size - len(read)
        self._read[:size] = array("q", read + [copied] * padding)
        self._replaced[:size] = array("q", [*read, *range(KEPT_ROWS - padding, KEPT_ROWS)])
        if size not in self._padded_states:
            tensors = [torch.frombuffer(rows, dtype=torch.int64)[:size] for rows in (self._read, self._replaced)]
            self._padded_states[size] = KeptStates(*tensors)
        return self._padded_states[size]
