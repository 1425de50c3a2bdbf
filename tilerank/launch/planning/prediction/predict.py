"""The speed of a model on a machine that a file describes: predicted, not measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

from ...errors import LaunchError
from ...goodput.limits import Limits
from ...goodput.mix import Mix
from ...goodput.search import Trial, best
from ...goodput.simulation import (
    REQUESTS,
    Demand,
    Group,
    Server,
    StepLoad,
    StepSeconds,
    apart,
    predicted_goodput,
    simulate,
    together,
)
from ...host.placement import RankPlacement
from ...options.model import ModelOptions
from .machine import Exchange, Machine, shares_of
from .steps import RankModel, SumOfRanks, rank_rates, step_seconds, transfer_seconds

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
class PredictedServer:
    """A model on a machine. answers: those to requests. step_s: seconds of a step of the ranks that generate."""

    answers: Server
    step_s: StepSeconds


def predicted_server(
    card: ModelCard, options: ModelOptions, machine: Machine, parts: Sequence[float], prefill: int = 0
) -> PredictedServer:
    """Return a server in theory. Raises LaunchError.

    parts: of a node, for each rank of a host (`node_parts`). prefill: of these ranks compute prompts for the others; 0:
    all compute prompts and generate.
    """
    if not prefill:
        step_s = _step(_rank_models(card, options, machine, parts), card, options, machine)
        return PredictedServer(together(step_s), step_s)
    if machine.hosts > 1:
        raise LaunchError(f"{machine.name}: expected one host for a prediction of prefill ranks, found {machine.hosts}")
    exchange = _between_ranks(machine, len(parts))

    def group(ranks: Sequence[RankModel]) -> Group:
        return Group(_step(ranks, card, options, machine), transfer_seconds(ranks, exchange))

    first, others = (_rank_models(card, options, machine, own) for own in (parts[:prefill], parts[prefill:]))
    decode = group(others)
    states = any(rank.work.state for rank in first)
    return PredictedServer(apart(group(first), decode, partial(given_tokens, states=states)), decode.step_s)


def node_parts(machine: Machine, ranks: Sequence[RankPlacement]) -> list[float]:
    """Return how many nodes each rank has, or which part of one: a core that ranks share counts for each in part, and a
    rank that is not bound has as many cores as threads."""
    sharers = Counter(core for rank in ranks for core in rank.cores)
    own = [sum(1 / sharers[core] for core in rank.cores) or rank.threads for rank in ranks]
    return [min(cores, rank.threads) / machine.cores for cores, rank in zip(own, ranks, strict=True)]


def given_tokens(prompt_tokens: int, *, states: bool) -> int:
    """Return how many tokens of a prompt prefill ranks compute, as `continuable` of the scheduler does for text.

    states: whether layers keep states of a sequence.
    """
    from tilerank.kernels.kv_pages import PAGE_TOKENS
    from tilerank.runtime.lead.sequence import OPENING_TOKENS
    from tilerank.runtime.lead.states import full_blocks

    if states:
        return max(full_blocks(prompt_tokens - OPENING_TOKENS), 0)
    return (prompt_tokens - 1) // PAGE_TOKENS * PAGE_TOKENS


def _rank_models(card: ModelCard, options: ModelOptions, machine: Machine, parts: Sequence[float]) -> list[RankModel]:
    """Return what the ranks of one host compute. parts: the nodes that each has."""
    from ..plan import sharded_models
    from ..work import cached_bytes, work_of

    hidden = card.text.integer("hidden_size", 1, MAX_WIDTH)
    here = None if machine.hosts == 1 else range(len(parts))
    shares = shares_of(machine)
    models = sharded_models(card, len(parts) * machine.hosts, options, here)
    return [
        RankModel(
            work_of(model),
            rank_rates(machine, shares, nodes),
            cached_bytes(model.cache_specs()),
            len(model.cache_specs()),
            hidden,
            card.vocab_size,
        )
        for model, nodes in zip(models, parts, strict=True)
    ]


def _step(ranks: Sequence[RankModel], card: ModelCard, options: ModelOptions, machine: Machine) -> StepSeconds:
    """Return the predicted seconds of a step of ranks that hold the whole model together, on each host as many."""
    sums, tp = None, len(ranks) * machine.hosts
    if tp > 1:
        sums = SumOfRanks(_between_ranks(machine, tp), options.torch_dtype(card).itemsize)
    cache = str(options.torch_kv_dtype(card)).removeprefix("torch.")
    return step_seconds(ranks, shares_of(machine), cache, sums)


def _between_ranks(machine: Machine, ranks: int) -> Exchange:
    """Return how fast ranks exchange what they have."""
    exchange = machine.between_hosts if machine.hosts > 1 else machine.between_nodes
    if exchange is None:
        raise LaunchError(f"{machine.name}: expected between_nodes for {ranks} ranks, found none")
    return exchange


def predict_cases(
    server: PredictedServer, prompts: Sequence[int], batches: Sequence[int], new_tokens: int
) -> list[CaseSpeed]:
    """Return the speed of each length of the prompt in each batch, as `bench model` measures it."""
    cases = []
    for tokens in prompts:
        for batch in batches:
            latencies, _ = simulate([0.0] * batch, [Demand(tokens, 2)] * batch, server.answers)
            context = tokens + (new_tokens + 1) / 2
            step_s = server.step_s(StepLoad.decode(batch, context))
            cases.append(CaseSpeed(tokens, batch, median(latency.ttft_s for latency in latencies), step_s))
    return cases


@dataclass(frozen=True)
class PredictedGoodput:
    """The trials of the search for the goodput of a server in theory."""

    mix: Mix
    limits: Limits
    trials: Sequence[Trial]

    @property
    def best(self) -> Trial | None:
        return best(self.trials)

    def text(self) -> str:
        """Return what the goodput is of: the requests, and the limits that they keep."""
        return f"{self.mix.text()}; {self.limits.text()}, for 99 % of the requests"


def predict_goodput(server: PredictedServer, mix: Mix, limits: Limits) -> PredictedGoodput:
    """Return the goodput with requests of a mix. LaunchError for a mix with pictures or sounds, which encoders
    compute beside the steps."""
    if any(size.pictures or size.sounds for size in mix.sizes):
        raise LaunchError(f"--mix {mix.name}: expected requests of text for a prediction, found pictures or sounds")
    demands = [Demand(size.prompt_tokens, size.new_tokens) for size in mix.draw(REQUESTS, 0)]
    return PredictedGoodput(mix, limits, predicted_goodput(demands, limits, server.answers))
