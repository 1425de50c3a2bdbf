"""`tilerank bench serve`: a server under load over HTTP, against its engine alone.

The same prompts go to an engine, as token ids in one batch, and then, as text, to `tilerank serve` on loopback with the
same options. The difference is the cost of HTTP: parsing, tokenising, sockets, events, and the CPU time that these take
from the ranks. The first token is timed when its event arrives; tokens are counted by the server's `usage`. A model
that embeds texts is measured by embeddings.py. With --slo, serving/goodput.py measures the server alone.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tilerank.loader.card import ModelCard, read_card
from tilerank.loader.tokenizer import Tokenizer
from tilerank.runtime.media.registry import with_options

from ..errors import LaunchError
from ..options.arguments import whole_number
from ..options.hub import add_model_argument
from ..options.model import model_options
from ..serving.own_server import own_server
from . import embeddings
from .harness import add_json_argument, add_repeat_argument, check_json_argument, write_json
from .rank_job import (
    EngineJob,
    add_engine_arguments,
    add_rank_arguments,
    is_rank,
    run_as_rank,
    run_ranks,
)
from .serving import goodput
from .serving.client import Stream, completion_request, port_of, random_text

if TYPE_CHECKING:
    from tilerank.runtime.lead.engine import Engine

    from ..host.placement import Placement
    from .rank_job import RankMemory

TITLES = {
    "first_token_s": "first token, one stream",
    "one_tokens_per_s": "tokens/s, one stream",
    "all_tokens_per_s": "tokens/s, all streams",
    "new_prefix_s": "first token, new prefix",
    "same_prefix_s": "first token, cached prefix",
    **embeddings.TITLES,
}
SUFFIX_TOKENS = 24  # of a prompt, after the prefix that two prompts share


@dataclass(frozen=True)
class CompletionTiming:
    """The timing of one completion: seconds from the submission of its batch to its first and its last token."""

    first_s: float
    last_s: float
    tokens: int


Complete = Callable[[Sequence[str], int], list[CompletionTiming]]
"""Completes a batch of prompts at the same time, with a number of new tokens each."""

Metrics = dict[str, float]
"""Values by the keys of `TITLES`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    _add_load_arguments(parser)
    add_engine_arguments(parser)
    add_rank_arguments(parser)
    goodput.add_server_arguments(parser)


