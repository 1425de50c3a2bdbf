"""`tilerank bench speculative`: tokens a second with drafts against plain decoding, on requests that repeat their
prompts more or less."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tilerank.loader.quantization_config import held_codes
from tilerank.loader.tokenizer import Tokenizer
from tilerank.parallel.cost import Work

from ...errors import LaunchError
from ...host.topology import read_topology
from ...options.arguments import whole_number, whole_numbers
from ...options.draft_model import check_draft_model
from ...options.hub import add_model_argument
from ...options.model import add_draft_argument, model_options
from ..harness import Column, Row, add_json_argument, add_repeat_argument, check_json_argument, table, write_json
from ..peaks import RateProbe
from ..rank_job import (
    EngineJob,
    add_engine_arguments,
    add_rank_arguments,
    cache_tokens,
    cores_of,
    is_rank,
    run_as_rank,
    run_ranks,
)
from .limit import bytes_read
from .requests import TASKS, VARIANTS, end_token_ids, prompts

if TYPE_CHECKING:
    from tilerank.runtime.lead.drafting.drafts import DraftSource
    from tilerank.runtime.lead.engine import Engine, Request

    from ...host.placement import Placement
    from ...planning.work import ModelWork

COLUMNS = [
    Column("task", 8, lambda row: row["task"]),
    Column("requests", -10, lambda row: str(row["requests"])),
    Column("tokens", -8, lambda row: str(row["tokens"])),
    Column("plain tok/s", -13, lambda row: f"{row['plain_tokens_per_s']:.1f}"),
    Column("drafts tok/s", -14, lambda row: f"{row['drafted_tokens_per_s']:.1f}"),
    Column("ratio", -8, lambda row: f"{row['ratio']:.2f}"),
    Column("of limit", -10, lambda row: f"{row['limit_share']:.2f}"),
    Column("accepted", -10, lambda row: f"{row['accepted']:.0%}"),
    Column("tokens/step", -13, lambda row: f"{row['tokens_per_step']:.2f}"),
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument(
        "--requests",
        type=whole_numbers(1),
        default=[1, 16],
        metavar="N,N",
        help=f"that run together, at most {VARIANTS} (default: 1,16)",
    )
    parser.add_argument(
        "--new-tokens", type=whole_number(2), default=256, metavar="N", help="of an answer, at most (default: 256)"
    )
    add_repeat_argument(parser)
    add_engine_arguments(parser)
    add_draft_argument(parser)
    add_json_argument(parser)
    add_rank_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if is_rank(args):
        tokens = cache_tokens(args, [(max(args.requests), _longest(args) + args.new_tokens)])
        job = EngineJob(
            args, total_tokens=tokens, measure=lambda engine, placement, _: _measure(args, engine, placement)
        )
        return run_as_rank(args, job)
    check_json_argument(args)
    check_options(args)
    report = run_ranks(args, args.argv)
    print(f"{args.model.name}: {report['weights']}, {report['isa']}, answers of at most {args.new_tokens} tokens\n")
    print("\n".join(table(COLUMNS, report["rows"])))
    write_json(args, report)
    return 0


def check_options(args: argparse.Namespace) -> None:
    check_draft_model(model_options(args).draft_model, Tokenizer(args.model))
    if max(args.requests) > VARIANTS:
        raise LaunchError(f"--requests: expected at most {VARIANTS}, found {max(args.requests)}")


def _longest(args: argparse.Namespace) -> int:
    """Return the tokens of the longest prompt."""
    tokenizer = Tokenizer(args.model)
    return max(len(prompts(tokenizer, task, 1)[0]) for task in TASKS) + 32


def _measure(args: argparse.Namespace, engine: Engine, placement: Placement) -> Row:
    """Run every task with every number of requests. Runs on rank 0."""
    from tilerank.kernels import core

    options = model_options(args)
    dtype = options.torch_dtype(engine.card)
    bench = _Bench(args, engine, RateProbe(cores_of(placement, read_topology())))
    rows = [bench.measure(task, number) for number in args.requests for task in TASKS]
    name = str(dtype).removeprefix("torch.")
    weights = held_codes(engine.card.quantization, options.quantization) or name
    return {"isa": core.isa_text(), "dtype": name, "weights": weights, "rows": rows}


class _Bench:
    """Runs tasks plain and with drafts in turn. What is measured of the times of steps is kept, as in a server."""

    def __init__(self, args: argparse.Namespace, engine: Engine, probe: RateProbe) -> None:
        from tilerank.runtime.lead.drafting.draft_counts import DraftCounts

        self._engine, self._probe, self._counts = engine, probe, DraftCounts()
        self._repeat, self._new_tokens = args.repeat, args.new_tokens
        self._speculative = model_options(args).drafts(engine.card)
        self._tokenizer = Tokenizer(engine.worker.model_dir)
        self._work = _work_without_drafts(args, engine)

    def measure(self, task: str, number: int) -> Row:
        """Return the medians of several runs each, plain and with drafts. The first two warm up and do not count."""
        from tilerank.runtime.lead.drafting.draft_sources import SOURCES

        some = self._requests(task, number)
        plain, drafted = list[Row](), list[Row]()
        for _ in range(1 + self._repeat):
            # Drafts come first: the pages of prompts have entries of what drafts from then on.
            drafted.append(self._run(task, some, SOURCES[self._speculative](self._engine.worker)))
            plain.append(self._run(task, some, None))
        answers = plain[0]["token_ids"]
        if any(run["token_ids"] != answers for run in plain + drafted):
            raise LaunchError(f"bench speculative: task {task}: expected the same tokens in every run, found others")
        del plain[0], drafted[0]
        rates, shares = (
            [statistics.median(run[name] for run in runs) for runs in (plain, drafted)]
            for name in ("tokens_per_s", "limit_share")
        )
        last = drafted[-1]
        return {
            "task": task,
            "requests": len(some),
            "tokens": sum(map(len, answers)),
            "plain_tokens_per_s": rates[0],
            "drafted_tokens_per_s": rates[1],
            "ratio": rates[1] / rates[0],
            "ratios": [new["tokens_per_s"] / old["tokens_per_s"] for new, old in zip(drafted, plain, strict=True)],
            "plain_limit_share": shares[0],
            "limit_share": shares[1],
            "drafted": last["drafted"],
            "accepted": last["accepted"] / max(last["drafted"], 1),
            "tokens_per_step": tokens_per_step(last["steps"]),
        }

    def _requests(self, task: str, number: int) -> list[Request]:
        from tilerank.runtime.lead.engine import Request
        from tilerank.runtime.lead.sampling import SamplingParams
        from tilerank.runtime.protocol.prompt import Prompt

        ends = end_token_ids(self._tokenizer)
        params = SamplingParams(max_new_tokens=self._new_tokens, end_token_ids=ends)
        return [Request(Prompt(token_ids), params) for token_ids in prompts(self._tokenizer, task, number)]

    def _run(self, task: str, some: list[Request], source: DraftSource | None) -> Row:
        """Run requests once. limit_share: tokens a second over those of one token a read (limit.py)."""
        from tilerank.runtime.lead.drafting.drafts import Drafting

        engine = self._engine
        engine.drafting = Drafting(source, engine.scheduler, self._counts)
        run, rates = self._probe.around(Work(nbytes=1), lambda: time_decoding(engine, task, some))
        sizes = [
            (len(one.prompt.token_ids), len(token_ids)) for one, token_ids in zip(some, run["token_ids"], strict=True)
        ]
        share = bytes_read(self._work, sizes) / (rates["stream_read_gbs"] * 1e9) / run["seconds"]
        return run | {"limit_share": share, "tokens_per_s": run["tokens"] / run["seconds"]}


def _work_without_drafts(args: argparse.Namespace, engine: Engine) -> ModelWork:
    from ...planning.work import model_work

    options, card = model_options(args), replace(engine.card, draft_head=False)
    dtype, cache_dtype = options.torch_dtype(card), options.torch_kv_dtype(card)
    return model_work(card, dtype, options.quantization, cache_dtype, options.activation_bits)


def tokens_per_step(steps: Sequence[Sequence[int]]) -> float:
    """Return the mean tokens of a sequence in a step. steps: for each step, the sequence of each of its tokens."""
    return sum(map(len, steps)) / sum(len(set(sequences)) for sequences in steps)


def time_decoding(engine: Engine, task: str, some: list[Request]) -> Row:
    """Run requests together. The time begins once each has its first token, whose steps compute prompts. steps: as in
    `tokens_per_step`. LaunchError if no token comes after that."""
    from tilerank.runtime.protocol.events import TokenEvent

    index_of = {engine.submit(request): index for index, request in enumerate(some)}
    token_ids: list[list[int]] = [[] for _ in some]
    steps: list[list[int]] = []
    began = time.perf_counter()
    while engine.busy:
        events = engine.step()
        if not all(token_ids):
            began = time.perf_counter()
        elif events:
            steps.append([event.request for event in events])
        for event in events:
            assert isinstance(event, TokenEvent)
            token_ids[index_of[event.request]].append(event.token_id)
    if not steps:
        raise LaunchError(f"bench speculative: task {task}: expected tokens once each answer has one, found none")
    return {
        "token_ids": token_ids,
        "steps": steps,
        "tokens": sum(map(len, steps)),
        "seconds": time.perf_counter() - began,
        "drafted": engine.drafting.drafted,
        "accepted": engine.drafting.accepted,
    }
