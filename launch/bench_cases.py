"""The cases that a model is measured in, the same for us and for peers, and the times that count."""

from __future__ import annotations

import argparse
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

from .bench_job import model_config, whole_numbers
from .bench_peaks import Rates
from .errors import LaunchError
from .start import whole_number


@dataclass(frozen=True)
class Case:
    """`batch` prompts of `prompt_tokens` random tokens, continued by `new_tokens` tokens after the first."""

    batch: int
    prompt_tokens: int
    new_tokens: int

    @property
    def context(self) -> float:
        """Tokens that a sequence holds during a decode step, on average."""
        return self.prompt_tokens + (self.new_tokens + 1) / 2

    def prefill_steps(self, rows: int) -> int:
        """Steps of at most `rows` rows until all prompts are in, when those that are in already take a row each."""
        return ceil(self.batch * self.prompt_tokens / max(rows - self.batch, 1))


@dataclass(frozen=True)
class Timing:
    """Seconds of one run of a case: until half, and until all, of the prompts had a first token; of a decode step.
    rates: of the machine just before and after, where they were measured."""

    first_token: float
    prefill: float
    step: float
    rates: Rates | None = None


def add_case_arguments(parser: argparse.ArgumentParser) -> None:
    """Which cases are run, and how often."""
    parser.add_argument("--prompt-tokens", type=whole_numbers(1), default=[512], metavar="N,N", help="default: 512")
    parser.add_argument("--batch", type=whole_numbers(1), default=[1, 4, 16], metavar="N,N", help="default: 1,4,16")
    parser.add_argument("--new-tokens", type=whole_number(1), default=32, metavar="N", help="decode steps of a run")
    parser.add_argument("--repeat", type=whole_number(1), default=3, metavar="N", help="runs; the median counts")
    parser.add_argument("--first-seed", type=whole_number(0), default=0, help=argparse.SUPPRESS)


def cases_of(args: argparse.Namespace) -> list[Case]:
    return [Case(batch, tokens, args.new_tokens) for tokens in args.prompt_tokens for batch in args.batch]


def check_cases(args: argparse.Namespace) -> None:
    """LaunchError for a case that is longer than the model's context."""
    limit = model_config(args.model).max_position_embeddings
    longest = max(args.prompt_tokens) + args.new_tokens + 1
    if longest > limit:
        raise LaunchError(
            f"--prompt-tokens {max(args.prompt_tokens)} and --new-tokens {args.new_tokens} need {longest} positions, "
            f"but max_position_embeddings is {limit}"
        )


def prompts(case: Case, vocab: int, seed: int) -> list[list[int]]:
    """The same random token ids for every system that is measured."""
    draw = random.Random(f"{case} {seed}")
    return [[draw.randrange(vocab) for _ in range(case.prompt_tokens)] for _ in range(case.batch)]


def timing_of(events: Sequence[tuple[int, float]], case: Case) -> Timing:
    """From the tokens of one run: for each the number of its prompt, and seconds since the start.

    Decode counts the steps in which every sequence got a token and none was prefilled.

    A prompt that does not fit in the first step comes later, when earlier ones decode already: these steps count as
    prefill, and the last steps, from which sequences are missing, do not count.
    """
    first: dict[int, float] = {}
    for prompt, seconds in events:
        first.setdefault(prompt, seconds)
    tokens = Counter(seconds for _, seconds in events)
    prefill = max(first.values())
    steps = [end - begin for begin, end in pairwise(sorted(tokens)) if begin >= prefill and tokens[end] == case.batch]
    if not steps:
        raise LaunchError(
            f"no step decoded all {case.batch} prompts of {case.prompt_tokens} tokens together; "
            "expected more --new-tokens or a smaller --batch"
        )
    return Timing(statistics.median(first.values()), prefill, statistics.mean(steps))
