"""Statistics of the ranks, from the reports of an engine."""

from collections.abc import Mapping, Sequence
from itertools import chain

from msgspec.structs import replace

from ...rank.counters import RankCounters
from .messages import Counters, RankInfo, Ranks


class RankStats:
    """The ranks of an engine, and their counters.

    counters: totals since the start. recent: differences between the last two reports. recent_decode: the last `recent`
    that contains decode steps of every rank. Each has an item for every rank, or none before the first report.
    """

    def __init__(self) -> None:
        self.ranks: Sequence[RankInfo] = ()
        self.counters: Sequence[RankCounters] = ()
        self.recent: Sequence[RankCounters] = ()
        self.recent_decode: Sequence[RankCounters] = ()

    def add(self, message: Ranks | Counters) -> None:
        if isinstance(message, Ranks):
            self.ranks = message.ranks
            self.counters = [RankCounters()] * len(message.ranks)
            return
        self.recent = [now - before for now, before in zip(message.ranks, self.counters, strict=True)]
        self.counters = message.ranks
        if all(rank.decode_s for rank in self.recent):
            self.recent_decode = self.recent

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second that all ranks together read in recent decode steps."""
        return sum(rank.decode_bytes / rank.decode_s for rank in self.recent_decode)

    @property
    def wait_shares(self) -> list[float]:
        """For each rank the fraction of its recent steps that it waited for other ranks."""
        return [rank.waited_s / steps if (steps := rank.prefill_s + rank.decode_s) else 0.0 for rank in self.recent]


def merge(replicas: Mapping[int, RankStats]) -> RankStats:
    """Return the statistics of several replicas, by number, as those of one engine.

    Ranks are numbered through: rank r of replica i becomes i * tp + r.
    """
    whole = RankStats()
    tp = max((len(part.ranks) for part in replicas.values()), default=0)
    parts = [replicas[replica] for replica in sorted(replicas)]
    whole.ranks = [
        replace(rank, rank=replica * tp + rank.rank) for replica in sorted(replicas) for rank in replicas[replica].ranks
    ]
    whole.counters = list(chain.from_iterable(part.counters for part in parts))
    whole.recent_decode = list(chain.from_iterable(part.recent_decode for part in parts))
    if any(part.recent for part in parts):
        padded = [part.recent or [RankCounters()] * len(part.ranks) for part in parts]
        whole.recent = list(chain.from_iterable(padded))
    return whole
