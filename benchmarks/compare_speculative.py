"""Measures decoding with drafts of tilerank and its peers, on the requests of `tilerank bench speculative`.

    python -m benchmarks.compare_speculative MODEL_DIR --requests 1 --with openvino=PYTHON,llama.cpp=PYTHON

It takes the options of `tilerank bench speculative` too. Peers draft with their own lookup in the prompt.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tilerank.launch.bench.harness import Column, Row, check_json_argument, table, write_json
from tilerank.launch.bench.rank_job import check_command, placement_of, run_ranks
from tilerank.launch.bench.report import OURS
from tilerank.launch.bench.speculative.command import check_options
from tilerank.launch.bench.speculative.requests import TASKS, end_token_ids, prompts
from tilerank.launch.errors import LaunchError
from tilerank.loader.tokenizer import Tokenizer

from . import script
from .compare import obstacle, run_peer
from .peer import Peer, add_peers_argument, add_scratch_argument, ready_peers, scratch_of

PEERS = ("llama.cpp", "openvino", "vllm")
WARM_UP_TOKENS = 32

COLUMNS = [
    Column("task", 8, lambda row: row["task"]),
    Column("requests", -8, lambda row: str(row["requests"])),
    Column("  system", 13, lambda row: f"  {row['system']}"),
    Column("tokens", -7, lambda row: str(row["tokens"])),
    Column("plain tok/s", -13, lambda row: f"{row['plain_tokens_per_s']:.1f}"),
    Column("speedup", -9, lambda row: _speedup(row, "plain_speedup")),
    Column("drafts tok/s", -14, lambda row: f"{row['drafted_tokens_per_s']:.1f}"),
    Column("speedup", -9, lambda row: _speedup(row, "drafted_speedup")),
    Column("ratio", -8, lambda row: f"{row['ratio']:.2f}"),
    Column("tokens/step", -13, lambda row: f"{row['tokens_per_step']:.2f}"),
]


def add_own_arguments(parser: argparse.ArgumentParser) -> None:
    add_peers_argument(parser, PEERS, default=",".join(PEERS))
    add_scratch_argument(parser)


def compare(args: argparse.Namespace) -> int:
    check_command(args)
    check_json_argument(args)
    check_options(args)
    peers = ready_peers(args.peers, lambda peer: obstacle(peer, args.model, args.quantization))
    _, cores = placement_of(args)
    rounds: dict[str, list[list[Row]]] = {name: [] for name in (OURS, *(peer.name for peer in peers))}
    with scratch_of(args) as scratch:
        for _ in range(args.repeat):
            # Systems alternate, each alone on the machine, so that a slow minute affects all of them.
            report = run_ranks(args, [*args.argv, "--repeat", "1", "--log-level", "warning"])
            rounds[OURS].append(report["rows"])
            for peer in peers:
                rounds[peer.name].append(_measure_peer(args, peer, cores, report["dtype"], scratch))
    rows = _rows_of(rounds)
    print(f"{args.model.name}: {report['weights']}, {report['isa']}, answers of at most {args.new_tokens} tokens\n")
    print("\n".join(table(COLUMNS, rows)))
    write_json(args, rows)
    return 0


def _measure_peer(args: argparse.Namespace, peer: Peer, cores: list[int], dtype: str, scratch: Path) -> list[Row]:
    """Return a row for each case. A short run of each case warms up."""
    tokenizer = Tokenizer(args.model)
    ends = list(end_token_ids(tokenizer))
    named = [(task, number) for number in args.requests for task in TASKS]
    cases: list[dict[str, Any]] = [
        {"prompts": prompts(tokenizer, task, number), "new_tokens": args.new_tokens - 1, "end_token_ids": ends}
        for task, number in named
    ]
    warm_up = [case | {"new_tokens": min(WARM_UP_TOKENS, args.new_tokens - 1)} for case in cases]
    reports = [run_peer(args, peer, cores, dtype, warm_up + cases, scratch, drafts=drafts) for drafts in (False, True)]
    rows = []
    for index, (task, number) in enumerate(named, len(warm_up)):
        plain, drafted = (decoding(peer.name, task, report["events"][index]) for report in reports)
        rows.append(
            {
                "task": task,
                "requests": number,
                "tokens": len(reports[0]["events"][index]),
                "plain_tokens_per_s": plain["tokens_per_s"],
                "drafted_tokens_per_s": drafted["tokens_per_s"],
                "tokens_per_step": drafted["tokens_per_step"],
                "version": reports[0]["version"],
            }
        )
    return rows


def decoding(system: str, task: str, events: Sequence[tuple[int, float]]) -> Row:
    """Return the rates of an answer, or of several that are made together, after the first token of each.

    events: as in RESULT (compare.py). Tokens of the same step have the same time. tokens_per_step: of a sequence, in
    the steps that it takes part in.
    """
    first: dict[int, float] = {}
    for prompt, seconds in events:
        first.setdefault(prompt, seconds)
    began = max(first.values())
    later = [(prompt, seconds) for prompt, seconds in events if seconds > began]
    if not later:
        raise LaunchError(f"{system}: task {task}: expected answers of two tokens or more, found one")
    return {
        "tokens_per_s": len(later) / (max(seconds for _, seconds in later) - began),
        "tokens_per_step": len(later) / len(set(later)),
    }


def _rows_of(rounds: dict[str, list[list[Row]]]) -> list[Row]:
    """Return the rows of all systems by case, with the medians of the rounds, and the speedups of tilerank."""
    rows = []
    for case in zip(*(zip(*of_system, strict=True) for of_system in rounds.values()), strict=True):
        merged = [_median(runs) for runs in case]
        for system, row in zip(rounds, merged, strict=True):
            speedups = {
                "plain_speedup": merged[0]["plain_tokens_per_s"] / row["plain_tokens_per_s"],
                "drafted_speedup": merged[0]["drafted_tokens_per_s"] / row["drafted_tokens_per_s"],
            }
            rows.append({"system": system} | row | speedups)
    return rows


def _median(runs: Sequence[Row]) -> Row:
    rates = {
        name: statistics.median(run[name] for run in runs) for name in ("plain_tokens_per_s", "drafted_tokens_per_s")
    }
    return runs[0] | rates | {"ratio": rates["drafted_tokens_per_s"] / rates["plain_tokens_per_s"]}


def _speedup(row: Row, name: str) -> str:
    return "" if row["system"] == OURS else f"{row[name]:.2f}x"


if __name__ == "__main__":
    sys.exit(script.main("speculative", add_own_arguments, compare, __doc__.splitlines()[0]))
