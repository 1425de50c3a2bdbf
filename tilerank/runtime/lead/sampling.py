"""Sampling on rank 0: turns logits into tokens. Each sequence has its own parameters.

Kernels over all rows change the logits, choose the tokens and compute log-probabilities.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilerank.kernels import ops
from tilerank.kernels.errors import KernelError

from ..protocol.params import Logprobs as Logprobs
from ..protocol.params import SamplingParams as SamplingParams
from .logits_rules import NO_EDITS, Bits, TextRules, edit_logits


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1), exact in float32, that depends on the request's seed and the token's position only."""
    digest = hashlib.blake2b(position.to_bytes(8, "little"), key=seed.to_bytes(8, "little"), digest_size=3).digest()
    return int.from_bytes(digest, "little") / (1 << 24)


@dataclass(frozen=True)
class Row:
    """A sequence to sample a token for: its parameters, its tokens, and what changes its logits.

    allowed: bits of the tokens that its grammar allows next (logits_rules.py); None if it has no grammar.
    ahead: how many tokens come between `tokens` and this one. Only rows without changed logits may have any.
    """

    params: SamplingParams
    tokens: Sequence[int]
    rules: TextRules
    allowed: Bits | None = None
    ahead: int = 0

    @property
    def changes_logits(self) -> bool:
        """Whether `rules` and `allowed` change the logits of this row."""
        return self.params.changes_logits or self.allowed is not None


@dataclass(frozen=True)
class SampledToken:
    """A sampled token. logprobs: None if the request did not ask for them."""

    token_id: int
    logprobs: Logprobs | None


def choose(
    logits: Tensor, rows: Sequence[Row], argmax: Callable[[Tensor], Tensor] = ops.argmax
) -> list[SampledToken | None]:
    """Sample the next token of each row of logits [m, vocab]. None for a row whose logits are NaN, or infinite where
    probabilities are needed.

    Changes the logits in place, because copying them would take longer than all other work here. argmax: computes
    ops.argmax(logits).
    """
    scored = [i for i, row in enumerate(rows) if row.params.logprobs]
    raw, rows_of_raw = logits, scored
    if any(rows[i].changes_logits for i in scored):
        raw, rows_of_raw = ops.take_rows(logits, torch.tensor(scored)), list(range(len(scored)))
    if any(row.changes_logits for row in rows):
        edit_logits(
            logits, [row.rules.edits(row.tokens, row.allowed) if row.changes_logits else NO_EDITS for row in rows]
        )
    ids = _sample_numbers(logits, rows, argmax)
    chosen = [None if token_id is None else SampledToken(token_id, None) for token_id in ids]
    scores = _logprobs(raw, rows_of_raw, [ids[i] or 0 for i in scored], [rows[i].params.logprobs for i in scored])
    for i, logprobs in zip(scored, scores, strict=True):
        token_id = ids[i]
        is_number = math.isfinite(logprobs.chosen)  # argmax takes infinity
        chosen[i] = SampledToken(token_id, logprobs) if token_id is not None and is_number else None
    return chosen


def _sample_numbers(logits: Tensor, rows: Sequence[Row], argmax: Callable[[Tensor], Tensor]) -> Sequence[int | None]:
    """Return a token for each row; None if no token can be sampled from its logits."""
    params = [row.params for row in rows]
    if all(p.temperature == 0 for p in params):
        return _likeliest(logits, argmax)
    found = ops.sample(
        logits,
        torch.tensor([p.temperature for p in params], dtype=torch.float32),
        torch.tensor([p.top_k for p in params], dtype=torch.int32),
        torch.tensor([p.top_p for p in params], dtype=torch.float32),
        torch.tensor([p.min_p for p in params], dtype=torch.float32),
        torch.tensor([uniform(row.params.seed, len(row.tokens) + row.ahead) for row in rows], dtype=torch.float32),
    )
    return [None if token_id < 0 else token_id for token_id in found.tolist()]


def _likeliest(logits: Tensor, argmax: Callable[[Tensor], Tensor]) -> Sequence[int | None]:
    """Return the token of the largest logit of each row; None where one is NaN."""
    try:
        found: list[int] = argmax(logits).tolist()
        return found
    except KernelError:
        broken = logits.isnan().any(dim=-1).tolist()
        if not any(broken):
            raise
    return [None if nan else int(ops.argmax(row[None])) for row, nan in zip(logits, broken, strict=True)]


def score(logits: Tensor, token_ids: Sequence[int], count: int) -> list[Logprobs]:
    """Return the log-probabilities of tokens of a prompt under the logits [m, vocab] of the tokens before them."""
    return _logprobs(logits, range(len(token_ids)), token_ids, [count] * len(token_ids))


def _logprobs(logits: Tensor, rows: Sequence[int], token_ids: Sequence[int], counts: Sequence[int]) -> list[Logprobs]:
    """Return the log-probabilities of rows of logits [m, vocab]: those of a token and of the most likely tokens.

    token_ids, counts: for each of `rows`, the token and the number of likely ones.
    """
    if not token_ids:
        return []
    most = min(max(*counts, 1), logits.shape[1])
    chosen, ranks, top_ids, top = ops.log_probs(logits, torch.tensor(rows), torch.tensor(token_ids), most)
    lists = zip(chosen.tolist(), ranks.tolist(), top_ids.tolist(), top.tolist(), counts, strict=True)
    return [
        Logprobs(own, tuple(zip(ids[:count], values[:count], strict=True)), rank)
        for own, rank, ids, values, count in lists
    ]
