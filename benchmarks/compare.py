"""Measures tilerank and its peers with the same model, prompts and cores, alternating; prints the medians.

    python -m benchmarks.compare MODEL_DIR --with transformers,openvino,llama.cpp,vllm

It takes the options of `tilerank bench model` as well, except --image.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tilerank.launch.bench.cases import cases_of, check_cases, prompts, timing_of
from tilerank.launch.bench.chart import check_chart_argument, write_chart
from tilerank.launch.bench.harness import check_json_argument, write_json
from tilerank.launch.bench.model import measure_model, new_tokens_of
from tilerank.launch.bench.peaks import peaks_of
from tilerank.launch.bench.rank_job import check_command, placement_of
from tilerank.launch.bench.report import OURS, Report, merged, rows_of, table
from tilerank.launch.errors import LaunchError
from tilerank.loader.card import read_card
from tilerank.loader.quantization_config import DEFAULT_INT4_GROUP

from . import script
from .peer import Peer, add_peers_argument, add_scratch_argument, ready_peers, scratch_of


@dataclass(frozen=True)
class Program:
    """What measures a peer in its own environment.

    file: in peers/; None: there is none yet. modules, headers: what the environment must have. reads: the forms of
    models that it takes. quantizations: the values of --quantization that it supports.
    """

    file: str | None
    modules: tuple[str, ...] = ()
    headers: tuple[str, ...] = ()
    reads: tuple[str, ...] = ("directories",)
    quantizations: tuple[str, ...] = ()


PEERS = {
    "llama.cpp": Program(
        "run_llama_cpp.py",
        ("llama_cpp",),
        reads=("directories", "GGUF files"),
        quantizations=("int8", "int4", "mxfp4"),
    ),
    "ik_llama.cpp": Program("run_ik_llama_cpp.py", headers=("llama.h",), reads=("GGUF files",)),
    "transformers": Program("run_transformers.py", ("transformers",)),
    "openvino": Program("run_openvino.py", ("openvino_genai",), quantizations=("int8", "int4")),
    "vllm": Program("run_vllm.py", ("vllm",)),
    "sglang": Program(None),
}
"""The program's arguments are two JSON files.

It reads WORKLOAD: `model` (a directory or a GGUF file), `dtype`, `quantization` (null or a value of
--quantization), `group` (inputs to a scale of int4), `cores`, `scratch` (a directory for converted weights, kept
between its runs), `drafts` (whether it drafts tokens by its own lookup; those of compare_speculative.py can), and
`cases`, each with `prompts` (a batch of lists of token ids), `new_tokens` (tokens to generate after the first, at
most) and `end_token_ids` (an answer ends with one of them; none in compare.py).

It writes RESULT: `version`, `load_s`, `ready_at` (time.monotonic()), and `events`, for each case a list of
[index of the prompt, seconds since the start] of each new token.

It binds itself to `cores`.
"""


def obstacle(peer: Peer, model: Path, quantization: str | None = None) -> str | None:
    """Return why a peer cannot be measured with this model and weights quantised so, or None if it can."""
    program = PEERS[peer.name]
    if program.file is None:
        return "no program runs it yet"
    if ("GGUF files" if model.suffix == ".gguf" else "directories") not in program.reads:
        return f"its program reads {program.reads[0]} alone"
    if quantization is not None and quantization not in program.quantizations:
        return f"its program does not support --quantization {quantization}"
    return peer.missing_header(program.headers) or peer.missing_module(program.modules)


def add_own_arguments(parser: argparse.ArgumentParser) -> None:
    add_peers_argument(parser, PEERS)
    add_scratch_argument(parser)


def compare(args: argparse.Namespace) -> int:
    if args.image:
        raise LaunchError("--image: peers are compared with text only")
    check_command(args)
    check_json_argument(args)
    check_chart_argument(args)
    check_cases(args)
    peers = ready_peers(args.peers, lambda peer: obstacle(peer, args.model, args.quantization))
    _, cores = placement_of(args)
    peaks = peaks_of(cores)
    print(peaks.text(), flush=True)
    rounds: dict[str, list[Report]] = {name: [] for name in (OURS, *(peer.name for peer in peers))}
    with scratch_of(args) as scratch:
        for number in range(args.repeat):
            # Systems alternate, each alone on the machine, so that a slow minute affects all of them.
            rounds[OURS].append(_measure_ours(args, number))
            dtype = rounds[OURS][0]["dtype"]
            for peer in peers:
                rounds[peer.name].append(_measure_peer(args, peer, cores, dtype, number, scratch))
    reports = {system: merged(system_rounds) for system, system_rounds in rounds.items()}
    rows = rows_of(reports, cases_of(args), args.model.name, peaks)
    print("\n".join(table(rows)))
    write_json(args, rows)
    write_chart(args, rows)
    return 0


def _measure_ours(args: argparse.Namespace, number: int) -> Report:
    argv = [*args.argv, "--repeat", "1", "--first-seed", str(number), "--log-level", "warning"]
    return measure_model(args, argv)


def _measure_peer(
    args: argparse.Namespace, peer: Peer, cores: list[int], dtype: str, number: int, scratch: Path
) -> Report:
    vocab, timed = read_card(args.model).vocab_size, cases_of(args)
    cases = [
        {"new_tokens": new_tokens_of(case) - 1, "prompts": prompts(case, vocab, number), "end_token_ids": []}
        for case in timed
    ]
    report = run_peer(args, peer, cores, dtype, cases, scratch)
    timings = [
        [asdict(timing_of([(prompt, seconds) for prompt, seconds in events], case))]
        for case, events in zip(timed, report["events"], strict=True)
    ]
    return report | {"timings": timings}


def run_peer(
    args: argparse.Namespace,
    peer: Peer,
    cores: list[int],
    dtype: str,
    cases: list[dict[str, Any]],
    scratch: Path,
    *,
    drafts: bool = False,
) -> Report:
    """Run a peer's program with the cases of its WORKLOAD. Returns its RESULT, and the seconds until it was ready."""
    peer_scratch = scratch.absolute() / peer.name
    peer_scratch.mkdir(parents=True, exist_ok=True)
    workload = {
        "model": str(args.model.absolute()),
        "dtype": dtype,
        "quantization": args.quantization,
        "group": args.quantization_group or DEFAULT_INT4_GROUP,
        "cores": cores,
        "scratch": str(peer_scratch),
        "drafts": drafts,
        "cases": cases,
    }
    start = time.monotonic()
    report = peer.run(str(PEERS[peer.name].file), workload, peer_scratch)
    return report | {"ready_s": report["ready_at"] - start}


if __name__ == "__main__":
    sys.exit(script.main("model", add_own_arguments, compare, __doc__.splitlines()[0]))
