"""The plans of groups of ranks that hold a whole model each: replicas, or prefill ranks and decode ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..host.placement import Placement, divide_placement
from ..host.topology import Topology
from ..options.model import ModelOptions
from .plan import plan_model
from .plan_types import Plan
from .remedies import plan_with_remedy

if TYPE_CHECKING:
    from tilerank.loader.card import ModelCard

PREFILL_AND_DECODE = ("prefill ranks", "decode ranks")


@dataclass(frozen=True)
class RankGroup:
    """`tp` ranks that hold the whole model together, on `hosts` hosts as many each."""

    tp: int
    options: ModelOptions
    hosts: int = 1

    @property
    def here(self) -> range:
        """The ranks on this host, the first one."""
        return range(self.tp // self.hosts)


def prefill_and_decode(ranks: int, prefill: int, options: ModelOptions) -> list[RankGroup]:
    """Return two groups of `ranks` ranks, of which the first `prefill` compute prompts."""
    return [RankGroup(prefill, replace(options, gives_pages=True)), RankGroup(ranks - prefill, options)]


def plan_groups(
    card: ModelCard, groups: Sequence[RankGroup], *, model: str, topology: Topology, placement: Placement, remedy: bool
) -> tuple[Plan, ...]:
    """Return the plan of each group. Raises as `plan_model`.

    model: its name in messages. placement: of the ranks of this host, group after group. remedy: whether the plan of a
    group that does not fit names the option with which it would.
    """

    def planned(group: RankGroup, part: Placement) -> Plan:
        def planner(card: ModelCard, options: ModelOptions) -> Plan:
            return plan_model(card, group.tp, options, model=model, topology=topology, placement=part, here=group.here)

        return plan_with_remedy(card, group.options, planner) if remedy else planner(card, group.options)

    parts = divide_placement(placement, [len(group.here) for group in groups])
    return tuple(planned(group, part) for group, part in zip(groups, parts, strict=True))
