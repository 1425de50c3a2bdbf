"""How a request's tokens are chosen, and what is told of them. No torch: the HTTP process has these as well."""

from dataclasses import dataclass, field

from .errors import RequestError

MAX_TEMPERATURE = 1e6  # all tokens are equally likely long before; far from what fp32 cannot hold


@dataclass(frozen=True)
class SamplingParams:
    """How a request's tokens are chosen and when it ends.

    temperature 0 takes the most likely token. top_k 0, top_p 1 and min_p 0 are off; top_p 0 leaves one token, min_p
    those that are at least so likely in proportion to the likeliest. The same seed gives the same text, whatever else
    is in the batch. repetition_penalty (arXiv 1909.05858; 1 is off) counts prompt and text, presence_penalty and
    frequency_penalty (OpenAI's; 0 is off) the text alone. logit_bias: added to the logits of token ids.
    logprobs: how many alternatives to report for each token. stop_token_ids end a text as end-of-sequence tokens do,
    also with ignore_eos, which goes on after the latter. grammar: what the text must follow (grammar.py), until it ends
    with an end-of-sequence token, or because nothing can follow.
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
            ("seed", 0 <= self.seed < 1 << 64, "an integer of 64 bits from 0 up"),
            ("logprobs", 0 <= self.logprobs <= 100, "0 to 100"),
        ):
            if not ok:
                raise RequestError(f"{name}: expected {expected}, found {getattr(self, name)}")

    @property
    def reshapes(self) -> bool:
        """Are logits changed before the choice?"""
        penalties = (self.repetition_penalty - 1, self.presence_penalty, self.frequency_penalty)
        return any(penalties) or bool(self.logit_bias) or (self.min_p > 0 and self.temperature > 0)


@dataclass(frozen=True)
class Logprobs:
    """Natural logarithms of raw probabilities (before temperature): the chosen token's, and the most likely tokens."""

    chosen: float
    top: tuple[tuple[int, float], ...]
