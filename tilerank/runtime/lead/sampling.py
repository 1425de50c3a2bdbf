"""Sampling on rank 0: turns logits into tokens. Each sequence has its own parameters."""

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
from .logits_rules import TextRules


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1), exact in float32, that depends on the request's seed and the token's position only."""
    digest = hashlib.blake2b(position.to_bytes(8, "little"), key=seed.to_bytes(8, "little"), digest_size=3).digest()
    return int.from_bytes(digest, "little") / (1 << 24)


@dataclass(frozen=True)
class Row:
    """A sequence to sample a token for: its parameters, its tokens, and what changes its logits.

    forbidden: bool [vocab], True for tokens that its grammar does not allow next.
    """

    params: SamplingParams
    tokens: Sequence[int]
    rules: TextRules
    forbidden: Tensor | None = None

    @property
    def changes_logits(self) -> bool:
        """Whether `rules` and `forbidden` change the logits of this row."""
        return self.params.changes_logits or self.forbidden is not None


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
    raw: dict[int, Tensor] = {}
    for i, row in enumerate(rows):
        if row.changes_logits:
            if row.params.logprobs:
                raw[i] = logits[i].clone()
            row.rules.apply(logits[i], row.tokens, row.forbidden)
    chosen: list[SampledToken | None] = []
    for i, (token_id, row) in enumerate(zip(_sample_numbers(logits, rows, argmax), rows, strict=True)):
        if token_id is None:
            chosen.append(None)
            continue
        count = row.params.logprobs
        logprobs = _logprobs(raw.get(i, logits[i]), token_id, count) if count else None
        is_number = logprobs is None or math.isfinite(logprobs.chosen)  # argmax takes infinity
        chosen.append(SampledToken(token_id, logprobs) if is_number else None)
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
        torch.tensor([uniform(row.params.seed, len(row.tokens)) for row in rows], dtype=torch.float32),
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
    # Row by row, because a copy of all logits may take more memory than the step itself.
    return [_logprobs(row, token_id, count) for row, token_id in zip(logits, token_ids, strict=True)]


def _logprobs(logits: Tensor, token_id: int, count: int) -> Logprobs:
    """Return the log-probabilities of logits [vocab]: those of `token_id` and of the `count` most likely tokens."""
    values = torch.log_softmax(logits, dim=-1)
    top = values.topk(min(count, values.shape[0]))
    chosen = values[token_id]
    alternatives = tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
    return Logprobs(float(chosen), alternatives, int((values >= chosen).sum()))
