"""The cases in which a model is measured, the same for tilerank and its peers, and the timing of one run."""

from __future__ import annotations

import argparse
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

from tilerank.loader.card import read_card

from ..errors import LaunchError
from ..options.arguments import whole_number, whole_numbers
from .harness import add_repeat_argument
from .media_inputs import Size, media_prompts, size_of, size_text
from .peaks import Rates


@dataclass(frozen=True)
class Case:
    """A batch of `batch` prompts of `prompt_tokens` random tokens, each followed by 1 + `new_tokens` new tokens.

    image: size of a picture at the beginning of each prompt, which takes `image_tokens` of the prompt's tokens.
    """

    batch: int
    prompt_tokens: int
    new_tokens: int
    image: Size | None = None
    image_tokens: int = 0

    @property
    def context(self) -> float:
        """Mean number of tokens in a sequence's cache during a decode step."""
        return self.prompt_tokens + (self.new_tokens + 1) / 2

    def prefill_steps(self, rows: int) -> int:
        """Upper bound on the steps of at most `rows` rows that prefill all prompts.

        Sequences whose prompt is complete already decode, which takes one row of each step.
        """
        return ceil(self.batch * self.prompt_tokens / max(rows - self.batch, 1))


@dataclass(frozen=True)
class Timing:
    """The timing of one run of a case, in seconds.

    first_token: median time to first token. prefill: until every prompt has its first token. step: mean time of a
    decode step. rates: the machine's rates, the mean of just before and just after the run, if measured.
    """

    first_token: float
    prefill: float
    step: float
    rates: Rates | None = None


def add_case_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose the cases and the number of runs."""
    parser.add_argument(
        "--prompt-tokens", type=whole_numbers(1), default=[512], metavar="N,N", help="prompt lengths (default: 512)"
    )
    parser.add_argument(
        "--batch", type=whole_numbers(1), default=[1, 4, 16], metavar="N,N", help="batch sizes (default: 1,4,16)"
    )
    parser.add_argument(
        "--new-tokens", type=whole_number(1), default=32, metavar="N", help="decode steps in a run (default: 32)"
    )
    add_repeat_argument(parser)
    parser.add_argument("--first-seed", type=whole_number(0), default=0, help=argparse.SUPPRESS)
    parser.add_argument(
        "--image", type=size_of, metavar="WxH", help="put a new picture of this size before the tokens of each prompt"
    )


def cases_of(args: argparse.Namespace) -> list[Case]:
    """Return a case for each length of the prompt and each batch, the tokens of a picture included."""
    before = media_prompts(args.model).tokens_before(args.image) if args.image else 0
    return [
        Case(batch, before + tokens, args.new_tokens, args.image, before)
        for tokens in args.prompt_tokens
        for batch in args.batch
    ]


def check_cases(args: argparse.Namespace) -> None:
    """Raise LaunchError if a case is longer than the model's context."""
    limit = read_card(args.model).context_length
    longest = max(case.prompt_tokens + case.new_tokens + 1 for case in cases_of(args))
    if longest > limit:
        options = f"--prompt-tokens {max(args.prompt_tokens)} and --new-tokens {args.new_tokens}"
        if args.image:
            options = f"--image {size_text(args.image)}, {options}"
        raise LaunchError(f"{options} need {longest} positions; the model's context has {limit}")


def prompts(case: Case, vocab: int, seed: int) -> list[list[int]]:
    """Return random token ids, the same for every system under test: `batch` lists of `prompt_tokens` ids, less those
    of the picture."""
    rng = random.Random(f"{case} {seed}")
    tokens = case.prompt_tokens - case.image_tokens
    return [[rng.randrange(vocab) for _ in range(tokens)] for _ in range(case.batch)]


def timing_of(events: Sequence[tuple[int, float]], case: Case) -> Timing:
    """Return the timing of one run. events: for each new token the index of its prompt and its seconds since the start.

    The decode time is the mean over the steps in which every sequence gets a token and none is prefilled. If the
    prompts do not fit into one step, earlier sequences decode while later ones are prefilled: these steps count as
    prefill. The last steps, which lack the sequences that have finished, do not count.

    LaunchError if no step decodes all sequences.
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
            "use more --new-tokens or a smaller --batch"
        )
    return Timing(statistics.median(first.values()), prefill, statistics.mean(steps))
