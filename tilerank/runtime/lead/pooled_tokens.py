"""What the pooling of a text has read of its tokens so far."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PooledTokens:
    """The hidden states of the first `tokens` tokens of a text, as the modes of sentence-transformers read them.

    parts: [hidden] for each mode. Sums are fp64 and rounded at the end, so that they do not depend on how the text is
    cut into chunks.
    """

    parts: dict[str, Tensor]
    tokens: int

    def vector(self) -> Tensor:
        """Return the parts of all modes one after the other, in fp32."""
        return torch.cat([(part / _divisor(mode, self.tokens)).float() for mode, part in self.parts.items()])


def pool(rows: Tensor, before: PooledTokens | None, modes: Sequence[str]) -> PooledTokens:
    """Return what is read of the tokens `before`, and of rows [n, hidden], those of the tokens after them. before: None
    at the beginning of a text."""
    first = 0 if before is None else before.tokens
    parts = {}
    for mode in modes:
        old = None if before is None else before.parts[mode]
        match mode:
            case "cls":
                part = rows[0].clone() if old is None else old
            case "max":
                largest = rows.amax(0)
                part = largest if old is None else torch.maximum(old, largest)
            case "lasttoken":
                part = rows[-1].clone()
            case _:
                weights = None
                if mode == "weightedmean":
                    weights = torch.arange(first + 1, first + len(rows) + 1, dtype=torch.float64)
                sums = rows.sum(0, dtype=torch.float64) if weights is None else weights @ rows.double()
                part = sums if old is None else old + sums
        parts[mode] = part
    return PooledTokens(parts, first + len(rows))


def _divisor(mode: str, tokens: int) -> float:
    divisors = {"mean": tokens, "mean_sqrt_len": math.sqrt(tokens), "weightedmean": tokens * (tokens + 1) / 2}
    return divisors.get(mode, 1.0)
