"""What the steps of a rank have taken so far. Counted between steps, on the rank itself."""

import msgspec
import torch
from torch import Tensor

from tilerank.parallel.group import Group

from .step import Step
from .traffic import Traffic


class RankCounters(msgspec.Struct, array_like=True):
    """Since the rank was started. A step in which every sequence computes one token is a decode step; one with a piece
    of a prompt is a prefill step. `decode_bytes`: what decode steps had to read (traffic.py). `waited_s`: for other
    ranks, in collectives of all steps."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    decode_bytes: float = 0.0
    waited_s: float = 0.0


class StepCounter:
    """Counts the steps of this rank."""

    def __init__(self, group: Group, traffic: Traffic) -> None:
        self._group = group
        self._traffic = traffic
        self._counters = RankCounters()

    def count(self, step: Step, seconds: float) -> None:
        tokens = 0
        for chunk in step.chunks:
            if len(chunk.token_ids) != 1:
                self._counters.prefill_s += seconds
                return
            tokens += chunk.start + 1
        self._counters.decode_s += seconds
        self._counters.decode_bytes += self._traffic.decode(len(step.chunks), tokens)

    def gather(self) -> list[RankCounters]:
        """Those of every rank. All ranks call it."""
        self._counters.waited_s = self._group.waited_s
        mine = torch.tensor(msgspec.structs.astuple(self._counters), dtype=torch.float64)
        rows: Tensor = self._group.all_gather(mine)
        return [RankCounters(*row) for row in rows.tolist()]
