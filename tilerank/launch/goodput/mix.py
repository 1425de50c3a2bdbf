"""Mixes of requests: the lengths of prompts and answers, from a file or as a benchmark publishes them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import exp, log
from pathlib import Path
from statistics import NormalDist, mean
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from ..errors import LaunchError

MAX_FILE_BYTES = 64 << 20
Side = Annotated[int, Meta(ge=1, le=1 << 14)]
Seconds = Annotated[int, Meta(ge=1, le=3600)]


class RequestSize(Struct, frozen=True, forbid_unknown_fields=True):
    """The size of a request: tokens of its text and of its answer, the widths and heights of its pictures in pixels,
    and the seconds of its sounds. Tokens of pictures and sounds come beside `prompt_tokens`."""

    prompt_tokens: Annotated[int, Meta(ge=1)]
    new_tokens: Annotated[int, Meta(ge=2)]  # one token has no time per token after the first
    pictures: tuple[tuple[Side, Side], ...] = ()
    sounds: tuple[Seconds, ...] = ()


@dataclass(frozen=True)
class Mix:
    """Sizes of requests. `name` says where they come from."""

    name: str
    sizes: Sequence[RequestSize]

    def text(self) -> str:
        prompts, answers = ([getattr(size, name) for size in self.sizes] for name in ("prompt_tokens", "new_tokens"))
        media = sum(len(size.pictures) + len(size.sounds) for size in self.sizes) / len(self.sizes)
        return (
            f"{self.name}: {mean(prompts):.0f} prompt tokens (at most {max(prompts)}), {mean(answers):.0f} new tokens"
            f" (at most {max(answers)})" + (f", {media:.2g} pictures and sounds" if media else "")
        )

    def draw(self, count: int, seed: int) -> list[RequestSize]:
        """Return `count` sizes in random order: every size once before one comes again."""
        rng, drawn = random.Random(seed), list[RequestSize]()
        while len(drawn) < count:
            drawn += rng.sample(self.sizes, len(self.sizes))
        return drawn[:count]


def arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Return the seconds at which `count` requests of a Poisson process arrive. Another rate only scales them."""
    rng = random.Random(seed)
    return [seconds / rate for seconds in accumulate(rng.expovariate(1.0) for _ in range(count))]


def mlperf_llama_3_1_8b() -> Mix:
    """Return the lengths of MLPerf Inference 5.1 to 6.1, Llama-3.1-8B, datacenter: 13,368 articles of CNN/DailyMail.

    The prompts have 778 tokens on average, as submitters report, and 2,540 at most (max_model_len 2668 of
    ssaketh-ch/llama31b-benchmark, less the answer). Answers end after 128 tokens; the reference makes 611 characters
    for each, so that most are that long (8,167,644 characters, language/llama3.1-8b/README.md of mlcommons/inference).
    The lengths between the mean and the longest are not published: these are the quantiles of the log-normal
    distribution with that mean whose last one is the longest.
    """
    count, average, longest, answer = 13368, 778, 2540, 128
    normal = NormalDist()
    last = normal.inv_cdf(1 - 0.5 / count)
    # mu + last * sigma = log(longest) and mu + sigma^2 / 2 = log(average)
    sigma = last - (last**2 - 2 * log(longest / average)) ** 0.5
    mu = log(average) - sigma**2 / 2
    quantiles = (normal.inv_cdf((i + 0.5) / count) for i in range(count))
    return Mix("mlperf-llama-3.1-8b", [RequestSize(round(exp(mu + sigma * z)), answer) for z in quantiles])


PUBLISHED: dict[str, Callable[[], Mix]] = {"mlperf-llama-3.1-8b": mlperf_llama_3_1_8b}
"""The mixes that have a name."""


def mix_of(name: str) -> Mix:
    """Return a published mix, or the one in the file `name`. Raises LaunchError."""
    return PUBLISHED[name]() if name in PUBLISHED else read_mix(Path(name))


def read_mix(path: Path) -> Mix:
    """Read a mix from a file: a JSON object in each line, with the fields of RequestSize. Raises LaunchError."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as e:
        known = ", ".join(PUBLISHED)
        raise LaunchError(f"--mix {path}: expected a file or one of {known}, found: {e.strerror}") from e
    if len(data) > MAX_FILE_BYTES:
        raise LaunchError(f"--mix {path}: expected at most {MAX_FILE_BYTES} bytes, found more")
    sizes = [_size(path, number, line) for number, line in enumerate(data.splitlines(), 1) if line.strip()]
    if not sizes:
        raise LaunchError(f"--mix {path}: expected a JSON object in each line, found no line")
    return Mix(path.name, sizes)


def _size(path: Path, number: int, line: bytes) -> RequestSize:
    try:
        return msgspec.json.decode(line, type=RequestSize)
    except msgspec.DecodeError as e:
        expected = 'an object like {"prompt_tokens": 800, "new_tokens": 100, "pictures": [[1024, 768]], "sounds": [10]}'
        raise LaunchError(f"--mix {path}, line {number}: expected {expected}, found: {e}") from e
