"""How many ranks compute prompts apart from those that generate, by the goodput that is predicted for each number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...goodput.limits import Limits
from ...goodput.mix import Mix
from ...goodput.search import PRECISION
from ...host.placement import Placement
from ...host.topology import Topology
from ...options.model import ModelOptions
from ...text import count
from ..groups import PREFILL_AND_DECODE, plan_groups, prefill_and_decode
from ..plan_types import ReplicaPlans
from .machine import Machine
from .predict import PredictedGoodput, PredictedServer, node_parts, predict_goodput, predicted_server

if TYPE_CHECKING:
    from tilerank.loader.card import ModelCard


@dataclass(frozen=True)
class RankSplit:
    """`prefill` of `ranks` ranks compute prompts for the others; 0: all compute prompts and generate. goodput: None if
    the memory does not suffice."""

    prefill: int
    ranks: int
    goodput: PredictedGoodput | None

    @property
    def rate(self) -> float:
        """The goodput in requests a second; 0 if there is none."""
        found = self.goodput and self.goodput.best
        return found.rate if found else 0.0

    def text(self) -> str:
        if self.prefill:
            return f"{self.prefill} for prompts and {self.ranks - self.prefill} to generate"
        return f"{count(self.ranks, 'rank')} for both"

    def rate_text(self) -> str:
        if self.goodput is None:
            return "does not fit"
        return f"{self.rate:.3g} requests/s" if self.rate else "none"


@dataclass(frozen=True)
class Choice:
    """The splits of the ranks of a host that were compared, all ranks together first."""

    machine: Machine
    splits: Sequence[RankSplit]

    @property
    def chosen(self) -> RankSplit:
        """The split with the highest goodput. Ranks stay together unless it is higher by more than the search is
        precise."""
        together, *apart = self.splits
        best = max(apart, key=lambda split: split.rate, default=together)
        return best if best.rate > together.rate * (1 + PRECISION) else together

    def text(self) -> str:
        """Return a sentence with what was chosen and why."""
        prefill = self.chosen.prefill
        option = f"--prefill-nodes {prefill}" if prefill else "no --prefill-nodes"
        rates = "; ".join(f"{split.text()}: {split.rate_text()}" for split in self.splits)
        goodput = self.splits[0].goodput
        assert goodput is not None
        return f"--disaggregate auto: {option}; predicted goodput on {self.machine.name}: {rates} ({goodput.text()})"


def compare_splits(
    card: ModelCard,
    options: ModelOptions,
    machine: Machine,
    topology: Topology,
    placement: Placement,
    model: Path,
    mix: Mix,
    limits: Limits,
) -> Choice:
    """Return the splits of the ranks of `placement`, with their goodput on `machine`. Raises LaunchError, and
    EngineError for a model that has no prefill ranks.

    topology: whose memory holds the model, twice if ranks are apart. model: its name in messages.
    """
    from tilerank.runtime.rank.whole_pages import check_generates
    from tilerank.runtime.step.cache import expected_tokens

    check_generates("--disaggregate", model, card)
    parts, ranks = node_parts(machine, placement.ranks), len(placement.ranks)

    # A cache whose size is left open takes what is free, so that only the least useful one counts.
    least = expected_tokens(card.context_length) if options.cached_tokens is None else options.cached_tokens

    def fits(prefill: int) -> bool:
        groups = prefill_and_decode(ranks, prefill, replace(options, cached_tokens=least))
        plans = plan_groups(card, groups, model=str(model), topology=topology, placement=placement, remedy=False)
        return ReplicaPlans(plans, roles=PREFILL_AND_DECODE).refusal() is None

    def split(prefill: int, server: PredictedServer) -> RankSplit:
        fitting = not prefill or fits(prefill)
        return RankSplit(prefill, ranks, predict_goodput(server, mix, limits) if fitting else None)

    servers = [predicted_server(card, options, machine, parts, prefill) for prefill in range(ranks)]
    return Choice(machine, [split(prefill, server) for prefill, server in enumerate(servers)])
