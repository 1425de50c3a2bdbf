"""Servers in theory: the scheduler's order of steps, and functions that return the seconds of a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
    """What a request asks of a server.

    prompt_tokens, new_tokens: of its prompt, those of media included, and of its answer. admission_s: in which no step
    runs because the request is admitted: its media are encoded, or cached tokens are copied. cached_tokens: of its
    prompt, which other ranks have computed.
    """

    prompt_tokens: int
    new_tokens: int
    admission_s: float = 0.0
    cached_tokens: int = 0


@dataclass(frozen=True)
class Answer:
    """When the first and the last token of an answer come, in seconds of the clock by which requests arrive."""

    first_s: float
    last_s: float


Server = Callable[[Sequence[float], Sequence[Demand]], list[Answer]]
"""Returns the answers to requests that arrive at these times, in the order of the requests."""


class _Sequence:
    def __init__(self, arrival: float, demand: Demand) -> None:
        self.arrival, self.demand = arrival, demand
        self.computed, self.answered = demand.cached_tokens, 0
        self.first_s = self.last_s = 0.0


def together(seconds: StepSeconds) -> Server:
    """Return a server all of whose ranks compute prompts and answers, in steps that take `seconds`."""
    return partial(_answers, seconds)


def _answers(seconds: StepSeconds, times: Sequence[float], demands: Sequence[Demand]) -> list[Answer]:
    """Return the answers of one engine to requests in order of arrival.

    Steps are those of lead/scheduler.py: a row of each sequence that decodes, then prompts in order of arrival, up to
    `PREFILL_CHUNK` rows; at most `MAX_RUNNING` sequences. The cache has room for all of them, and no prompts begin
    alike. Nothing else runs while a request is admitted.
    """
    sequences = [_Sequence(*each) for each in zip(times, demands, strict=True)]
    waiting = deque(sequences)
    running: list[_Sequence] = []
    now = 0.0
    while waiting or running:
        if not running:
            now = max(now, waiting[0].arrival)
        decoding = [sequence for sequence in running if sequence.answered]
        tokens = sum(sequence.computed + 1 for sequence in decoding)
        load = StepLoad(len(decoding), tokens, tokens, len(decoding), len(decoding), tokens)
        rows = PREFILL_CHUNK
        done, admission_s = decoding, 0.0
        for sequence in [sequence for sequence in running if not sequence.answered]:
            load, rows, done = _prompt(sequence, load, rows, done)
        while rows and waiting and waiting[0].arrival <= now and len(running) < MAX_RUNNING:
            running.append(waiting.popleft())
            admission_s += running[-1].demand.admission_s
            load, rows, done = _prompt(running[-1], load, rows, done)
        now += seconds(load) + admission_s
        for sequence in done:
            sequence.first_s, sequence.last_s = sequence.first_s or now, now
            sequence.computed += sequence.answered > 0
            sequence.answered += 1
            if sequence.answered == sequence.demand.new_tokens:
                running.remove(sequence)
    return [Answer(sequence.first_s, sequence.last_s) for sequence in sequences]


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


@dataclass(frozen=True)
class Group:
    """Ranks that hold the whole model together, one of two groups of a server.

    step_s: seconds of a step. transfer_s: those in which the ranks copy the cache of so many tokens of a prompt into
    the memory between the groups, or out of it.
    """

    step_s: StepSeconds
    transfer_s: Callable[[int], float]


def apart(prefill: Group, decode: Group, given: Callable[[int], int]) -> Server:
    """Return a server whose `prefill` ranks compute prompts, of which `decode` ranks take the cache and go on.

    given: returns how many tokens of a prompt of so many the prefill ranks compute. The others, and prompts of which
    they compute none, are computed by the decode ranks. A group runs no step while it copies.
    """

    def answers(times: Sequence[float], demands: Sequence[Demand]) -> list[Answer]:
        parts = [given(demand.prompt_tokens) for demand in demands]
        moved = [index for index, part in enumerate(parts) if part]
        prompts = [
            Demand(parts[index], 1, demands[index].admission_s + prefill.transfer_s(parts[index])) for index in moved
        ]
        ready = dict(enumerate(times))
        for index, prompt in zip(moved, _answers(prefill.step_s, [times[i] for i in moved], prompts), strict=True):
            ready[index] = prompt.last_s
        order = sorted(ready, key=ready.__getitem__)
        rests = [
            replace(demands[index], admission_s=decode.transfer_s(parts[index]), cached_tokens=parts[index])
            for index in order
        ]
        found = _answers(decode.step_s, [ready[index] for index in order], rests)
        return [answer for _, answer in sorted(zip(order, found, strict=True), key=lambda each: each[0])]

    return answers


def simulate(times: Sequence[float], demands: Sequence[Demand], server: Server) -> tuple[list[Latency], float]:
    """Return the latencies of requests that arrive at `times`, and the time of the last token."""
    answers = server(times, demands)
    latencies = [
        Latency(answer.first_s - arrival, (answer.last_s - answer.first_s) / (demand.new_tokens - 1))
        for arrival, demand, answer in zip(times, demands, answers, strict=True)
    ]
    return latencies, max(answer.last_s for answer in answers)


def predicted_goodput(demands: Sequence[Demand], limits: Limits, server: Server) -> list[Trial]:
    """Return the trials of a search with these requests, over and over, and a server in theory."""

    def run(rate: float) -> Trial:
        taken = list(islice(cycle(demands), max(REQUESTS, ceil(rate * limits.trial_s))))
        latencies, end = simulate(arrivals(rate, len(taken), 1), taken, server)
        return trial_of(rate, latencies, limits, sum(demand.new_tokens for demand in taken), end)

    _, alone = simulate([0.0], demands[:1], server)
    return search(run, 1 / alone)
