"""The time of a step of a model on a machine, from the costs that its layers return."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache as cached

from tilerank.parallel.cost import Cost, Work
from tilerank.runtime.protocol.sizes import PREFILL_CHUNK

from ...errors import LaunchError
from ...goodput.simulation import StepLoad, StepSeconds
from ..work import ModelWork
from .machine import Exchange, Machine, Shares, balance_of, share_at

SUMS_PER_LAYER = 2
"""After attention and after the MLP."""
_LOGIT_BYTES = 4
_STATES_IN_PLACE = 2  # a state is read and written


@dataclass(frozen=True)
class RankRates:
    """The rates of a rank's cores, a second, by the names of `Machine` and `Shares`: bytes and operations."""

    read: float
    update: float
    bf16: float
    int8: float
    fp32: float | None
    elementwise: float

    def memory_s(self, work: Work) -> float:
        return work.nbytes / self.read + work.updated / self.update

    def compute_s(self, work: Work) -> float:
        if work.fp32 and self.fp32 is None:
            raise LaunchError(
                "the machine's file: expected fp32_tflops, because the model computes in fp32, found none"
            )
        return work.bf16 / self.bf16 + work.int8 / self.int8 + (work.fp32 / self.fp32 if self.fp32 else 0.0)


def rank_rates(machine: Machine, shares: Shares, nodes: float) -> RankRates:
    """Return the rates of a rank that has `nodes` nodes, or a part of one."""
    fp32 = machine.fp32_tflops
    return RankRates(
        nodes * machine.read_gbs * 1e9,
        nodes * machine.update_gbs * 1e9,
        nodes * machine.bf16_tflops * 1e12,
        nodes * machine.int8_tops * 1e12,
        None if fp32 is None else nodes * fp32 * 1e12,
        nodes * machine.cores * shares.elementwise_gbs * 1e9,
    )


@dataclass(frozen=True)
class RankModel:
    """What a rank computes, and on what.

    work: its part of the model. rates: of its cores. cached_bytes: what its caches have of a sequence of so many
    tokens. layers, hidden, vocabulary: of the model.
    """

    work: ModelWork
    rates: RankRates
    cached_bytes: Callable[[int], int]
    layers: int
    hidden: int
    vocabulary: int


@dataclass(frozen=True)
class SumOfRanks:
    """The sums over the ranks of a model. itemsize: bytes of an element of their operands."""

    exchange: Exchange
    itemsize: int

    def seconds(self, load: StepLoad, model: RankModel) -> float:
        """Return the time of the sums of a step: one after the embedding, those of the layers, and the logits.

        Those of the last layer have the rows with logits alone.
        """
        of_layers = SUMS_PER_LAYER * model.layers
        rows = (1 + of_layers - SUMS_PER_LAYER) * load.rows + SUMS_PER_LAYER * load.logits
        nbytes = rows * model.hidden * self.itemsize + load.logits * model.vocabulary * _LOGIT_BYTES
        return (1 + of_layers + 1) * self.exchange.latency_us * 1e-6 + nbytes / (self.exchange.gbs * 1e9)


def step_seconds(ranks: Sequence[RankModel], shares: Shares, cache: str, sums: SumOfRanks | None) -> StepSeconds:
    """Return a function from a step to its seconds: those of the slowest rank, and what they do together.

    cache: the dtype of keys and values. sums: None for one rank.
    """
    if cache not in shares.attention:
        raise LaunchError(f"shares: expected attention with a cache of {cache}, found {', '.join(shares.attention)}")

    # A simulation has many steps, so ranks that are the slowest of none of these are left out.
    loads = StepLoad.decode(1, 1), StepLoad.decode(64, 4096), StepLoad.prompt(0, PREFILL_CHUNK, last=True)
    steps = [_rank_step(rank, shares, cache) for rank in ranks]
    slowest = {max(steps, key=lambda step: step(load)) for load in loads}

    def seconds(load: StepLoad) -> float:
        outside = shares.step_us * 1e-6 + load.sequences * shares.sequence_us * 1e-6
        exchanged = 0.0 if sums is None else sums.seconds(load, ranks[0])
        return max(step(load) for step in slowest) + exchanged + outside

    return seconds


def transfer_seconds(ranks: Sequence[RankModel], exchange: Exchange) -> Callable[[int], float]:
    """Return a function from tokens of a prompt to the seconds in which the ranks copy what they cache of them, each
    its own part at the rate between nodes."""

    def seconds(tokens: int) -> float:
        return max(rank.cached_bytes(tokens) for rank in ranks) / (exchange.gbs * 1e9)

    return seconds


def _rank_step(rank: RankModel, shares: Shares, cache: str) -> StepSeconds:
    """Return a function from a step to the seconds of the kernels of a rank."""

    @cached  # a simulation has many steps of the same rows, with other contexts
    def of_rows(rows: int, logits: int) -> tuple[float, Work]:
        """Return the seconds of all kernels but attention, and the work of the products among them."""
        seconds, total = rank.layers * shares.layer_us * 1e-6, Work()
        for format, work in products_of(rank.work, rows, logits):
            seconds += _kernel_seconds(_points(shares, format), work, rank.rates)
            total += work
        elementwise = rank.work.body.elementwise * rows + rank.work.end.elementwise * logits
        of_logits = 2 * logits * rank.vocabulary * _LOGIT_BYTES / rank.rates.update  # written, and read for a token
        return seconds + elementwise / rank.rates.elementwise + of_logits, total

    def seconds(load: StepLoad) -> float:
        before, products = of_rows(load.rows, load.logits)
        rest = rank.work.step(load) + products * -1
        state = _STATES_IN_PLACE * rank.work.state * load.sequences
        rest = replace(rest, nbytes=max(rest.nbytes - state, 0.0), updated=float(state))
        return before + _kernel_seconds(shares.attention[cache], rest, rank.rates)

    return seconds


def products_of(work: ModelWork, rows: int, logits: int) -> Iterator[tuple[str, Work]]:
    """Yield the products of a step with so many rows, and rows with logits, by the format of their weights. The rest of
    `work.step` is attention, with the rules of delta nets, and norms."""
    yield from _products(work.body, rows)
    yield from _products(work.end, logits)


def _products(cost: Cost, rows: int) -> Iterator[tuple[str, Work]]:
    chosen = sum(part.chosen_by(rows) for part in cost.experts)
    every = sum(part.token.flops for part in cost.products if part.of_experts)
    for part in cost.products:
        read = chosen * part.token.flops / every if part.of_experts else part.read
        yield part.format, Work(read) + part.token * rows


def _points(shares: Shares, format: str) -> Sequence[tuple[float, float]]:
    if format not in shares.products:
        raise LaunchError(
            f"shares: expected products of the format {format}, found {', '.join(sorted(shares.products))}"
        )
    return shares.products[format]


def _kernel_seconds(points: Sequence[tuple[float, float]], work: Work, rates: RankRates) -> float:
    memory_s, compute_s = rates.memory_s(work), rates.compute_s(work)
    limit_s = max(memory_s, compute_s)
    return limit_s / share_at(points, balance_of(compute_s, memory_s)) if limit_s else 0.0
