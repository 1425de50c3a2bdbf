"""Sampling parameters and log-probabilities. Imports no torch, because the HTTP process uses them as well."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf

import msgspec

from .errors import RequestError

MAX_TEMPERATURE = 1e6  # makes all tokens equally likely, and is far from overflowing fp32
_RANGES: Mapping[str, tuple[float, float, str]] = {
    "max_new_tokens": (0, inf, "at least 0"),
    "temperature": (0, MAX_TEMPERATURE, f"a number from 0 to {MAX_TEMPERATURE:g}"),
    "top_k": (0, (1 << 31) - 1, "0 (off) or more"),
    "top_p": (0, 1, "a number from 0 to 1"),
    "min_p": (0, 1, "a number from 0 to 1"),
    "repetition_penalty": (0.01, 100, "a number from 0.01 to 100"),
    "presence_penalty": (-100, 100, "a number from -100 to 100"),
    "frequency_penalty": (-100, 100, "a number from -100 to 100"),
    "seed": (0, (1 << 64) - 1, "an unsigned 64-bit integer"),
    "logprobs": (0, 100, "a number from 0 to 100"),
}
"""The least and the greatest value of each parameter that is a number, and how an error describes them."""


class SpeechParams(msgspec.Struct, frozen=True):
    """The text is spoken as well. voice: one of the model's, in lower case (speech_settings.py: voices_of)."""

    voice: str


class PoolingParams(msgspec.Struct, frozen=True):
    """The prompt becomes a vector or a score (loader/pooling.py) in place of text. dimensions: how many of the first
    numbers of the vector are wanted; 0 for all."""

    dimensions: int = 0


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of sampling, and of the end of a request. Raises RequestError for bad values.

    max_new_tokens: 0 computes the prompt alone.
    temperature: 0 takes the most likely token.
    top_k, top_p, min_p: filters, off at 0, 1 and 0. top_p 0 keeps one token; min_p keeps tokens with p >= min_p *
        max(p).
    seed: the same seed gives the same text, whatever else is in the batch.
    repetition_penalty (arXiv 1909.05858): applies to tokens of prompt and text, off at 1.
    presence_penalty, frequency_penalty: as OpenAI defines them, for tokens of the text only, off at 0.
    logit_bias: added to the logits of the given token ids.
    ignore_eos: continue after end-of-sequence tokens.
    end_token_ids: end-of-sequence tokens beside those of the card: the tokenizer's own, which rank 0 does not read.
    stop_token_ids: end the text like end-of-sequence tokens, also with ignore_eos.
    logprobs: number of alternatives to report for each token.
    grammar: the text must follow it (grammar.py); ends at an end-of-sequence token, or when the grammar allows no
        further token.
    min_new_tokens: tokens that end the text are left out before so many.
    allowed_token_ids: no others are sampled; empty for all.
    bad_words: sequences of tokens that the text must not contain. These and min_new_tokens give way where no other
        token is left.
    prompt_logprobs: number of alternatives to report for each token of the prompt; None if it is not scored.
    speech: how the text is spoken; None for text alone.
    pooling: None for a model that generates text; for others, no token is generated.
    hidden_layers: the hidden states of the prompt after these layers are reported. 0 stands for the embeddings, and the
        last layer for the states after the last norm; negative numbers count from there.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    ignore_eos: bool = False
    end_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int = 0
    grammar: str | None = None
    min_new_tokens: int = 0
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    prompt_logprobs: int | None = None
    speech: SpeechParams | None = None
    pooling: PoolingParams | None = None
    hidden_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, (least, most, expected) in _RANGES.items():
            if not least <= getattr(self, name) <= most:
                raise self._wrong(name, expected)
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise self._wrong("min_new_tokens", "0 to max_new_tokens")
        if not 0 <= (self.prompt_logprobs or 0) <= 100:
            raise self._wrong("prompt_logprobs", "a number from 0 to 100")
        if not all(abs(bias) <= 100 for bias in self.logit_bias.values()):
            raise self._wrong("logit_bias", "numbers from -100 to 100")
        if not all(self.bad_words):
            raise self._wrong("bad_words", "at least one token each")

    def _wrong(self, name: str, expected: str) -> RequestError:
        return RequestError(f"{name}: expected {expected}, found {getattr(self, name)}")

    @property
    def changes_logits(self) -> bool:
        """Whether penalties, bias or tokens that are left out change the logits before sampling."""
        penalties = (self.repetition_penalty - 1, self.presence_penalty, self.frequency_penalty)
        filtered = self.min_new_tokens or self.allowed_token_ids or self.bad_words
        return any(penalties) or bool(self.logit_bias or filtered)

    @property
    def named_ids(self) -> Iterator[tuple[str, Collection[int]]]:
        """The token ids that the parameters name, with the name of their parameter."""
        yield "logit_bias", self.logit_bias
        yield "stop_token_ids", self.stop_token_ids
        yield "allowed_token_ids", self.allowed_token_ids
        yield from (("bad_words", word) for word in self.bad_words)


@dataclass(frozen=True)
class Start:
    """How a request began to run: the cache had its first `cached_tokens`, and its first token or the first scores of
    its prompt came `after_s` seconds later."""

    cached_tokens: int
    after_s: float


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities (natural, before temperature, bias and penalties).

    chosen: of the sampled token, or of a token of the prompt. top: (token id, log-probability) of the most likely
    tokens, the most likely first. rank: how many tokens are at least as likely as the chosen one.
    """

    chosen: float
    top: tuple[tuple[int, float], ...]
    rank: int
