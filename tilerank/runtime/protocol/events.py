"""What the engine reports of its requests."""

from dataclasses import dataclass

from .params import Logprobs, Start


@dataclass(frozen=True)
class TokenEvent:
    """A generated token of request number `request`. The last token of a request has a finish_reason: "stop" (the
    token is an end-of-sequence or stop token) or "length".

    time_s: when its step was done, on the clock of `time.monotonic`. start: of the first event of a request.
    """

    request: int
    token_id: int
    time_s: float
    finish_reason: str | None = None
    logprobs: Logprobs | None = None
    start: Start | None = None


@dataclass(frozen=True)
class Scored:
    """Log-probabilities of the next tokens of the prompt of request number `request`, from the second token on.

    finish_reason: "length" if the prompt is complete and no token is to be generated.
    """

    request: int
    logprobs: list[Logprobs]
    finish_reason: str | None = None
    start: Start | None = None


@dataclass(frozen=True)
class SoundEvent:
    """The next sound of request number `request`: samples of 16 bits, little-endian, 24,000 a second.

    A request that speaks ends with an event whose `last` is true, after the last token of its text.
    """

    request: int
    samples: bytes
    last: bool


@dataclass(frozen=True)
class Completed:
    """The grammar of request number `request` allows no further token. No token is generated for this."""

    request: int


@dataclass(frozen=True)
class Failed:
    """Request number `request` gets no more tokens, because it cannot go on."""

    request: int
    sentence: str


Event = Scored | TokenEvent | SoundEvent | Completed | Failed
