"""`tilerank bench model`: prefill and decode of a model on its ranks, as shares of what the machine allows."""

from __future__ import annotations

import argparse
import random
import re
import statistics
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import bench_chart, bench_job
from .bench_job import EngineJob, model_config, whole_numbers
from .bench_peaks import Peaks, add_json_argument, check_json_argument, peaks_of, write_json
from .bench_work import ModelWork, Work
from .errors import LaunchError
from .quantize import quantization_of
from .start import whole_number

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tilerank.runtime.engine import Engine, TokenEvent

    from .placement import Placement

WARM_UP_TOKENS = 64


@dataclass(frozen=True)
class Case:
    """`batch` prompts of `prompt_tokens` random tokens, continued by `new_tokens` tokens after the first."""

    batch: int
    prompt_tokens: int
    new_tokens: int

    @property
    def context(self) -> float:
        """Tokens that a sequence holds during a decode step, on average."""
        return self.prompt_tokens + (self.new_tokens + 1) / 2

    @property
    def cached_tokens(self) -> int:
        return self.batch * (self.prompt_tokens + self.new_tokens)


@dataclass(frozen=True)
class Timing:
    """Seconds of one run of a case: until half, and until all, of the prompts had a first token; of a decode step."""

    first_token: float
    prefill: float
    step: float


