"""The scores of prompts that requests ask for: the log-probability of each token after those before it."""

from collections.abc import Iterator

from torch import Tensor

from ..protocol.events import ScoredEvent
from . import sampling
from .sequence import Scheduled, Sequence, rows_of


def prompt_scores(scheduled: Scheduled, logits: Tensor) -> Iterator[tuple[Sequence, ScoredEvent | None]]:
    """Yield the log-probabilities of the tokens of prompts that follow the rows of `logits`, before sampling changes
    these; None for a prompt that has NaN or infinite logits."""
    if all(sequence.params.prompt_logprobs is None for sequence, _ in scheduled):
        return
    for (sequence, chunk), rows in zip(scheduled, rows_of(scheduled), strict=True):
        count, end = sequence.params.prompt_logprobs, chunk.start + len(chunk.token_ids)
        first = end - chunk.logits + 1
        following = sequence.prompt.token_ids[first : end + 1]
        if count is None or not chunk.logits or not following:
            continue
        values = logits[rows.start : rows.start + len(following)]
        if not values.amax(dim=-1).isfinite().all():
            yield sequence, None
            continue
        yield sequence, ScoredEvent(sequence.request, sampling.score(values, following, count), start=sequence.begin())
        sequence.scored = first + len(following) - 1
