"""From logits to tokens, on rank 0: one row a sequence, each with its own settings."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilerank.kernels import ops

from .errors import RequestError

MAX_TEMPERATURE = 1e6  # all tokens are equally likely long before; far from what fp32 cannot hold


@dataclass(frozen=True)
class SamplingParams:
    """How a request's tokens are chosen and when it ends.

    temperature 0 takes the most likely token. top_k 0 and top_p 1 are off; top_p 0 leaves one token. The same seed
    gives the same text, whatever else is in the batch. logprobs: how many alternatives to report for each token.
    ignore_eos: go on after the end.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False
    logprobs: int = 0

    def __post_init__(self) -> None:
        for name, ok, expected in (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature <= MAX_TEMPERATURE, f"a number from 0 to {MAX_TEMPERATURE:g}"),
            ("top_k", 0 <= self.top_k < 1 << 31, "0 (off) or more"),
            ("top_p", 0 <= self.top_p <= 1, "a number from 0 to 1"),
            ("seed", 0 <= self.seed < 1 << 64, "an integer of 64 bits from 0 up"),
            ("logprobs", 0 <= self.logprobs <= 100, "0 to 100"),
        ):
            if not ok:
                raise RequestError(f"{name}: expected {expected}, found {getattr(self, name)}")


@dataclass(frozen=True)
class Logprobs:
    """Natural logarithms of raw probabilities (before temperature): the chosen token's, and the most likely tokens."""

    chosen: float
    top: tuple[tuple[int, float], ...]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on the request's seed and the token's position alone; exact in float32."""
    digest = hashlib.blake2b(position.to_bytes(8, "little"), key=seed.to_bytes(8, "little"), digest_size=3).digest()
    return int.from_bytes(digest, "little") / (1 << 24)


def choose(logits: Tensor, rows: Sequence[tuple[SamplingParams, int]]) -> list[int]:
    """A token id for each row of logits [m, vocab]; `rows` has the settings and the position of the token to come."""
    params = [p for p, _ in rows]
    if all(p.temperature == 0 for p in params):
        return ops.argmax(logits).tolist()
    return ops.sample(
        logits,
        torch.tensor([p.temperature for p in params], dtype=torch.float32),
        torch.tensor([p.top_k for p in params], dtype=torch.int32),
        torch.tensor([p.top_p for p in params], dtype=torch.float32),
        torch.tensor([uniform(p.seed, position) for p, position in rows], dtype=torch.float32),
    ).tolist()


def logprobs(logits: Tensor, token_id: int, count: int) -> Logprobs:
    """Of one row of logits [vocab]."""
    values = torch.log_softmax(logits, dim=-1)
    top = values.topk(min(count, values.shape[0]))
    return Logprobs(float(values[token_id]), tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True)))
