"""Drafting on one rank: the drafter reads the tokens of the last step, and then its own drafts."""

from collections.abc import Mapping
from itertools import accumulate

from torch import Tensor

from tilerank.kernels import ops
from tilerank.kernels.errors import KernelError
from tilerank.kernels.kv_pages import PAGE_TOKENS

from ..protocol.rank_messages import Chunk, Draft, Step
from ..step.batch import BatchFiller, BatchLimits, RankSequence
from ..step.draft_rows import separate_drafts
from ..step.step_graphs import StepGraphs
from .drafter import Drafter


class DraftRank:
    """Runs a drafter. All ranks run it with the same messages.

    limits: those of the steps of the model. graphs: recorded passes of the drafter alone; None if it runs eagerly.
    """

    def __init__(self, drafter: Drafter, limits: BatchLimits, graphs: StepGraphs | None) -> None:
        self._drafter, self._graphs = drafter, graphs
        self.step_bytes = drafter.step_bytes
        self._filler = BatchFiller(drafter.content, BatchLimits(limits.sequences, limits.pages, limits.spare_page))

    def begin(self, step: Step) -> None:
        """The model is about to compute a step."""
        self._drafter.begin(step)

    def run(self, message: Draft, held: Mapping[int, RankSequence]) -> list[list[int]]:
        """Return the tokens that each sequence drafts: as many as the message says, or less where its pages end."""
        drafted: list[list[int]] = [[] for _ in message.chunks]
        chunks = dict(enumerate(message.chunks))
        for chunk in message.chunks:
            held[chunk.sequence].pages.extend(chunk.new_pages)
        while chunks:
            logits = self._logits(list(chunks.values()), held)
            try:
                likeliest = self._drafter.tokens(self._argmax(logits)) if logits.shape[0] else []
            except KernelError:
                break  # the drafter has computed NaN: the texts, which do not depend on it, go on without drafts
            stops = accumulate(chunk.logits for chunk in chunks.values())
            following = dict[int, Chunk]()
            for (index, chunk), stop in zip(chunks.items(), stops, strict=True):
                if not chunk.logits:
                    continue
                token, end = likeliest[stop - 1], chunk.start + len(chunk.token_ids)
                drafted[index].append(token)
                if len(drafted[index]) < message.counts[index] and end < len(held[chunk.sequence].pages) * PAGE_TOKENS:
                    following[index] = Chunk(chunk.sequence, end, [token], [], 1, shift=chunk.shift)
            chunks = following
        return drafted

    def _logits(self, chunks: list[Chunk], held: Mapping[int, RankSequence]) -> Tensor:
        """Return the logits of one pass, a column for each token that may be drafted."""
        step, graphs = separate_drafts(Step(chunks, [])), self._graphs
        is_recorded = graphs is not None and self._filler.is_decode(step)
        batch = self._filler.padded(step, held) if is_recorded else self._filler.fresh(step, held, {})
        forward = self._drafter.forward(chunks, batch, is_recorded=is_recorded)
        if graphs is None:
            return forward()
        if is_recorded:
            return graphs.replay(forward, len(batch.token_ids), len(step.chunks))
        return graphs.run_once(forward)

    def _argmax(self, logits: Tensor) -> list[int]:
        found: list[int] = (ops.argmax(logits) if self._graphs is None else self._graphs.argmax(logits)).tolist()
        return found