def add_case_arguments(parser: argparse.ArgumentParser) -> None:
    """Which cases are run, and how often; `bench compare` has the same."""
    parser.add_argument("--prompt-tokens", type=whole_numbers(1), default=[512], metavar="N,N", help="default: 512")
    parser.add_argument("--batch", type=whole_numbers(1), default=[1, 4, 16], metavar="N,N", help="default: 1,4,16")
    parser.add_argument("--new-tokens", type=whole_number(1), default=32, metavar="N", help="decode steps of a run")
    parser.add_argument("--repeat", type=whole_number(1), default=3, metavar="N", help="runs; the median counts")
    parser.add_argument("--first-seed", type=whole_number(0), default=0, help=argparse.SUPPRESS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    bench_job.add_model_arguments(parser)
    add_case_arguments(parser)
    bench_job.add_engine_arguments(parser)
    add_json_argument(parser)
    bench_chart.add_chart_argument(parser)
    bench_job.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if bench_job.is_rank(args):
        return bench_job.run_as_rank(args, job(args))
    check_json_argument(args)
    bench_chart.check_chart_argument(args)
    check_cases(args)
    placement, cores = bench_job.placement_of(args)
    peaks = peaks_of(cores)
    began = time.monotonic()
    report = bench_job.run_ranks(args, args.argv)
    report["ready_s"] = report.pop("ready_at") - began
    rows = report_rows(report, args, peaks)
    print("\n".join(text(rows, report, peaks, len(placement.ranks))))
    write_json(args, rows)
    bench_chart.write_chart(args, rows)
    return 0


def cases(args: argparse.Namespace) -> list[Case]:
    return [Case(batch, tokens, args.new_tokens) for tokens in args.prompt_tokens for batch in args.batch]


def check_cases(args: argparse.Namespace) -> None:
    """LaunchError for a case that is longer than the model's context."""
    limit = model_config(args.model).max_position_embeddings
    longest = max(args.prompt_tokens) + args.new_tokens + 1
    if longest > limit:
        raise LaunchError(
            f"--prompt-tokens {max(args.prompt_tokens)} and --new-tokens {args.new_tokens} need {longest} positions, "
            f"but max_position_embeddings is {limit}"
        )


def prompts(case: Case, vocab: int, seed: int) -> list[list[int]]:
    """The same random token ids for every system that is measured."""
    draw = random.Random(f"{case} {seed}")
    return [[draw.randrange(vocab) for _ in range(case.prompt_tokens)] for _ in range(case.batch)]


def job(args: argparse.Namespace) -> EngineJob:
    from tilerank.kernels.attention import KV_BLOCK

    # Each sequence takes whole pages.
    total = max(case.cached_tokens + case.batch * KV_BLOCK for case in cases(args))
    return EngineJob(args, total_tokens=total, measure=lambda *about: _measure(args, *about))


def _measure(args: argparse.Namespace, engine: Engine, placement: Placement, pids: list[int]) -> dict[str, Any]:
    """On rank 0: every case `--repeat` times, after a short one that touches all code and memory."""
    from dataclasses import asdict

    from tilerank.kernels import core

    from .bench_work import model_work

    ready = time.monotonic()
    todo = cases(args)
    for case in todo:
        _time(engine, Case(case.batch, min(case.prompt_tokens, WARM_UP_TOKENS), 2), seed=-1)
    timings = [[_time(engine, case, args.first_seed + i) for i in range(args.repeat)] for case in todo]
    dtype, quantization = bench_job.engine_dtype(args), quantization_of(args)
    return {
        "ready_at": ready,
        "isa": core.isa(),
        "dtype": str(dtype).removeprefix("torch."),
        "tp": len(placement.ranks),
        "placement": [rank.reason for rank in placement.ranks],
        "load_s": engine.load_report.seconds,
        "load_bytes": engine.load_report.bytes_read,
        "peak_rss": [peak_rss(pid) for pid in pids],
        "work": asdict(model_work(engine.config, dtype, quantization)),
        "timings": [[asdict(timing) for timing in of_case] for of_case in timings],
    }


def _time(engine: Engine, case: Case, seed: int) -> Timing:
    from tilerank.runtime.engine import Request
    from tilerank.runtime.sampling import SamplingParams

    params = SamplingParams(max_new_tokens=case.new_tokens + 1, ignore_eos=True)
    requests = [Request(ids, params) for ids in prompts(case, engine.config.vocab_size, seed)]
    return timing_of(list(engine.generate(requests)), case)


def timing_of(events: Sequence[TokenEvent], case: Case) -> Timing:
    """From the tokens of one run. Decode counts the steps in which every sequence got a token and none was prefilled.

    A prompt that does not fit in the first step comes later, when earlier ones decode already: these steps count as
    prefill, and the last steps, from which sequences are missing, do not count.
    """
    first: dict[int, float] = {}
    at: dict[float, int] = {}
    for event in events:
        first.setdefault(event.request, event.time_s)
        at[event.time_s] = at.get(event.time_s, 0) + 1
    prefill = max(first.values())
    full = [prefill, *(time_s for time_s, tokens in at.items() if time_s > prefill and tokens == case.batch)]
    steps = [later - earlier for earlier, later in pairwise(full)]
    if not steps:
        raise LaunchError(
            f"no step decoded all {case.batch} prompts of {case.prompt_tokens} tokens together; "
            "expected more --new-tokens or a smaller --batch"
        )
    return Timing(statistics.median(first.values()), prefill, statistics.mean(steps))


def report_rows(report: dict[str, Any], args: argparse.Namespace, peaks: Peaks) -> list[dict[str, Any]]:
    """Two rows for JSON a case, prefill and decode, from what rank 0 reported."""
    work = ModelWork(**report["work"])
    rows = []
    for case, runs in zip(cases(args), report["timings"], strict=True):
        for row in phase_rows(case, median_timing(runs), work, peaks):
            about = {name: report[name] for name in ("isa", "dtype", "tp", "load_s", "ready_s", "peak_rss")}
            rows.append({"system": "tilerank", "model": Path(args.model).name, **row, **about})
    return rows


def median_timing(runs: Sequence[Mapping[str, float]]) -> Timing:
    return Timing(*(statistics.median(run[name] for run in runs) for name in ("first_token", "prefill", "step")))


def phase_rows(case: Case, timing: Timing, work: ModelWork, peaks: Peaks) -> list[dict[str, Any]]:
    """The figures of one case, whoever computed it. *_share: of the peaks; limit_share: of the peak that binds."""
    prefill, decode = work.prefill(case.batch, case.prompt_tokens), work.decode(case.batch, case.context)
    common = {"batch": case.batch, "prompt_tokens": case.prompt_tokens, "new_tokens": case.new_tokens}
    return [
        {"phase": "prefill", **common, "ttft_s": timing.first_token}
        | _shares(case.batch * case.prompt_tokens, timing.prefill, prefill, peaks),
        {"phase": "decode", **common, "tpot_s": timing.step} | _shares(case.batch, timing.step, decode, peaks),
    ]


def _shares(tokens: int, seconds: float, work: Work, peaks: Peaks) -> dict[str, Any]:
    least = peaks.least_seconds(work)
    return {
        "tokens_per_s": tokens / seconds,
        "bytes": work.nbytes,
        "flops": work.flops,
        "stream_share": peaks.stream_share(work, seconds),
        "amx_share": peaks.amx_share(work, seconds),
        "limit_tokens_per_s": tokens / least,
        "limit_share": least / seconds,
        "peaks": peaks.as_json(),
    }


def text(rows: list[dict[str, Any]], report: dict[str, Any], peaks: Peaks, ranks: int) -> list[str]:
    rss = ", ".join(f"{nbytes / 1e9:.2f}" for nbytes in report["peak_rss"])
    rate = report["load_bytes"] / 1e9 / max(report["load_s"], 1e-9)
    lines = [
        f"{rows[0]['model']}: {report['dtype']} on {ranks} rank{'s' * (ranks > 1)}, {report['isa']}; {peaks.text()}",
        *(f"  rank {rank}: {reason}" for rank, reason in enumerate(report["placement"])),
        f"ready after {report['ready_s']:.1f} s, of which rank 0 loaded {report['load_s']:.1f} s ({rate:.2f} GB/s); "
        f"peak resident GB of each rank: {rss}",
        "",
        f"{'phase':<8}{'prompt':>7}{'batch':>6}{'tokens/s':>11}{'limit':>11}{'of limit':>9}{'of read':>9}{'of AMX':>8}"
        f"{'first token':>13}{'step':>11}",
    ]
    return lines + [row_text(row) for row in rows]


def row_text(row: dict[str, Any]) -> str:
    amx = "-" if row["amx_share"] is None else f"{row['amx_share']:.2f}"
    first = f"{row['ttft_s']:.3f} s" if "ttft_s" in row else ""
    step = f"{1000 * row['tpot_s']:.2f} ms" if "tpot_s" in row else ""
    return (
        f"{row['phase']:<8}{row['prompt_tokens']:>7}{row['batch']:>6}{row['tokens_per_s']:>11.1f}"
        f"{row['limit_tokens_per_s']:>11.1f}{row['limit_share']:>9.2f}{row['stream_share']:>9.2f}{amx:>8}"
        f"{first:>13}{step:>11}"
    ).rstrip()


def peak_rss(pid: int) -> int:
    """The most bytes that a process of this host has had resident."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    if found is None:
        raise LaunchError(f"/proc/{pid}/status has no VmHWM; expected the peak resident size of a rank")
    return int(found[1]) * 1024
