"""The speed of a model on a machine that a file describes: predicted, not measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from ...errors import LaunchError
from ...goodput.limits import Limits
from ...goodput.mix import Mix
from ...goodput.search import Trial
from ...goodput.simulation import REQUESTS, Demand, StepLoad, predicted_goodput, simulate, together
from ...host.placement import RankPlacement
from ...options.model import ModelOptions
from .machine import Machine, shares_of
from .steps import RankModel, SumOfRanks, rank_rates, step_seconds

if TYPE_CHECKING:
    from tilerank.loader.card import ModelCard

MAX_WIDTH = 1 << 20


@dataclass(frozen=True)
class CaseSpeed:
    """The predicted speed of a batch of prompts that arrive together.

    first_s: median time to the first token. step_s: of a decode step after the prompts. tokens_per_s: of its decode.
    """

    prompt_tokens: int
    batch: int
    first_s: float
    step_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.batch / self.step_s


@dataclass(frozen=True)
class Prediction:
    """The predicted speed of a model on a machine. goodput: the trials of the search, if limits were given."""

    machine: Machine
    source_of_shares: str
    cases: Sequence[CaseSpeed]
    mix: Mix | None = None
    limits: Limits | None = None
    goodput: Sequence[Trial] = ()


def predicted_step(
    card: ModelCard, tp: int, options: ModelOptions, machine: Machine, placement: Sequence[RankPlacement]
) -> Callable[[StepLoad], float]:
    """Return the predicted seconds of a step of a model on `tp` ranks. placement: of the ranks of one host."""
    from ..plan import sharded_models
    from ..work import work_of

    hidden = card.text.integer("hidden_size", 1, MAX_WIDTH)
    here = None if machine.hosts == 1 else range(len(placement))
    shares = shares_of(machine)
    ranks = [
        RankModel(work_of(model), rank_rates(machine, shares, nodes), len(model.cache_specs()), hidden, card.vocab_size)
        for model, nodes in zip(sharded_models(card, tp, options, here), _nodes(machine, placement), strict=True)
    ]
    dtype = options.torch_dtype(card)
    sums = None
    if tp > 1:
        exchange = machine.between_hosts if machine.hosts > 1 else machine.between_nodes
        if exchange is None:
            raise LaunchError(f"{machine.name}: expected between_nodes for {tp} ranks, found none")
        sums = SumOfRanks(exchange, dtype.itemsize)
    cache = str(options.torch_kv_dtype(card)).removeprefix("torch.")
    return step_seconds(ranks, shares, cache, sums)


def _nodes(machine: Machine, placement: Sequence[RankPlacement]) -> list[float]:
    """Return how many nodes each rank has, or which part of one: a core that ranks share counts for each in part."""
    sharers = Counter(core for rank in placement for core in rank.cores)
    return [sum(1 / sharers[core] for core in rank.cores) / machine.cores for rank in placement]


def predict_cases(
    seconds: Callable[[StepLoad], float], prompts: Sequence[int], batches: Sequence[int], new_tokens: int
) -> list[CaseSpeed]:
    """Return the speed of each length of the prompt in each batch, as `bench model` measures it."""
    cases = []
    for tokens in prompts:
        for batch in batches:
            latencies, _ = simulate([0.0] * batch, [Demand(tokens, 2)] * batch, together(seconds))
            context = tokens + (new_tokens + 1) / 2
            step_s = seconds(StepLoad.decode(batch, context))
            cases.append(CaseSpeed(tokens, batch, median(latency.ttft_s for latency in latencies), step_s))
    return cases


def predict_goodput(seconds: Callable[[StepLoad], float], mix: Mix, limits: Limits) -> list[Trial]:
    """Return the trials of the search for the goodput. LaunchError for a mix with pictures or sounds, which encoders
    compute beside the steps."""
    if any(size.pictures or size.sounds for size in mix.sizes):
        raise LaunchError(f"--mix {mix.name}: expected requests of text for a prediction, found pictures or sounds")
    demands = [Demand(size.prompt_tokens, size.new_tokens) for size in mix.draw(REQUESTS, 0)]
    return predicted_goodput(demands, limits, together(seconds))
