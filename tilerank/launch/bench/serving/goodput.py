"""`tilerank bench serve --slo`: the highest rate of requests at which a server keeps its limits of latency.

Requests of a mix arrive as a Poisson process over HTTP. The limit beside it is the same search with a server in theory,
which runs the same steps, each in the time that the machine needs at least.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from tilerank.loader.card import ModelCard, read_card
from tilerank.parallel.cost import Work

from ...errors import LaunchError
from ...goodput.limits import Limits, limits_of
from ...goodput.mix import PUBLISHED, Mix, RequestSize, mix_of
from ...goodput.search import Trial, best, search
from ...goodput.simulation import REQUESTS, Demand, predicted_goodput, together
from ...logs import say
from ...options.arguments import real_number, whole_number
from ...options.model import model_options
from ...options.replicas import add_arguments as add_replica_arguments
from ...ranks import prefill_ranks
from ...serving.own_server import own_server
from ..chart import check_chart_argument
from ..harness import Column, Row, write_json
from ..harness import table as lines_of
from ..media_inputs import media_prompts, random_jpeg
from ..peaks import Peaks, peaks_of
from ..rank_job import placement_of
from .client import port_of
from .goodput_chart import write_goodput_chart
from .load import Load, media_of


@dataclass(frozen=True)
class Goodput:
    """The trials of a server, and those of one that takes the least time that the machine allows."""

    model: str
    mix: Mix
    limits: Limits
    trials: Sequence[Trial]
    least: Sequence[Trial]
    peaks: Peaks

    def as_json(self) -> dict[str, Any]:
        found, limit = best(self.trials), best(self.least)
        return {
            "model": self.model,
            "mix": self.mix.text(),
            "limits": asdict(self.limits),
            "requests_per_s": found.rate if found else 0.0,
            "tokens_per_s": found.tokens_per_s if found else 0.0,
            "limit_requests_per_s": limit.rate if limit else 0.0,
            "limit_share": found.rate / limit.rate if found and limit else None,
            "trials": [asdict(trial) for trial in self.trials],
            "limit_trials": [asdict(trial) for trial in self.least],
            "peaks": self.peaks.as_json(),
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--slo",
        type=limits_of,
        metavar="ttft=2s,tpot=100ms",
        help="find the highest rate of requests at which 99 %% of them have their first token and each token after it "
        "within these limits, instead of comparing the server with its engine",
    )
    parser.add_argument(
        "--mix",
        metavar="NAME|FILE",
        help="--slo: lengths of the requests, as a benchmark publishes them or from a file with an object of "
        "prompt_tokens, new_tokens, pictures and sounds in each line (default: --prompt-tokens and --new-tokens of "
        f"each); names: {', '.join(PUBLISHED)}",
    )
    parser.add_argument("--chart", type=Path, metavar="FILE.svg", help="--slo: also draw the waits by rate")
    parser.add_argument(
        "--requests", type=whole_number(1), default=100, metavar="N", help="--slo: of a rate, at least (default: 100)"
    )
    parser.add_argument(
        "--seconds",
        type=real_number(lambda value: 0 < value < 1e6, "a number of seconds above 0"),
        metavar="S",
        help="--slo: for which requests arrive at a rate, at least (default: 30 times the limit of the first token)",
    )


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `serve` that an engine alone does not have."""
    add_replica_arguments(parser)
    prefill_ranks.add_arguments(parser)


def check_unused(args: argparse.Namespace) -> None:
    """Raise LaunchError for options that only a search uses."""
    unused = {"mix": None, "chart": None, "prefill-nodes": None, "dp": 1}
    if given := [f"--{name}" for name, value in unused.items() if getattr(args, name.replace("-", "_")) != value]:
        raise LaunchError(f"{given[0]}: expected --slo with it, found none")


def run(args: argparse.Namespace, serve_argv: Sequence[str]) -> int:
    """Search for the goodput and print it. serve_argv: the options of the server. Raises LaunchError."""
    check_chart_argument(args)
    result = measure(args, serve_argv)
    print(f"{result.model}: {result.mix.text()}")
    print(f"99 % of the requests: {result.limits.text()}; {result.peaks.text()}\n")
    print("\n".join([*table(result.trials), "", verdict(result)]))
    write_json(args, result.as_json())
    if args.chart:
        write_goodput_chart(args.chart, result.as_json())
    return 0


