"""Messages between the HTTP process and rank 0, over a socket pair.

The first EngineState of an engine means that it is ready. Its class has the tag 3.
"""

import msgspec

from ...protocol.engine_state import EngineState
from ...protocol.events import Event
from ...protocol.framing import Inbox
from ...protocol.params import SamplingParams
from ...protocol.prompt import Prompt
from ...rank.counters import RankCounters


class Submit(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """A new request with a choice for each of `seeds`, which take the place of `params.seed`.

    number: the request number of the first choice, which the HTTP process chooses; the others follow it. digests: of
    the prompt's media, so that the engine need not compute them. slots: as in Sequence (lead/sequence.py).
    """

    number: int
    prompt: Prompt
    params: SamplingParams
    seeds: list[int]
    digests: list[bytes] = []
    slots: list[list[int]] = []


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Stop request `number`: its client has disconnected, or needs no further token."""

    number: int


class Events(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The events of one step. Requests have the numbers of the HTTP process here."""

    events: list[Event]


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
    """The ranks of the engine, sent once before its first EngineState."""

    ranks: list[RankInfo]


class Counters(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The counters of every rank, in order of rank."""

    ranks: list[RankCounters]


ToEngine = Submit | Cancel
FromEngine = Events | EngineState | Ranks | Counters


def engine_inbox() -> Inbox[ToEngine]:
    return Inbox(msgspec.msgpack.Decoder(ToEngine))


def client_inbox() -> Inbox[FromEngine]:
    return Inbox(msgspec.msgpack.Decoder(FromEngine))
