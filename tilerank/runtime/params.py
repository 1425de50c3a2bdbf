"""Sampling parameters and log-probabilities. Imports no torch, because the HTTP process uses them as well."""

from dataclasses import dataclass, field

from .errors import RequestError

MAX_TEMPERATURE = 1e6  # makes all tokens equally likely, and is far from overflowing fp32


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of a request are sampled, and when the request ends. Raises RequestError for bad values.

    temperature: 0 takes the most likely token. top_k, top_p, min_p: filters, off at 0, 1 and 0. top_p 0 keeps one
    token; min_p keeps tokens with p >= min_p * max(p). seed: the same seed gives the same text, whatever else is in the
    batch. repetition_penalty (arXiv 1909.05858): applies to tokens of prompt and text, off at 1. presence_penalty,
    frequency_penalty: as OpenAI defines them, for tokens of the text only, off at 0. logit_bias: added to the logits of
    the given token ids. ignore_eos: continue after end-of-sequence tokens. stop_token_ids: end the text like
    end-of-sequence tokens, also with ignore_eos. logprobs: number of alternatives to report for each token. grammar:
    the text must follow it (grammar.py); ends at an end-of-sequence token, or when the grammar allows no further token.
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
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int = 0
    grammar: str | None = None

    def __post_init__(self) -> None:
        for name, ok, expected in (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature <= MAX_TEMPERATURE, f"a number from 0 to {MAX_TEMPERATURE:g}"),
            ("top_k", 0 <= self.top_k < 1 << 31, "0 (off) or more"),
            ("top_p", 0 <= self.top_p <= 1, "a number from 0 to 1"),
            ("min_p", 0 <= self.min_p <= 1, "a number from 0 to 1"),
            ("repetition_penalty", 0.01 <= self.repetition_penalty <= 100, "a number from 0.01 to 100"),
            ("presence_penalty", abs(self.presence_penalty) <= 100, "a number from -100 to 100"),
            ("frequency_penalty", abs(self.frequency_penalty) <= 100, "a number from -100 to 100"),
            ("logit_bias", all(abs(bias) <= 100 for bias in self.logit_bias.values()), "numbers from -100 to 100"),
            ("seed", 0 <= self.seed < 1 << 64, "an unsigned 64-bit integer"),
            ("logprobs", 0 <= self.logprobs <= 100, "a number from 0 to 100"),
        ):
            if not ok:
                raise RequestError(f"{name}: expected {expected}, found {getattr(self, name)}")

    @property
    def changes_logits(self) -> bool:
        """Do penalties, bias or min_p change the logits before sampling?"""
        penalties = (self.repetition_penalty - 1, self.presence_penalty, self.frequency_penalty)
        return any(penalties) or bool(self.logit_bias) or (self.min_p > 0 and self.temperature > 0)


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities (natural, before temperature, bias and penalties).

    chosen: of the sampled token. top: (token id, log-probability) of the most likely tokens, the most likely first.
    """

    chosen: float
    top: tuple[tuple[int, float], ...]