def _add_load_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that `serve` does not have."""
    positive = whole_number(1)
    parser.add_argument("--streams", type=positive, default=16, metavar="N", help="concurrent requests (default: 16)")
    parser.add_argument(
        "--prompt-tokens", type=positive, default=128, metavar="N", help="length of a prompt (default: 128)"
    )
    parser.add_argument(
        "--new-tokens", type=whole_number(2), default=64, metavar="N", help="new tokens of a request (default: 64)"
    )
    parser.add_argument(
        "--prefix-tokens", type=positive, default=1000, metavar="N", help="length of a shared prefix (default: 1000)"
    )
    add_repeat_argument(parser)
    goodput.add_arguments(parser)
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    if is_rank(args):
        return run_as_rank(args, _job(args))
    check_json_argument(args)
    if args.slo is not None:
        return goodput.run(args, _serve_argv(args))
    goodput.check_unused(args)
    rows, cpu_s = compare_with_engine(args)
    if _embeds(args):
        print(f"{args.model.name}: texts of {args.prompt_tokens} tokens, {args.streams} at the same time")
        print("\n".join(table(rows)))
        write_json(args, {"rows": rows})
        return 0
    share = same_prefix_share({row["what"]: row["http"] for row in rows})
    print(f"{args.model.name}: prompts of {args.prompt_tokens} tokens, {args.new_tokens} new tokens each, greedy")
    print("\n".join(table(rows)))
    print(f"first token after {args.prefix_tokens} cached prefix tokens: {share:.1%} of the time without the cache")
    print(f"CPU time of the measuring client: {1e6 * cpu_s:.0f} us per token")
    write_json(args, {"rows": rows, "same_prefix_share": share, "client_cpu_s_a_token": cpu_s})
    return 0


def compare_with_engine(args: argparse.Namespace) -> tuple[list[dict[str, Any]], float]:
    """Measure the engine alone and the server. Returns the rows of both, and the client's CPU seconds per token, 0 for
    a model that embeds texts."""
    _check_length(args)
    offline = run_ranks(args, args.argv)
    sizes = ["--max-total-tokens", str(cache_tokens(args))]
    with own_server([*_serve_argv(args), *sizes]) as address, asyncio.Runner() as runner:
        port = port_of(address)
        if _embeds(args):
            return rows_of(offline, embeddings.measure(embeddings.embed_over_http(port, runner), args)), 0.0
        client = Client(port, runner)
        return rows_of(offline, measure(client.complete, args)), client.cpu_s_per_token


def _serve_argv(args: argparse.Namespace) -> list[str]:
    """Return the options of the server: those of the command line that `serve` has. It drafts nothing, as the engine
    alone: what drafts gain depends on the texts, and these are random."""
    load_parser = argparse.ArgumentParser(add_help=False)
    _add_load_arguments(load_parser)
    asked = load_parser.parse_known_args(args.argv[2:])[1]  # without `bench serve`
    return [*asked, "--speculative", "off"]


def _card(args: argparse.Namespace) -> ModelCard:
    return with_options(read_card(args.model), model_options(args).family)


def _embeds(args: argparse.Namespace) -> bool:
    """Return whether the model embeds texts. Raises LaunchError for one that scores pairs of them."""
    pooling = _card(args).pooling
    if pooling is not None and pooling.task != "embed":
        raise LaunchError(f"{args.model.name} scores pairs of texts; expected a model that generates or embeds texts")
    return pooling is not None


def measure(complete: Complete, args: argparse.Namespace) -> Metrics:
    """Return the medians of `--repeat` runs, after a warm-up that touches all code and all memory of the cache."""
    _measure_once(complete, args, seed=-1)
    runs = [_measure_once(complete, args, seed) for seed in range(args.repeat)]
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def _measure_once(complete: Complete, args: argparse.Namespace, seed: int) -> Metrics:
    """Measure each metric once.

    Times to first token are of completions of one token: a longer stream holds text back until it cannot change, which
    may take a second token.
    """
    rng = random.Random(seed)
    [first] = complete(prompts(rng, 1, args.prompt_tokens), 1)
    [one] = complete(prompts(rng, 1, args.prompt_tokens), args.new_tokens)
    many = complete(prompts(rng, args.streams, args.prompt_tokens), args.new_tokens)
    [prefix] = prompts(rng, 1, args.prefix_tokens)
    new, cached = (complete([f"{prefix} {suffix}"], 1)[0] for suffix in prompts(rng, 2, SUFFIX_TOKENS))
    return {
        "first_token_s": first.first_s,
        "one_tokens_per_s": one.tokens / one.last_s,
        "all_tokens_per_s": sum(one.tokens for one in many) / max(one.last_s for one in many),
        "new_prefix_s": new.first_s,
        "same_prefix_s": cached.first_s,
    }


def prompts(rng: random.Random, count: int, tokens: int) -> list[str]:
    """Return `count` prompts of `tokens` random letters."""
    return [random_text(rng, tokens) for _ in range(count)]


def rows_of(offline: Metrics, over_http: Metrics) -> list[dict[str, Any]]:
    """Return a row for each metric, of the engine alone and over HTTP, with their ratio."""
    return [
        {"what": name, "offline": offline[name], "http": over_http[name], "ratio": over_http[name] / offline[name]}
        for name in offline
    ]


def same_prefix_share(metrics: Metrics) -> float:
    """Return the time to the first token with a cached prefix over that without."""
    return metrics["same_prefix_s"] / metrics["new_prefix_s"]


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Format the rows of `rows_of` as lines."""
    lines = [f"{'':<36}{'offline':>12}{'HTTP':>12}{'HTTP vs offline':>20}"]
    for row in rows:
        title, offline, http = TITLES[row["what"]], row["offline"], row["http"]
        if row["what"].endswith("_per_s"):
            lines.append(f"{title:<36}{offline:>12.1f}{http:>12.1f}{row['ratio']:>19.3f}x")
        else:
            added = 1e3 * (http - offline)
            lines.append(f"{title:<36}{1e3 * offline:>9.1f} ms{1e3 * http:>9.1f} ms{added:>+17.1f} ms")
    return lines


