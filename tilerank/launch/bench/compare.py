"""`tilerank bench compare`: tilerank and its peers with the same model, prompts and cores, alternating; medians."""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tilerank.loader.quantization_config import DEFAULT_INT4_GROUP

from .cases import add_case_arguments, cases_of, check_cases, prompts, timing_of
from .chart import add_chart_argument, check_chart_argument, write_chart
from .json_rows import add_json_argument, check_json_argument, write_json
from .model import measure_model, model_job, new_tokens_of
from .peaks import peaks_of
from .peer import missing_module, run_program
from .rank_job import (
    add_engine_arguments,
    add_model_arguments,
    add_rank_arguments,
    is_rank,
    model_card,
    placement_of,
    run_as_rank,
)
from .report import OURS, Report, merged, rows_of, table

PEERS: dict[str, tuple[str, str | None, tuple[str, ...]]] = {
    "llama.cpp": ("llama_cpp", "run_llama_cpp.py", ("int8", "int4")),
    "transformers": ("transformers", "run_transformers.py", ()),
    "openvino": ("openvino_genai", "run_openvino.py", ("int8", "int4")),
    "vllm": ("vllm", "run_vllm.py", ()),
    "sglang": ("sglang", None, ()),
}
"""For each peer: the module that it is installed as, the program in peers/ that runs it, and the values of
--quantization that the program supports.

The program's arguments are two JSON files.

It reads WORKLOAD: `model` (a directory), `dtype`, `quantization` (null or a value of --quantization), `group` (inputs
to a scale of int4), `cores`, `scratch` (a directory for converted weights, kept between its runs), and `cases`, each
with `prompts` (a batch of lists of token ids) and `new_tokens` (tokens to generate after the first).

It writes RESULT: `version`, `load_s`, `ready_at` (time.monotonic()), and `events`, for each case a list of
[index of the prompt, seconds since the start] of each new token.

It binds itself to `cores`.
"""


@dataclass(frozen=True)
class Peer:
    """A system to compare with, and the Python interpreter in whose environment it is installed."""

    name: str
    python: str

    def obstacle(self, quantization: str | None = None) -> str | None:
        """Return why the peer cannot be measured with weights quantised so, or None if it can."""
        module, program, quantizations = PEERS[self.name]
        if program is None:
            return "bench compare does not support it yet"
        if quantization is not None and quantization not in quantizations:
            return f"bench compare does not support --quantization {quantization} for it"
        return missing_module(self.python, [module])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument(
        "--with",
        dest="peers",
        type=_peers,
        default=[Peer("transformers", sys.executable)],
        metavar="NAME[=PYTHON],...",
        help=f"peers from {', '.join(PEERS)}; PYTHON is the interpreter that has the peer, by default this one "
        "(default: transformers)",
    )
    parser.add_argument(
        "--scratch",
        type=Path,
        metavar="DIR",
        help="keep the weights that peers convert in DIR, for later runs (default: a temporary directory)",
    )
    add_case_arguments(parser)
    add_engine_arguments(parser)
    add_json_argument(parser)
    add_chart_argument(parser)
    add_rank_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if is_rank(args):
        return run_as_rank(args, model_job(args))
    check_json_argument(args)
    check_chart_argument(args)
    check_cases(args)
    peers = []
    for peer in args.peers:
        obstacle = peer.obstacle(args.quantization)
        if obstacle is None:
            peers.append(peer)
        else:
            print(f"{peer.name}: skipped, {obstacle}")
    _, cores = placement_of(args)
    peaks = peaks_of(cores)
    print(peaks.text(), flush=True)
    rounds: dict[str, list[Report]] = {name: [] for name in (OURS, *(peer.name for peer in peers))}
    with contextlib.ExitStack() as stack:
        scratch = args.scratch or stack.enter_context(tempfile.TemporaryDirectory(prefix="tilerank-bench-"))
        for number in range(args.repeat):
            # Systems alternate, each alone on the machine, so that a slow minute affects all of them.
            rounds[OURS].append(_measure_ours(args, number))
            dtype = rounds[OURS][0]["dtype"]
            for peer in peers:
                rounds[peer.name].append(_measure_peer(args, peer, cores, dtype, number, Path(scratch)))
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
    vocab, cases = model_card(args.model).vocab_size, cases_of(args)
    peer_scratch = scratch.absolute() / peer.name
    peer_scratch.mkdir(parents=True, exist_ok=True)
    workload = {
        "model": str(args.model.absolute()),
        "dtype": dtype,
        "quantization": args.quantization,
        "group": args.quantization_group or DEFAULT_INT4_GROUP,
        "cores": cores,
        "scratch": str(peer_scratch),
        "cases": [
            {
                "new_tokens": new_tokens_of(case) - 1,
                "prompts": prompts(case, vocab, number),
            }
            for case in cases
        ],
    }
    start = time.monotonic()
    report = run_program(peer.name, peer.python, str(PEERS[peer.name][1]), workload, peer_scratch)
    timings = [
        [asdict(timing_of([(prompt, seconds) for prompt, seconds in events], case))]
        for case, events in zip(cases, report["events"], strict=True)
    ]
    return report | {"ready_s": report["ready_at"] - start, "timings": timings}


def _peers(text: str) -> list[Peer]:
    peers = []
    for part in text.split(","):
        name, _, python = part.partition("=")
        if name not in PEERS:
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(PEERS)}, found {name!r}")
        peers.append(Peer(name, python or sys.executable))
    return peers
