"""A server in theory: the scheduler's order of steps, and a function that says how long a step takes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from math import ceil

from tilerank.runtime.protocol.sizes import MAX_RUNNING, PREFILL_CHUNK

from .limits import Latency, Limits
from .mix import arrivals
from .search import Trial, search, trial_of

REQUESTS = 300
"""Requests of a trial, at least."""


@dataclass(frozen=True)
class StepLoad:
    """What a step computes.

    rows: tokens. pairs: of a query and a key that it sees. contexts: tokens that the sequences of the step hold
    together, the new ones included. logits, logit_pairs: rows whose logits are used, and their pairs. sequences: with
    a row in the step.
    """

    rows: int
    pairs: float
    contexts: float
    sequences: int
    logits: int
    logit_pairs: float

    @staticmethod
    def decode(sequences: int, context: float) -> StepLoad:
        """Return a step with a row of each of `sequences` sequences that hold `context` tokens each."""
        tokens = sequences * context
        return StepLoad(sequences, tokens, tokens, sequences, sequences, tokens)

    @staticmethod
    def prompt(before: int, rows: int, *, last: bool) -> StepLoad:
        """Return a step with `rows` tokens of a prompt after `before` others. last: they are its last ones."""
        context = before + rows
        return StepLoad(rows, rows * before + rows * (rows + 1) / 2, context, 1, int(last), last * context)

    def __add__(self, other: StepLoad) -> StepLoad:
        return StepLoad(
            self.rows + other.rows,
            self.pairs + other.pairs,
            self.contexts + other.contexts,
            self.sequences + other.sequences,
            self.logits + other.logits,
            self.logit_pairs + other.logit_pairs,
        )


StepSeconds = Callable[[StepLoad], float]


@dataclass(frozen=True)
class Demand:
    """What a request asks of a server: tokens of its prompt, those of media included, and of its answer, and the
    seconds that its media take to encode."""

    prompt_tokens: int
    new_tokens: int
    encode_s: float = 0.0


class _Sequence:
    def __init__(self, arrival: float, demand: Demand) -> None:
        self.arrival, self.demand = arrival, demand
        self.computed = self.answered = 0
        self.first_s = 0.0


def simulate(times: Sequence[float], demands: Sequence[Demand], seconds: StepSeconds) -> tuple[list[Latency], float]:
    """Return the latencies of requests that arrive at `times`, and the time of the last token.

    Steps are those of lead/scheduler.py: a row of each sequence that decodes, then prompts in order of arrival, up to
    `PREFILL_CHUNK` rows; at most `MAX_RUNNING` sequences. The cache has room for all of them, and no prompts begin
    alike. Media are encoded when their request is admitted, while no step runs.
    """
    waiting = deque(_Sequence(*each) for each in zip(times, demands, strict=True))
    running: list[_Sequence] = []
    latencies: list[Latency] = []
    now = 0.0
    while waiting or running:
        if not running:
            now = max(now, waiting[0].arrival)
        decoding = [sequence for sequence in running if sequence.answered]
        tokens = sum(sequence.computed + 1 for sequence in decoding)
        load = StepLoad(len(decoding), tokens, tokens, len(decoding), len(decoding), tokens)
        rows = PREFILL_CHUNK
        done, encode_s = decoding, 0.0
        for sequence in [sequence for sequence in running if not sequence.answered]:
            load, rows, done = _prompt(sequence, load, rows, done)
        while rows and waiting and waiting[0].arrival <= now and len(running) < MAX_RUNNING:
            running.append(waiting.popleft())
            encode_s += running[-1].demand.encode_s
            load, rows, done = _prompt(running[-1], load, rows, done)
        now += seconds(load) + encode_s
        for sequence in done:
            sequence.first_s = sequence.first_s or now
            sequence.computed += sequence.answered > 0
            sequence.answered += 1
            if sequence.answered == sequence.demand.new_tokens:
                running.remove(sequence)
                tpot_s = (now - sequence.first_s) / (sequence.answered - 1)
                latencies.append(Latency(sequence.first_s - sequence.arrival, tpot_s))
    return latencies, now


def _prompt(
    sequence: _Sequence, load: StepLoad, rows: int, done: list[_Sequence]
) -> tuple[StepLoad, int, list[_Sequence]]:
    """Add up to `rows` tokens of a prompt to a step. Returns the step, the rows that are left, and the sequences that
    get a token in the step."""
    before, total = sequence.computed, sequence.demand.prompt_tokens
    count = min(rows, total - before)
    if not count:
        return load, rows, done
    sequence.computed += count
    last = sequence.computed == total
    return load + StepLoad.prompt(before, count, last=last), rows - count, [*done, sequence] if last else done


def predicted_goodput(demands: Sequence[Demand], limits: Limits, seconds: StepSeconds) -> list[Trial]:
    """Return the trials of a search with these requests, over and over, and a server whose steps take `seconds`."""

    def run(rate: float) -> Trial:
        taken = list(islice(cycle(demands), max(REQUESTS, ceil(rate * limits.trial_s))))
        latencies, end = simulate(arrivals(rate, len(taken), 1), taken, seconds)
        return trial_of(rate, latencies, limits, sum(demand.new_tokens for demand in taken), end)

    _, alone = simulate([0.0], demands[:1], seconds)
    return search(run, 1 / alone)