def _check_length(args: argparse.Namespace) -> None:
    longest, names = args.prompt_tokens, "--prompt-tokens"
    if not _embeds(args):
        longest = max(args.prompt_tokens + args.new_tokens, args.prefix_tokens + SUFFIX_TOKENS + 1)
        names = "--prompt-tokens, --new-tokens and --prefix-tokens"
    limit = _card(args).context_length
    if longest > limit:
        raise LaunchError(f"{names}: expected at most {limit} positions, found {longest}")


def cache_tokens(args: argparse.Namespace) -> int:
    """Return the size of the cache in both measurements: the most that the requests of a run need at a time.

    A larger one would have pages that the warm-up has not touched, and their page faults cost more than the differences
    measured here.
    """
    page = 32  # kernels/kv_pages.py: PAGE_TOKENS; importing it would import torch
    sequences = (args.streams, args.prompt_tokens + args.new_tokens), (2, args.prefix_tokens + SUFFIX_TOKENS)
    return int(max(count * (tokens + 2 * page) for count, tokens in sequences))


def _job(args: argparse.Namespace) -> EngineJob:
    def offline(engine: Engine, placement: Placement, ranks: list[RankMemory]) -> Metrics:
        tokenizer = Tokenizer(args.model)
        if _embeds(args):
            return embeddings.measure(embeddings.embed_with(engine, tokenizer), args)
        return measure(_complete_with(engine, tokenizer), args)

    return EngineJob(args, total_tokens=cache_tokens(args), measure=offline)


def _complete_with(engine: Engine, tokenizer: Tokenizer) -> Complete:
    """Return a function that completes prompts with the engine, without a server. Runs on rank 0."""
    from tilerank.runtime.lead.engine import Request
    from tilerank.runtime.lead.sampling import SamplingParams
    from tilerank.runtime.protocol.prompt import Prompt

    def complete(texts: Sequence[str], new_tokens: int) -> list[CompletionTiming]:
        params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
        times: list[list[float]] = [[] for _ in texts]
        for event in engine.generate([Request(Prompt(tokenizer.encode(text)), params) for text in texts]):
            times[event.request].append(event.time_s)
        return [CompletionTiming(seconds[0], seconds[-1], len(seconds)) for seconds in times]

    return complete


class Client:
    """Streams completions over one connection each, all at the same time."""

    def __init__(self, port: int, runner: asyncio.Runner) -> None:
        self._port = port
        self._runner = runner
        self._cpu_s = 0.0
        self._tokens = 0

    @property
    def cpu_s_per_token(self) -> float:
        """CPU seconds of this client per token of all completions."""
        return self._cpu_s / self._tokens

    def complete(self, texts: Sequence[str], new_tokens: int) -> list[CompletionTiming]:
        start = time.process_time()
        completions = self._runner.run(self._complete(texts, new_tokens))
        self._cpu_s += time.process_time() - start
        self._tokens += sum(completion.tokens for completion in completions)
        return completions

    async def _complete(self, texts: Sequence[str], new_tokens: int) -> list[CompletionTiming]:
        connections = [await asyncio.open_connection("127.0.0.1", self._port) for _ in texts]
        requests = [completion_request(text, new_tokens) for text in texts]
        start = time.monotonic()
        streams = [Stream(start) for _ in texts]
        each = zip(streams, connections, requests, strict=True)
        await asyncio.gather(*(stream.read_from(connection, request) for stream, connection, request in each))
        return [CompletionTiming(stream.first_s, stream.last_s, stream.tokens or 0) for stream in streams]