def measure(args: argparse.Namespace, serve_argv: Sequence[str]) -> Goodput:
    mix = mix_of(args.mix) if args.mix else _uniform(args)
    card = read_card(args.model)
    _check(mix, card, args)
    _, cores = placement_of(args)
    peaks = peaks_of(cores)
    least = least_trials(args, card, mix, peaks)
    seconds = args.slo.trial_s if args.seconds is None else args.seconds
    with own_server(serve_argv, shown="error") as address, asyncio.Runner() as runner:
        load = Load(port_of(address), runner, mix, args.slo, requests=args.requests, seconds=seconds)
        load.alone()  # touches all code
        alone = load.alone()
        trials: list[Trial] = []
        if args.slo.hold(alone):
            limit = best(least)
            trials = search(partial(_said, load), limit.rate / 2 if limit else 1 / alone.ttft_s)
    return Goodput(args.model.name, mix, args.slo, trials, least, peaks)


def _said(load: Load, rate: float) -> Trial:
    """Run a trial and write how it ended, because a search takes minutes."""
    trial = load.trial(rate)
    say(f"tilerank: {rate:.3g} requests/s: {'holds' if trial.holds else 'late'}")
    return trial


def _uniform(args: argparse.Namespace) -> Mix:
    return Mix("equal requests", [RequestSize(args.prompt_tokens, args.new_tokens)])


def _check(mix: Mix, card: ModelCard, args: argparse.Namespace) -> None:
    """Raise LaunchError for requests that the model does not take."""
    if card.pooling is not None:
        raise LaunchError(
            f"--slo: expected a model that generates text, found {args.model.name}, which embeds or scores it"
        )
    for size in set(mix.sizes):
        for medium in media_of(size):
            media_prompts(args.model).check(medium)
        if (longest := _prompt_tokens(args, size) + size.new_tokens) > card.context_length:
            raise LaunchError(
                f"{mix.name}: expected requests of at most {card.context_length} tokens, the context of "
                f"{args.model.name}, found one of {longest}"
            )
    if any(size.pictures for size in mix.sizes):
        random_jpeg((1, 1), "")  # refuses where Pillow is missing


def _prompt_tokens(args: argparse.Namespace, size: RequestSize) -> int:
    return size.prompt_tokens + sum(media_prompts(args.model).tokens_before(medium) for medium in media_of(size))


def least_trials(args: argparse.Namespace, card: ModelCard, mix: Mix, peaks: Peaks) -> list[Trial]:
    """Return the trials of a server whose steps take the least time that the machine allows."""
    from ...planning.work import encoder_work, model_work

    options = model_options(args)
    dtype, cache_dtype = options.torch_dtype(card), options.torch_kv_dtype(card)
    work = model_work(card, dtype, options.quantization, cache_dtype, options.activation_bits)

    @cache
    def demand(size: RequestSize) -> Demand:
        grids = [media_prompts(args.model).grid(medium) for medium in media_of(size)]
        encoding = (sum(encoder_work(card, dtype, grid).values(), start=Work()) for grid in grids)
        seconds = sum(peaks.limit_seconds(one) for one in encoding)
        return Demand(_prompt_tokens(args, size), size.new_tokens, seconds)

    demands = [demand(size) for size in mix.draw(REQUESTS, 0)]
    return predicted_goodput(demands, args.slo, together(lambda load: peaks.limit_seconds(work.step(load))))


def table(trials: Sequence[Trial]) -> list[str]:
    """Return a header and a line for each trial, by rate."""
    columns = [
        Column("requests/s", 10, lambda row: f"{row['rate']:.3g}"),
        Column("requests", -9, lambda row: str(row["requests"])),
        Column("first token", -14, lambda row: _wait(row, "ttft_s")),
        Column("token after", -14, lambda row: _wait(row, "tpot_s")),
        Column("new tokens/s", -13, lambda row: f"{row['tokens_per_s']:.1f}"),
        Column("", 0, lambda row: "  holds" if row["holds"] else "  late"),
    ]
    return lines_of(columns, sorted(map(asdict, trials), key=lambda row: row["rate"]))


def _wait(row: Row, name: str) -> str:
    """Format a wait. A trial that was given up before an answer was complete has none of the tokens after the first."""
    if not row["waits"][name]:
        return "-"
    return f"{'> ' if row['given_up'] else ''}{1e3 * row['waits'][name]:.0f} ms"


def verdict(result: Goodput) -> str:
    """Return the sentence that says the goodput and the machine's limit."""
    found, limit = best(result.trials), best(result.least)
    least = "even a server at the machine's limit does not keep them at any rate"
    if limit is not None:
        least = f"a server at the machine's limit answers {limit.rate:.3g} requests/s"
    if found is None:
        return f"goodput: none, no rate keeps the limits of latency; {least}"
    share = "" if limit is None else f", of which this is {found.rate / limit.rate:.2f}"
    return f"goodput: {found.rate:.3g} requests/s, {found.tokens_per_s:.1f} new tokens/s; {least}{share}"
