"""`tilerank bench speculative`: tokens a second with drafts against plain decoding, on requests that repeat their
prompts more or less."""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING

from tilerank.loader.quantization_config import held_codes
from tilerank.loader.tokenizer import Tokenizer
from tilerank.runtime.protocol.speculative import Speculative

from ...errors import LaunchError
from ...options.arguments import whole_number, whole_numbers
from ...options.draft_model import check_draft_model
from ...options.hub import add_model_argument
from ...options.model import add_draft_argument, model_options
from ..harness import Column, Row, add_json_argument, add_repeat_argument, check_json_argument, table, write_json
from ..rank_job import (
    EngineJob,
    add_engine_arguments,
    add_rank_arguments,
    is_rank,
    run_as_rank,
    run_ranks,
)
from .requests import TASKS, VARIANTS, requests

if TYPE_CHECKING:
    from tilerank.runtime.lead.drafting.draft_counts import DraftCounts
    from tilerank.runtime.lead.engine import Engine, Request

COLUMNS = [
    Column("task", 8, lambda row: row["task"]),
    Column("requests", -10, lambda row: str(row["requests"])),
    Column("tokens", -8, lambda row: str(row["tokens"])),
    Column("plain tok/s", -13, lambda row: f"{row['plain_tokens_per_s']:.1f}"),
    Column("drafts tok/s", -14, lambda row: f"{row['drafted_tokens_per_s']:.1f}"),
    Column("ratio", -8, lambda row: f"{row['ratio']:.2f}"),
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
    add_draft_argument(parser, default="ngram")
    add_json_argument(parser)
    add_rank_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.draft_model is None:
        args.speculative = args.speculative or "ngram"
    if is_rank(args):
        tokens = max(args.requests) * (_longest(args) + args.new_tokens + 32)
        return run_as_rank(
            args, EngineJob(args, total_tokens=tokens, measure=lambda engine, *_: _measure(args, engine))
        )
    check_json_argument(args)
    check_draft_model(model_options(args).draft_model, Tokenizer(args.model))
    if max(args.requests) > VARIANTS:
        raise LaunchError(f"--requests: expected at most {VARIANTS}, found {max(args.requests)}")
    report = run_ranks(args, args.argv)
    print(f"{args.model.name}: {report['weights']}, {report['isa']}, answers of at most {args.new_tokens} tokens\n")
    print("\n".join(table(COLUMNS, report["rows"])))
    write_json(args, report)
    return 0


def _longest(args: argparse.Namespace) -> int:
    """Return the tokens of the longest prompt."""
    tokenizer = Tokenizer(args.model)
    return max(len(_prompt(tokenizer, text)) for task in TASKS for text in requests(task, 1)) + 32


def _prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return a request as the model's chat template writes it."""
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
    return tokenizer.encode(rendered, add_special_tokens=False)


def _measure(args: argparse.Namespace, engine: Engine) -> Row:
    """Run every task with every number of requests, plain and with drafts in turn. Runs on rank 0.

    The first run of each size warms up. What is measured of the times of steps is kept, as in a server.
    """
    from tilerank.kernels import core
    from tilerank.runtime.lead.drafting.draft_counts import DraftCounts

    options, counts = model_options(args), DraftCounts()
    rows = [_measure_task(args, engine, counts, task, number) for number in args.requests for task in TASKS]
    dtype = str(options.torch_dtype(engine.card)).removeprefix("torch.")
    weights = held_codes(engine.card.quantization, options.quantization) or dtype
    return {"isa": core.isa_text(), "weights": weights, "rows": rows}


def _requests_of(engine: Engine, task: str, number: int, new_tokens: int) -> list[Request]:
    from tilerank.runtime.lead.engine import Request
    from tilerank.runtime.lead.sampling import SamplingParams
    from tilerank.runtime.protocol.prompt import Prompt

    tokenizer = Tokenizer(engine.worker.model_dir)
    ends = tokenizer.end_token_ids(tokenizer.chat_template.after_answer)
    params = SamplingParams(max_new_tokens=new_tokens, end_token_ids=ends)
    return [Request(Prompt(_prompt(tokenizer, text)), params) for text in requests(task, number)]


def _measure_task(args: argparse.Namespace, engine: Engine, counts: DraftCounts, task: str, number: int) -> Row:
    """Return the medians of several runs each, plain and with drafts in turn."""
    from tilerank.runtime.lead.drafting.draft_sources import draft_source
    from tilerank.runtime.lead.drafting.drafts import Drafting

    def timed(speculative: Speculative) -> Row:
        engine.drafting = Drafting(draft_source(speculative, engine.worker), engine.scheduler, counts)
        return _time(engine, some)

    some, drafts = _requests_of(engine, task, number, args.new_tokens), model_options(args).speculative
    timed(drafts)  # the pages of prompts have entries of what drafts from now on
    plain, drafted = list[Row](), list[Row]()
    for _ in range(args.repeat):
        plain.append(timed("off"))
        drafted.append(timed(drafts))
    if any(run["token_ids"] != plain[0]["token_ids"] for run in plain + drafted):
        raise LaunchError(f"bench speculative: task {task}: expected the same tokens in every run, found others")
    rates = [statistics.median(run["tokens_per_s"] for run in runs) for runs in (plain, drafted)]
    last = drafted[-1]
    return {
        "task": task,
        "requests": len(some),
        "tokens": sum(map(len, plain[0]["token_ids"])),
        "plain_tokens_per_s": rates[0],
        "drafted_tokens_per_s": rates[1],
        "ratio": rates[1] / rates[0],
        "ratios": [new["tokens_per_s"] / old["tokens_per_s"] for new, old in zip(drafted, plain, strict=True)],
        "drafted": last["drafted"],
        "accepted": last["accepted"] / max(last["drafted"], 1),
        "tokens_per_step": last["tokens"] / last["steps"] / len(some),
    }


def _time(engine: Engine, some: list[Request]) -> Row:
    """Run requests together. The time begins once each has its first token, whose steps compute prompts."""
    from tilerank.runtime.protocol.events import TokenEvent

    index_of = {engine.submit(request): index for index, request in enumerate(some)}
    token_ids: list[list[int]] = [[] for _ in some]
    steps = tokens = 0
    began = time.perf_counter()
    while engine.busy:
        events = engine.step()
        if not all(token_ids):
            began = time.perf_counter()
        elif events:
            steps, tokens = steps + 1, tokens + len(events)
        for event in events:
            assert isinstance(event, TokenEvent)
            token_ids[index_of[event.request]].append(event.token_id)
    seconds = time.perf_counter() - began
    drafting = engine.drafting
    return {
        "token_ids": token_ids,
        "steps": steps,
        "tokens": tokens,
        "tokens_per_s": tokens / seconds,
        "drafted": drafting.drafted,
        "accepted": drafting.accepted,
    }
