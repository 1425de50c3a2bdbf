"""What the HTTP process and rank 0 tell each other: typed messages, each after its length, over a pair of sockets."""

from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

from ..counters import RankCounters
from ..params import Logprobs, SamplingParams


class Submit(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """A new request, whose number the HTTP process chose."""

    number: int
    prompt_token_ids: list[int]
    params: SamplingParams


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Nobody waits for request `number` any more."""

    number: int


class Token(msgspec.Struct, frozen=True, array_like=True):
    """A new token of a request; the last has a finish_reason: "length", or "stop", then it is no part of the text."""

    number: int
    token_id: int
    finish_reason: str | None
    logprobs: Logprobs | None


class Tokens(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """What a step gave."""

    tokens: list[Token]


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Request `number` cannot run, or cannot go on."""

    number: int
    sentence: str


class State(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """How the engine is: the first message says that it is ready."""

    context_length: int
    cache_tokens: int
    cache_used: float  # share of the cache that running requests have
    running: int
    waiting: int
    preemptions: int
    prompt_tokens: int  # computed so far
    generated_tokens: int  # so far


class RankInfo(msgspec.Struct, frozen=True, array_like=True):
    """What a rank is, once it is loaded. Lists of nodes and cores as the kernel writes them, "any" if it is not bound;
    memory in bytes. local_memory: the share of what it holds that is on the nodes of its cores, None if not known."""

    rank: int
    host: str
    nodes: str
    cores: str
    isa: str
    weight_bytes: int
    cache_bytes: int
    local_memory: float | None


class Ranks(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The ranks of the engine, before its first State."""

    ranks: list[RankInfo]


class Counted(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """What the steps of every rank have taken so far."""

    ranks: list[RankCounters]


def together(one: State, other: State) -> State:
    """The state of both engines as that of one."""
    tokens = one.cache_tokens + other.cache_tokens
    used = one.cache_used * one.cache_tokens + other.cache_used * other.cache_tokens
    return State(
        min(one.context_length, other.context_length),
        tokens,
        used / tokens if tokens else 0.0,
        one.running + other.running,
        one.waiting + other.waiting,
        one.preemptions + other.preemptions,
        one.prompt_tokens + other.prompt_tokens,
        one.generated_tokens + other.generated_tokens,
    )


ToEngine = Submit | Cancel
FromEngine = Tokens | Refused | State | Ranks | Counted

_LENGTH_BYTES = 4
M = TypeVar("M")


def encode(message: ToEngine | FromEngine) -> bytes:
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


class Inbox(Generic[M]):
    """Cuts what comes out of a socket into messages."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[M]) -> None:
        self._decoder = decoder
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[M]:
        self._rest += data
        while len(self._rest) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + int.from_bytes(self._rest[:_LENGTH_BYTES], "big")
            if len(self._rest) < end:
                return
            message = bytes(self._rest[_LENGTH_BYTES:end])
            del self._rest[:end]
            yield self._decoder.decode(message)


def engine_inbox() -> Inbox[ToEngine]:
    return Inbox(msgspec.msgpack.Decoder(ToEngine))


def client_inbox() -> Inbox[FromEngine]:
    return Inbox(msgspec.msgpack.Decoder(FromEngine))
