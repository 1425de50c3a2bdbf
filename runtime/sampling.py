"""From logits to tokens, on rank 0: one row a sequence, each with its own settings."""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilerank.kernels import ops

from .params import Logprobs as Logprobs
from .params import SamplingParams as SamplingParams


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on the request's seed and the token's position alone; exact in float32."""
    digest = hashlib.blake2b(position.to_bytes(8, "little"), key=seed.to_bytes(8, "little"), digest_size=3).digest()
    return int.from_bytes(digest, "little") / (1 << 24)


@dataclass(frozen=True)
class Row:
    """One sequence whose next token is due: its settings, its tokens, and how many of them are the prompt.

    forbidden: bool [vocab], the tokens that its grammar does not let follow.
    """

    params: SamplingParams
    tokens: Sequence[int]
    prompt_len: int
    forbidden: Tensor | None = None

    @property
    def reshapes(self) -> bool:
        """Are logits changed before the choice?"""
        return self.params.reshapes or self.forbidden is not None


@dataclass(frozen=True)
class Choice:
    token_id: int
    logprobs: Logprobs | None  # if they are asked for


def choose(logits: Tensor, rows: Sequence[Row], argmax: Callable[[Tensor], Tensor] = ops.argmax) -> list[Choice]:
    """The next token of each row of logits [m, vocab], which are changed in place: a copy of them would take longer
    than all the rest. argmax: what computes ops.argmax of them."""
    raw: dict[int, Tensor] = {}
    for i, row in enumerate(rows):
        if row.reshapes:
            if row.params.logprobs:
                raw[i] = logits[i].clone()
            _reshape(logits[i], row)
    chosen = []
    for i, (token_id, row) in enumerate(zip(_sampled(logits, rows, argmax), rows, strict=True)):
        count = row.params.logprobs
        chosen.append(Choice(token_id, _logprobs(raw.get(i, logits[i]), token_id, count) if count else None))
    return chosen


def _sampled(logits: Tensor, rows: Sequence[Row], argmax: Callable[[Tensor], Tensor]) -> list[int]:
    params = [row.params for row in rows]
    if all(p.temperature == 0 for p in params):
        return argmax(logits).tolist()
    return ops.sample(
        logits,
        torch.tensor([p.temperature for p in params], dtype=torch.float32),
        torch.tensor([p.top_k for p in params], dtype=torch.int32),
        torch.tensor([p.top_p for p in params], dtype=torch.float32),
        torch.tensor([uniform(row.params.seed, len(row.tokens)) for row in rows], dtype=torch.float32),
    ).tolist()


def _reshape(values: Tensor, row: Row) -> None:
    """Grammar, bias, penalties and min_p on logits [vocab], in place. The order is vLLM's: min_p before top_k and
    top_p."""
    p = row.params
    if row.forbidden is not None:
        values.masked_fill_(row.forbidden, -math.inf)
    if p.logit_bias:
        values[list(p.logit_bias)] += torch.tensor(list(p.logit_bias.values()))
    if p.repetition_penalty != 1:
        seen = torch.tensor(sorted(set(row.tokens)))
        of_seen = values[seen]
        values[seen] = torch.where(of_seen > 0, of_seen / p.repetition_penalty, of_seen * p.repetition_penalty)
    if p.presence_penalty or p.frequency_penalty:
        counts = Counter(row.tokens[row.prompt_len :])
        values[list(counts)] -= torch.tensor([p.presence_penalty + p.frequency_penalty * n for n in counts.values()])
    if p.min_p > 0 and p.temperature > 0:
        values[values < values.max() + p.temperature * math.log(p.min_p)] = -math.inf


def _logprobs(logits: Tensor, token_id: int, count: int) -> Logprobs:
    """Of one row of logits [vocab]."""
    values = torch.log_softmax(logits, dim=-1)
    top = values.topk(min(count, values.shape[0]))
    return Logprobs(float(values[token_id]), tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True)))
