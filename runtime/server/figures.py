"""What an engine has told of its ranks, and what follows from it."""

from collections.abc import Mapping, Sequence
from itertools import chain

from msgspec.structs import replace

from ..counters import RankCounters
from .messages import Counted, RankInfo, Ranks


class Figures:
    """`ranks`: what they are. `counters`: what their steps have taken so far. `recent`: what they took between the last
    two reports; `decoded`: the same of the last time that there were decode steps."""

    def __init__(self) -> None:
        self.ranks: Sequence[RankInfo] = ()
        self.counters: Sequence[RankCounters] = ()
        self.recent: Sequence[RankCounters] = ()
        self.decoded: Sequence[RankCounters] = ()

    def take(self, message: Ranks | Counted) -> None:
        if isinstance(message, Ranks):
            self.ranks = message.ranks
            self.counters = [RankCounters()] * len(message.ranks)
            return
        self.recent = [now - before for now, before in zip(message.ranks, self.counters, strict=True)]
        self.counters = message.ranks
        if all(rank.decode_s for rank in self.recent):
            self.decoded = self.recent

    @property
    def bytes_per_s(self) -> float:
        """What all ranks together read in decode steps, of late."""
        return sum(rank.decode_bytes / rank.decode_s for rank in self.decoded)

    @property
    def wait_shares(self) -> list[float]:
        """The part of its steps that each rank waited for others, of late."""
        return [rank.waited_s / steps if (steps := rank.prefill_s + rank.decode_s) else 0.0 for rank in self.recent]


def joined(replicas: Mapping[int, Figures]) -> Figures:
    """Figures of several engines as those of one, whose ranks are numbered through, replica after replica."""
    whole = Figures()
    tp = max((len(part.ranks) for part in replicas.values()), default=0)
    parts = [replicas[replica] for replica in sorted(replicas)]
    whole.ranks = [
        replace(rank, rank=replica * tp + rank.rank) for replica in sorted(replicas) for rank in replicas[replica].ranks
    ]
    whole.counters = list(chain.from_iterable(part.counters for part in parts))
    whole.decoded = list(chain.from_iterable(part.decoded for part in parts))
    if any(part.recent for part in parts):
        idle = [part.recent or [RankCounters()] * len(part.ranks) for part in parts]
        whole.recent = list(chain.from_iterable(idle))
    return whole
