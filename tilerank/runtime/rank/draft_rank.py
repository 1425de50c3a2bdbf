"""The draft head of a model on one rank: it goes over the rows of the last step, and on from there by itself."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from tilerank.kernels import ops
from tilerank.kernels.errors import KernelError
from tilerank.kernels.kv_pages import PAGE_TOKENS

from ..protocol.rank_messages import Chunk, Draft, Step
from ..protocol.sizes import KEPT_ROWS
from ..step.batch import BatchFiller, BatchLimits, RankSequence, padded_size
from ..step.cache import Cache
from ..step.draft_rows import separate_drafts
from ..step.model import KeptStates, Model
from ..step.step_graphs import StepGraphs


class DraftRank:
    """Runs the draft head of `model`. All ranks run it with the same messages.

    limits: those of the steps of the model. graphs: recorded steps of the head alone; None if it runs eagerly.
    """

    def __init__(self, model: Model, caches: Sequence[Cache], limits: BatchLimits, graphs: StepGraphs | None) -> None:
        self._model, self._caches, self._graphs = model, caches, graphs
        self._filler = BatchFiller(replace(model.batch_content(), has_states=False), limits)
        # Tensors over arrays, as in BatchFiller.
        self._read, self._replaced = (array("q", bytes(8 * padded_size(limits.sequences))) for _ in range(2))
        self._first_rows: dict[int, int] = {}  # in the last step, by the number of the sequence

    def begin(self, step: Step) -> None:
        """The model is about to compute a step, and to keep the hidden states of its rows."""
        starts = accumulate((len(chunk.token_ids) for chunk in step.chunks), initial=0)
        self._first_rows = {chunk.sequence: start for chunk, start in zip(step.chunks, starts, strict=False)}

    def run(self, message: Draft, held: Mapping[int, RankSequence]) -> list[list[int]]:
        """Return the tokens that each sequence drafts: as many as the message says, or less where its pages end."""
        drafted: list[list[int]] = [[] for _ in message.chunks]
        chunks = dict(enumerate(message.chunks))
        firsts = {index: self._first_rows[chunk.sequence] for index, chunk in chunks.items()}
        rows = {index: range(first, first + len(chunks[index].token_ids)) for index, first in firsts.items()}
        while chunks:
            logits = self._logits(list(chunks.values()), [rows[index] for index in chunks], held)
            try:
                likeliest = self._argmax(logits) if logits.shape[0] else []
            except KernelError:
                break  # NaN, in what a text without NaN drafts: it goes on without drafts
            stops = accumulate(chunk.logits for chunk in chunks.values())
            following = dict[int, Chunk]()
            for (index, chunk), stop in zip(chunks.items(), stops, strict=True):
                if not chunk.logits:
                    continue
                token, end = likeliest[stop - 1], chunk.start + len(chunk.token_ids)
                drafted[index].append(token)
                if len(drafted[index]) < message.counts[index] and end < len(held[chunk.sequence].pages) * PAGE_TOKENS:
                    following[index] = Chunk(chunk.sequence, end, [token], [], 1, shift=chunk.shift)
                    rows[index] = rows[index][-1:]
            chunks = following
        return drafted

    def _logits(self, chunks: list[Chunk], rows: list[range], held: Mapping[int, RankSequence]) -> Tensor:
        """Return the logits [m, vocab] of one pass. rows: of the kept hidden states, for each chunk."""
        step = separate_drafts(Step(chunks, []))
        read = [row for of_chunk in rows for row in of_chunk]
        replaced = [
            row
            for of_chunk, chunk in zip(rows, chunks, strict=True)
            for row in of_chunk[len(of_chunk) - chunk.logits :]
        ]
        if self._graphs is not None and self._filler.is_decode(step):
            return self._replay(self._graphs, step, read, held)
        batch = self._filler.fresh(step, held, {})
        hidden = KeptStates(torch.tensor(read), torch.tensor(replaced, dtype=torch.int64))

        def forward() -> Tensor:
            return self._model.draft(batch, hidden, self._caches)

        return forward() if self._graphs is None else self._graphs.run_once(forward)

    def _replay(self, graphs: StepGraphs, step: Step, read: list[int], held: Mapping[int, RankSequence]) -> Tensor:
        """The same by a recorded step, in which all rows have logits."""
        batch = self._filler.padded(step, held)
        size, count = len(batch.token_ids), len(read)
        # Padding reads what a row of the batch reads, and replaces rows that no step has.
        copied = read[min(range(count), key=lambda index: step.chunks[index].start)]
        self._read[:size] = array("q", read + [copied] * (size - count))
        self._replaced[:size] = array("q", [*read, *range(KEPT_ROWS - size + count, KEPT_ROWS)])
        shared = (torch.frombuffer(rows, dtype=torch.int64)[:size] for rows in (self._read, self._replaced))
        hidden = KeptStates(*shared)
        return graphs.replay(lambda: self._model.draft(batch, hidden, self._caches), size, count)

    def _argmax(self, logits: Tensor) -> list[int]:
        found: list[int] = (ops.argmax(logits) if self._graphs is None else self._graphs.argmax(logits)).tolist()
        return found
