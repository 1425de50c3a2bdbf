"""`tilerank bench compare`: the same model, prompts and cores for us and for peers, in turns; medians."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tilerank.loader.quantization import DEFAULT_INT4_GROUP

from . import bench_chart, bench_job, bench_model
from .bench_cases import add_case_arguments, cases_of, check_cases, prompts, timing_of
from .bench_json import add_json_argument, check_json_argument, write_json
from .bench_peaks import peaks_of
from .bench_report import OURS, Report, merged, rows_of, table
from .errors import LaunchError
from .process import die_with

PEERS: dict[str, tuple[str, str | None, tuple[str, ...]]] = {
    "llama.cpp": ("llama_cpp", "peer_llama_cpp.py", ("int8", "int4")),
    "transformers": ("transformers", "peer_transformers.py", ()),
    "openvino": ("openvino_genai", "peer_openvino.py", ("int8", "int4")),
    "vllm": ("vllm", "peer_vllm.py", ()),
    "sglang": ("sglang", None, ()),
}
"""By peer: the module that tells whether it is installed, the program in this folder that measures it, and to which
codes that one quantises.

The program gets two files. It reads the job: `model` (a directory), `dtype`, `quantization` (null, or codes as
--quantization names them) and `group` (columns to a scale of int4), `cores`, `scratch` (a directory that its runs
share, for what it has to convert) and `cases`, each with `prompts` (lists of token ids, a batch) and `new_tokens`,
tokens to make after the first one. It writes the result: `version`, `load_s`, `ready_at` (time.monotonic()), and
`events`, for every case the [prompt, seconds] of each token. It sets its own affinity to `cores`.
"""


@dataclass(frozen=True)
class Peer:
    """A system to compare with, and the Python that has it."""

    name: str
    python: str

    def obstacle(self, quantization: str | None = None) -> str | None:
        """Why it cannot be measured with such weights."""
        module, program, codes = PEERS[self.name]
        if program is None:
            return "bench compare cannot drive it yet"
        if quantization is not None and quantization not in codes:
            return f"bench compare does not quantise to {quantization} for it"
        look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
        try:
            found = subprocess.run([self.python, "-P", "-c", look], check=False, stdin=subprocess.DEVNULL).returncode
        except OSError as e:
            return f"{self.python} cannot be run: {e.strerror}"
        return None if found == 0 else f"not installed: {self.python} has no module {module}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    bench_job.add_model_arguments(parser)
    parser.add_argument(
        "--with",
        dest="peers",
        type=_peers,
        default=[Peer("transformers", sys.executable)],
        metavar="NAME[=PYTHON],...",
        help=f"of {', '.join(PEERS)}, each with the Python that has it (default: transformers, this one)",
    )
    parser.add_argument(
        "--scratch",
        type=Path,
        metavar="DIR",
        help="keep what peers convert of this model in DIR, for the next time (default: nothing is kept)",
    )
    add_case_arguments(parser)
    bench_job.add_engine_arguments(parser)
    add_json_argument(parser)
    bench_chart.add_chart_argument(parser)
    bench_job.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if bench_job.is_rank(args):
        return bench_job.run_as_rank(args, bench_model.job(args))
    check_json_argument(args)
    bench_chart.check_chart_argument(args)
    check_cases(args)
    peers = []
    for peer in args.peers:
        obstacle = peer.obstacle(args.quantization)
        if obstacle is None:
            peers.append(peer)
        else:
            print(f"{peer.name}: left out, {obstacle}")
    _, cores = bench_job.placement_of(args)
    peaks = peaks_of(cores)
    print(peaks.text(), flush=True)
    rounds: dict[str, list[Report]] = {name: [] for name in (OURS, *(peer.name for peer in peers))}
    with contextlib.ExitStack() as stack:
        scratch = args.scratch or stack.enter_context(tempfile.TemporaryDirectory(prefix="tilerank-bench-"))
        for number in range(args.repeat):
            # In turns, each alone on the machine: a slow minute then hits all of them.
            rounds[OURS].append(_ours(args, number))
            dtype = rounds[OURS][0]["dtype"]
            for peer in peers:
                rounds[peer.name].append(_theirs(args, peer, cores, dtype, number, Path(scratch)))
    rows = rows_of(
        {system: merged(of_one) for system, of_one in rounds.items()}, cases_of(args), args.model.name, peaks
    )
    print("\n".join(table(rows)))
    write_json(args, rows)
    bench_chart.write_chart(args, rows)
    return 0


def _ours(args: argparse.Namespace, number: int) -> Report:
    argv = [*args.argv, "--repeat", "1", "--first-seed", str(number), "--log-level", "warning"]
    return bench_model.measure(args, argv)


def _theirs(args: argparse.Namespace, peer: Peer, cores: list[int], dtype: str, number: int, scratch: Path) -> Report:
    vocab, cases = bench_job.model_config(args.model).vocab_size, cases_of(args)
    own = scratch.absolute() / peer.name
    own.mkdir(parents=True, exist_ok=True)
    job = {
        "model": str(args.model.absolute()),
        "dtype": dtype,
        "quantization": args.quantization,
        "group": args.quantization_group or DEFAULT_INT4_GROUP,
        "cores": cores,
        "scratch": str(own),
        "cases": [
            {
                "new_tokens": bench_model.new_tokens_of(case) - 1,
                "prompts": prompts(case, vocab, number),
            }
            for case in cases
        ],
    }
    began = time.monotonic()
    report = _drive(peer, job, own)
    timings = [
        [asdict(timing_of([(prompt, seconds) for prompt, seconds in events], case))]
        for case, events in zip(cases, report["events"], strict=True)
    ]
    return report | {"ready_s": report["ready_at"] - began, "timings": timings}


def _drive(peer: Peer, job: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """Runs a peer's program, a thread for each core, which stays there, as ours do."""
    cores = job["cores"]
    threads = {"OMP_NUM_THREADS": str(len(cores)), "GOMP_CPU_AFFINITY": " ".join(map(str, cores))}
    program = Path(__file__).resolve().parent / str(PEERS[peer.name][1])
    asked, answered = scratch / "job.json", scratch / "result.json"
    asked.write_text(json.dumps(job))
    done = subprocess.run(
        [peer.python, "-P", str(program), str(asked), str(answered)],
        env=os.environ | threads,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        preexec_fn=partial(die_with, os.getpid()),
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise LaunchError(f"{peer.name} ended with status {done.returncode}: {last}")
    report: dict[str, Any] = json.loads(answered.read_text())
    return report


def _peers(text: str) -> list[Peer]:
    peers = []
    for part in text.split(","):
        name, _, python = part.partition("=")
        if name not in PEERS:
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(PEERS)}, found {name!r}")
        peers.append(Peer(name, python or sys.executable))
    return peers
