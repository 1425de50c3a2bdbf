"""`tilerank bench compare`: the same model, prompts and cores for us and for peers, in turns; medians."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import bench_chart, bench_job, bench_model
from .bench_model import Case
from .bench_peaks import Peaks, add_json_argument, check_json_argument, peaks_of, write_json
from .bench_work import ModelWork
from .errors import LaunchError

PEERS = ("transformers", "openvino", "llama.cpp", "vllm", "sglang")
DRIVERS = {"transformers": ("transformers", "peer_transformers.py")}
"""By peer: the module that tells whether it is installed, and the program in this folder that measures it."""


@dataclass(frozen=True)
class Peer:
    """A system to compare with, and the Python that has it."""

    name: str
    python: str

    def obstacle(self) -> str | None:
        """Why it cannot be measured."""
        if self.name not in DRIVERS:
            return "bench compare cannot drive it yet"
        module = DRIVERS[self.name][0]
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
    bench_model.add_case_arguments(parser)
    bench_job.add_engine_arguments(parser)
    add_json_argument(parser)
    bench_chart.add_chart_argument(parser)
    bench_job.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if bench_job.is_rank(args):
        return bench_job.run_as_rank(args, bench_model.job(args))
    check_json_argument(args)
    bench_chart.check_chart_argument(args)
    bench_model.check_cases(args)
    peers = []
    for peer in args.peers:
        obstacle = peer.obstacle()
        if obstacle is None:
            peers.append(peer)
        else:
            print(f"{peer.name}: left out, {obstacle}")
    _, cores = bench_job.placement_of(args)
    peaks = peaks_of(cores)
    print(peaks.text(), flush=True)
    reports: dict[str, list[dict[str, Any]]] = {name: [] for name in ("tilerank", *(peer.name for peer in peers))}
    for round_number in range(args.repeat):
        # In turns, each alone on the machine: a slow minute then hits all of them.
        reports["tilerank"].append(_ours(args, round_number))
        ours = reports["tilerank"][0]
        for peer in peers:
            reports[peer.name].append(_theirs(args, peer, cores, ours["dtype"], round_number))
    rows = rows_of(reports, bench_model.cases(args), args.model.name, peaks)
    print("\n".join(text(rows)))
    write_json(args, rows)
    bench_chart.write_chart(args, rows)
    return 0


def rows_of(
    reports: dict[str, list[dict[str, Any]]], cases: list[Case], model: str, peaks: Peaks
) -> list[dict[str, Any]]:
    """Rows for JSON as of `bench model`, medians over the rounds. ours_ratio: our tokens/s over this system's."""
    work = ModelWork(**reports["tilerank"][0]["work"])
    rows = []
    for system, rounds in reports.items():
        about = {name: statistics.median(report[name] for report in rounds) for name in ("load_s", "ready_s")}
        about |= {name: reports["tilerank"][0][name] for name in ("dtype", "tp")}
        for index, case in enumerate(cases):
            timing = bench_model.median_timing([report["timings"][index] for report in rounds])
            for row in bench_model.phase_rows(case, timing, work, peaks):
                rows.append({"system": system, "version": rounds[0].get("version"), "model": model, **row, **about})
    ours = {_place(row): row["tokens_per_s"] for row in rows if row["system"] == "tilerank"}
    for row in rows:
        row["ours_ratio"] = ours[_place(row)] / row["tokens_per_s"]
    return rows


def text(rows: list[dict[str, Any]]) -> list[str]:
    lines = [f"{'phase':<8}{'prompt':>7}{'batch':>6}  {'system':<14}{'tokens/s':>11}{'of limit':>9}{'ours is':>9}"]
    for row in sorted(rows, key=lambda row: (row["phase"] == "decode", row["prompt_tokens"], row["batch"])):
        ratio = "" if row["system"] == "tilerank" else f"{row['ours_ratio']:>8.2f}x"
        lines.append(
            f"{row['phase']:<8}{row['prompt_tokens']:>7}{row['batch']:>6}  {row['system']:<14}"
            f"{row['tokens_per_s']:>11.1f}{row['limit_share']:>9.2f}{ratio}"
        )
    return lines


def _place(row: dict[str, Any]) -> tuple[str, int, int]:
    return row["phase"], row["prompt_tokens"], row["batch"]


def _ours(args: argparse.Namespace, round_number: int) -> dict[str, Any]:
    began = time.monotonic()
    argv = [*args.argv, "--repeat", "1", "--first-seed", str(round_number), "--log-level", "warning"]
    report: dict[str, Any] = bench_job.run_ranks(args, argv)
    report["timings"] = [timings[0] for timings in report["timings"]]
    return report | {"ready_s": report["ready_at"] - began}


def _theirs(args: argparse.Namespace, peer: Peer, cores: list[int], dtype: str, round_number: int) -> dict[str, Any]:
    cases = [
        {"new_tokens": case.new_tokens, "prompts": bench_model.prompts(case, _vocabulary(args), round_number)}
        for case in bench_model.cases(args)
    ]
    job = {"model": str(args.model), "dtype": dtype, "cores": cores, "cases": cases}
    # A thread for each core, which stays there, as ours do.
    threads = {"OMP_NUM_THREADS": str(len(cores)), "GOMP_CPU_AFFINITY": " ".join(map(str, cores))}
    program = Path(__file__).resolve().parent / DRIVERS[peer.name][1]
    with tempfile.TemporaryDirectory(prefix="tilerank-bench-") as scratch:
        asked, answered = Path(scratch) / "job.json", Path(scratch) / "result.json"
        asked.write_text(json.dumps(job))
        began = time.monotonic()
        done = subprocess.run(
            [peer.python, "-P", str(program), str(asked), str(answered)],
            env=os.environ | threads,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise LaunchError(f"{peer.name} ended with status {done.returncode}: {last}")
        report: dict[str, Any] = json.loads(answered.read_text())
    return report | {"ready_s": report["ready_at"] - began}


def _vocabulary(args: argparse.Namespace) -> int:
    return bench_job.model_config(args.model).vocab_size


def _peers(text: str) -> list[Peer]:
    peers = []
    for part in text.split(","):
        name, _, python = part.partition("=")
        if name not in PEERS:
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(PEERS)}, found {name!r}")
        peers.append(Peer(name, python or sys.executable))
    return peers
