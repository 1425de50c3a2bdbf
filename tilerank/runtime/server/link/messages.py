"""Messages between the HTTP process and rank 0, over a socket pair."""

import msgspec

from ...protocol.events import Event
from ...protocol.framing import Inbox
from ...protocol.params import SamplingParams
from ...protocol.prompt import Prompt
from ...rank.counters import RankCounters


class Submit(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """A new request with a choice for each of `seeds`, which take the place of `params.seed`.

    number: the request number of the first choice, which the HTTP process chooses; the others follow it. digests: of
    the prompt's media, so that the engine need not compute them.
    """

    number: int
    prompt: Prompt
    params: SamplingParams
    seeds: list[int]
    digests: list[bytes] = []


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Stop request `number`: its client has disconnected, or needs no further token."""

    number: int


class Events(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """What one step reports of its requests, which have the numbers of the HTTP process here."""

    events: list[Event]


class State(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The state of the engine. The first one means that the engine is ready.

    cache_tokens: capacity of the KV cache in tokens. cache_used: fraction of its pages that running requests use.
    running, waiting: numbers of requests. preemptions, prompt_tokens (computed), generated_tokens: totals since the
    start. state_slots: slots for states of sequences, 0 for models without; a running request has one. snapshots: slots
    that keep the states at the end of a common beginning of prompts. queried_tokens, hit_tokens: totals since the start
    of the prompt tokens that were looked for in the cache and found there.

    source_pages, source_pages_used: pages for keys and values of encodings, 0 for models without cross-attention, and
    how many of them running requests use.

    speaking: requests that speak or wait for it. speech_frames, speech_samples: totals since the start. talker_pages,
    talker_pages_used: pages of the talker's cache, 0 for models that do not speak, and how many of them are in use.
    """

    context_length: int
    cache_tokens: int
    cache_used: float
    running: int
    waiting: int
    preemptions: int
    prompt_tokens: int
    generated_tokens: int
    state_slots: int = 0
    snapshots: int = 0
    source_pages: int = 0
    source_pages_used: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    speaking: int = 0
    speech_frames: int = 0
    speech_samples: int = 0
    talker_pages: int = 0
    talker_pages_used: int = 0


class RankInfo(msgspec.Struct, frozen=True, array_like=True):
    """A loaded rank.

    nodes, cores: lists in the kernel's format ("0-3,8"), or "any" if the rank is not bound. weight_bytes, cache_bytes:
    memory of this rank. local_memory: fraction of its memory on the nodes of its cores, None if unknown.
    """

    rank: int
    host: str
    nodes: str
    cores: str
    isa: str
    weight_bytes: int
    cache_bytes: int
    local_memory: float | None


class Ranks(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The ranks of the engine, sent once before its first State."""

    ranks: list[RankInfo]


class Counters(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The counters of every rank, in order of rank."""

    ranks: list[RankCounters]


def merge_states(one: State, other: State) -> State:
    """Return the state of two engines taken as one: sums, and the shorter context length."""
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
        one.state_slots + other.state_slots,
        one.snapshots + other.snapshots,
        one.source_pages + other.source_pages,
        one.source_pages_used + other.source_pages_used,
        one.queried_tokens + other.queried_tokens,
        one.hit_tokens + other.hit_tokens,
        one.speaking + other.speaking,
        one.speech_frames + other.speech_frames,
        one.speech_samples + other.speech_samples,
        one.talker_pages + other.talker_pages,
        one.talker_pages_used + other.talker_pages_used,
    )


ToEngine = Submit | Cancel
FromEngine = Events | State | Ranks | Counters


def engine_inbox() -> Inbox[ToEngine]:
    return Inbox(msgspec.msgpack.Decoder(ToEngine))


def client_inbox() -> Inbox[FromEngine]:
    return Inbox(msgspec.msgpack.Decoder(FromEngine))
