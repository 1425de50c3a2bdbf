"""The limit of decoding without drafts: one token of each sequence a read of the weights."""

from __future__ import annotations

from collections.abc import Sequence

from ...planning.work import ModelWork


def bytes_read(work: ModelWork, answers: Sequence[tuple[int, int]]) -> float:
    """Return the bytes that plain decoding of some answers together reads after their first tokens.

    answers: for each sequence the tokens of its prompt and of its answer. A step reads all weights and what its
    sequences have cached, and gives each of them a token. A sequence has one step less than tokens, since its prompt
    yields the first one, and holds one token more in each step.
    """
    total = 0.0
    for step in range(1, max(tokens for _, tokens in answers)):
        contexts = [prompt + step for prompt, tokens in answers if tokens > step]
        total += work.decode(len(contexts), sum(contexts) / len(contexts)).nbytes
    return total
