"""Events of requests, which the engine returns and sends unchanged to the HTTP process."""

import msgspec

from .params import Logprobs, Start


class TokenEvent(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """A generated token of request number `request`.

    The last one has a finish_reason: "length", or "stop" for an end-of-sequence or stop token, which is not part of the
    text. time_s: when its step was done, on the clock of `time.monotonic`. start: of the first event of a request.
    accepted: whether it was drafted. rejected: how many drafts after it turned out to be wrong.
    """

    request: int
    token_id: int
    time_s: float
    finish_reason: str | None = None
    logprobs: Logprobs | None = None
    start: Start | None = None
    accepted: bool = False
    rejected: int = 0


class ScoredEvent(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Log-probabilities of the next tokens of the prompt of request number `request`, from the second token on.

    finish_reason: "length" if the prompt is complete and no token is to be generated.
    """

    request: int
    logprobs: list[Logprobs]
    finish_reason: str | None = None
    start: Start | None = None


class SoundEvent(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The next sound of request number `request`: samples of 16 bits, little-endian, 24,000 a second.

    A request that speaks ends with an event whose `last` is true, after the last token of its text.
    """

    request: int
    samples: bytes
    last: bool


class EndedEvent(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Request number `request` ends without a further token: its grammar allows none, or it has been cancelled."""

    request: int


class FailedEvent(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Request number `request` cannot run, or cannot go on. `sentence` says why."""

    request: int
    sentence: str


class PooledEvent(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The vector or the score of the prompt of request number `request`, which ends the request.

    values: float32, little-endian.
    """

    request: int
    values: bytes
    start: Start | None = None


class HiddenEvent(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Hidden states of tokens `start` to `start + count` of the prompt of request number `request`.

    index: of the layer in the request's `hidden_layers`. values: float32 [count, hidden], little-endian. A prompt that
    is computed again, for lack of memory, reports its states again.
    """

    request: int
    index: int
    start: int
    count: int
    values: bytes


class PrefilledEvent(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Prefill ranks have computed the prompt of request number `request`. What the decode ranks need
    of it is in these slots of each area of the memory between the groups (protocol/areas.py), in order, until the
    request is cancelled."""

    request: int
    slots: list[list[int]]
    start: Start | None = None


Event = TokenEvent | ScoredEvent | SoundEvent | EndedEvent | FailedEvent | PooledEvent | HiddenEvent | PrefilledEvent


def is_last(event: Event, speaks: bool) -> bool:
    """Does a request end with this event? speaks: it ends with sound."""
    match event:
        case TokenEvent() | ScoredEvent():
            return event.finish_reason is not None and not speaks
        case SoundEvent():
            return event.last
        case HiddenEvent() | PrefilledEvent():
            return False
    return True
