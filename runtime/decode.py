"""Steps without Python between their kernels; decode steps without any: recorded once per batch size, then replayed.

A step in which every sequence has one token and wants one row of logits has the same launches every time. They are
recorded for some batch sizes (buckets), when first needed; a batch in between is filled up with rows that write to the
cache's spare page: of no sequence, or, for a mixture, copies of a row there is, which ask for no other experts. What
changes from step to step is copied into tensors that all recorded steps read: token ids, positions, slots, lengths,
and, when a sequence joins or leaves, the tables of pages.

Any other step, of prompts, is recorded to be run once. Python between launches finds the caches full of what the last
kernel left there, which takes it twice as long, and the other ranks wait for the slowest.
"""

import logging
import time
from array import array
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from tilerank.kernels import ops
from tilerank.kernels.attention import KV_BLOCK, KVLayer
from tilerank.kernels.graph import Graph, Profile
from tilerank.parallel.group import RecordableGroup

from .batch import Batch
from .model import Model
from .step import Step

log = logging.getLogger(__name__)

TILE_ROWS = 16
"""From here on buckets are this far apart: rows that the matrix tiles compute anyway."""


def bucket_of(rows: int) -> int:
    """The batch size recorded for `rows` sequences: 1, 2, 4, 8, 16, then multiples of 16."""
    return 1 << (rows - 1).bit_length() if rows <= TILE_ROWS else -(-rows // TILE_ROWS) * TILE_ROWS


class DecodeGraphs:
    """The recorded steps of a model over `caches`; those for replay of up to `max_rows` sequences of up to `max_pages`
    pages.

    `spare_page`: a page of the caches that no sequence has. `mixture`: rows choose experts, whose weights are read.
    """

    def __init__(
        self,
        model: Model,
        caches: Sequence[KVLayer],
        group: RecordableGroup,
        *,
        max_rows: int,
        max_pages: int,
        spare_page: int,
        mixture: bool,
    ) -> None:
        self._model = model
        self._caches = caches
        self._group = group
        self._spare_page = spare_page
        self._mixture = mixture
        rows = bucket_of(max_rows)
        self._max_rows = max_rows
        # Written as arrays, in a fraction of the time that tensors take.
        self._token_ids, self._positions, self._slots = (array("q", bytes(8 * rows)) for _ in range(3))
        self._seq_lens = array("i", bytes(4 * rows))
        self._inputs = Batch(
            token_ids=torch.frombuffer(self._token_ids, dtype=torch.int64),
            positions=torch.frombuffer(self._positions, dtype=torch.int64),
            slots=torch.frombuffer(self._slots, dtype=torch.int64),
            block_tables=torch.full((rows, max_pages), spare_page, dtype=torch.int32),
            seq_lens=torch.frombuffer(self._seq_lens, dtype=torch.int32),
            query_starts=torch.arange(rows + 1, dtype=torch.int32),
        )
        self._tabled: list[tuple[int, int] | None] = [None] * rows  # the sequence in a row of block_tables, its pages
        self._graphs: dict[int, Graph] = {}
        self._newest: Graph | None = None
        self._watched = False
        self._rows = 0  # of the last step, if it was replayed
        self._seen: Callable[[], Profile] | None = None  # of it, if it was watched
        # By rows: what a step of so many returns, and the choice of their likeliest tokens.
        self._logits: dict[int, Tensor] = {}
        self._choices: dict[int, Graph] = {}

    def takes(self, step: Step) -> bool:
        """Is this a step that can be replayed?"""
        return len(step.chunks) <= self._max_rows and all(
            len(chunk.token_ids) == 1 and chunk.logits == 1 for chunk in step.chunks
        )

    def run(self, step: Step, tables: Mapping[int, list[int]]) -> Tensor:
        """fp32 logits [m, vocab] of the m tokens that want them, valid until the next call. `tables`: the pages of the
        sequences, by number.

        Raises what the step would raise eagerly.
        """
        self._seen, self._rows = None, 0
        if not self.takes(step):
            graph = self._record(Batch.of(step, tables))
            self._group.replay(graph.run)
            return graph.output
        graph, self._rows = self._prepare(step, tables), len(step.chunks)

        def watched() -> None:
            self._seen = graph.watch()

        self._group.replay(watched if self._watched else graph.run)
        return self._logits[self._rows]

    def argmax(self, logits: Tensor) -> Tensor:
        """ops.argmax. Of what a replayed step returned it is replayed as well, valid until the next call: where the
        caches are full of weights, checks and new tensors take several times as long as the choice itself."""
        replayed = logits is self._logits.get(self._rows)
        return self._choice(self._rows).run() if replayed else ops.argmax(logits)

    def watch(self) -> None:
        """From now on replayed steps note when their kernels run."""
        self._watched = True

    def profile(self) -> Profile | None:
        """Where the time of the last step went, with that of choosing the likeliest tokens of so many rows, which is
        done once more for it; None if nobody watched the step."""
        if self._seen is None:
            return None
        step, chosen = self._seen(), self._choice(self._rows).profile()
        return Profile(step.entries + chosen.entries, step.seconds + chosen.seconds)

    def _prepare(self, step: Step, tables: Mapping[int, list[int]]) -> Graph:
        rows = bucket_of(len(step.chunks))
        self._fill(step, tables, rows)
        if rows not in self._graphs:
            self._graphs[rows] = self._record(self._inputs_of(rows))
        if len(step.chunks) not in self._logits:
            self._logits[len(step.chunks)] = self._graphs[rows].output[: len(step.chunks)]
        return self._graphs[rows]

    def _choice(self, rows: int) -> Graph:
        if rows not in self._choices:
            # They share one memory, but not that of the steps, where the logits are.
            logits, other = self._logits[rows], next(iter(self._choices.values()), None)
            self._choices[rows] = Graph(lambda: ops.argmax(logits), share=other)
        return self._choices[rows]

    def _fill(self, step: Step, tables: Mapping[int, list[int]], rows: int) -> None:
        token_ids, positions, slots = [], [], []
        for row, chunk in enumerate(step.chunks):
            table = tables[chunk.sequence]
            self._set_table(row, chunk.sequence, table)
            token_ids.append(chunk.token_ids[0])
            positions.append(chunk.start)
            slots.append(table[chunk.start // KV_BLOCK] * KV_BLOCK + chunk.start % KV_BLOCK)
        # What fills up writes to a place of its own in the spare page. It is a sequence of one token there, or it reads
        # what the shortest sequence does: its hidden state is the same then, bit for bit.
        shortest = min(step.chunks, key=lambda chunk: chunk.start)
        for row in range(len(step.chunks), rows):
            if self._mixture:
                self._set_table(row, shortest.sequence, tables[shortest.sequence])
            elif self._tabled[row] is not None:
                self._inputs.block_tables[row, 0] = self._spare_page
                self._tabled[row] = None
            token_ids.append(shortest.token_ids[0] if self._mixture else 0)
            positions.append(shortest.start if self._mixture else 0)
            slots.append(self._spare_page * KV_BLOCK + row % KV_BLOCK)
        self._token_ids[:rows] = array("q", token_ids)
        self._positions[:rows] = array("q", positions)
        self._slots[:rows] = array("q", slots)
        self._seq_lens[:rows] = array("i", [position + 1 for position in positions])

    def _set_table(self, row: int, sequence: int, table: list[int]) -> None:
        if self._tabled[row] != (sequence, len(table)):
            self._inputs.block_tables[row, : len(table)] = torch.tensor(table, dtype=torch.int32)
            self._tabled[row] = sequence, len(table)

    def _inputs_of(self, rows: int) -> Batch:
        whole = self._inputs
        return Batch(
            token_ids=whole.token_ids[:rows],
            positions=whole.positions[:rows],
            slots=whole.slots[:rows],
            block_tables=whole.block_tables[:rows],
            seq_lens=whole.seq_lens[:rows],
            query_starts=whole.query_starts[: rows + 1],
        )

    def _record(self, batch: Batch) -> Graph:
        began = time.perf_counter()
        # All share one memory: a step's logits are used up before the next step.
        graph = Graph(lambda: self._model.forward(batch, self._caches), share=self._newest)
        self._newest = graph
        log.debug(
            "recorded a step of %d rows: %d launches in %.1f ms, %.1f MB of memory in all",
            len(batch.token_ids),
            len(graph),
            (time.perf_counter() - began) * 1e3,
            graph.nbytes() / 1e6,
        )
        return graph
