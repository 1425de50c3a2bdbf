"""`tilerank bench model`: prefill and decode of a model on its ranks, as shares of what the machine allows."""

from __future__ import annotations

import argparse
import re
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilerank.loader.quantization import held_codes

from . import bench_chart, bench_job
from .bench_cases import Case, add_case_arguments, cases_of, check_cases, prompts, timing_of
from .bench_job import EngineJob
from .bench_json import add_json_argument, check_json_argument, write_json
from .bench_peaks import Gauge, between, peaks_of
from .bench_report import OURS, loading_text, rows_of, table
from .errors import LaunchError
from .quantize import quantization_of
from .topology import read_topology

if TYPE_CHECKING:
    from collections.abc import Generator

    from tilerank.runtime.engine import Engine, TokenEvent

    from .bench_cases import Timing
    from .bench_job import RankMemory
    from .placement import Placement

WARM_UP_TOKENS = 64
PROFILES = 16


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
    report = measure(args, args.argv)
    rows = rows_of({OURS: report}, cases_of(args), args.model.name, peaks)
    ranks = len(placement.ranks)
    form = report["quantization"] or report["dtype"]
    cache = " with an int8 KV cache" if report["kv_cache_dtype"] == "int8" else ""
    print(f"{args.model.name}: {form}{cache} on {ranks} rank{'s' * (ranks > 1)}, {report['isa']}; {peaks.text()}")
    for rank, reason in enumerate(report["placement"]):
        print(f"  rank {rank}: {reason}")
    print("\n".join([loading_text(report, peaks), "", *table(rows)]))
    write_json(args, rows)
    bench_chart.write_chart(args, rows)
    return 0


def measure(args: argparse.Namespace, argv: list[str]) -> dict[str, Any]:
    """Starts ranks with the command line `argv`; the report of `bench_report`."""
    began = time.monotonic()
    report: dict[str, Any] = bench_job.run_ranks(args, argv)
    return report | {"ready_s": report["ready_at"] - began}


def job(args: argparse.Namespace) -> EngineJob:
    from tilerank.kernels.attention import KV_BLOCK

    # Each sequence takes whole pages.
    total = max(case.batch * (case.prompt_tokens + new_tokens_of(case) + KV_BLOCK) for case in cases_of(args))
    return EngineJob(args, total_tokens=total, measure=lambda *about: _measure(args, *about))


def new_tokens_of(case: Case) -> int:
    """That a sequence gets: enough that all decode together as long as they should, once the last prompt is in."""
    from tilerank.runtime.engine import PREFILL_CHUNK

    return case.new_tokens + case.prefill_steps(PREFILL_CHUNK)


def _measure(args: argparse.Namespace, engine: Engine, placement: Placement, ranks: list[RankMemory]) -> dict[str, Any]:
    """On rank 0: every case `--repeat` times, after short ones that touch all code, and the largest, which touches the
    memory of the cache: where the system hands out fresh memory slowly, a first prompt would measure that."""
    from dataclasses import asdict, replace

    from tilerank.kernels import core

    from .bench_work import model_work

    ready, loaded_rss = time.monotonic(), [peak_rss(rank.pid) for rank in ranks]
    todo = cases_of(args)
    for case in todo:
        _time(engine, Case(case.batch, min(case.prompt_tokens, WARM_UP_TOKENS), 2), seed=-1)
    _time(engine, max(todo, key=lambda case: case.batch * (case.prompt_tokens + case.new_tokens)), seed=-1)
    most_rss = [peak_rss(rank.pid) for rank in ranks]  # before there is memory to measure its rate with
    dtype, quantization = bench_job.engine_dtype(args), quantization_of(args)
    kv_dtype = bench_job.kv_dtype(args)
    work = model_work(engine.config, dtype, quantization, kv_dtype)
    gauge, products = Gauge(bench_job.cores_of(placement, read_topology())), work.prefill(1, 1)

    def timed(case: Case, seed: int) -> Timing:
        before = gauge.rates(products)
        timing = _time(engine, case, seed)
        return replace(timing, rates=between(before, gauge.rates(products)))

    timings = [[timed(case, args.first_seed + i) for i in range(args.repeat)] for case in todo]
    return {
        "ready_at": ready,
        "isa": core.isa(),
        "dtype": str(dtype).removeprefix("torch."),
        "quantization": held_codes(engine.config.quantization, quantization),
        "kv_cache_dtype": str(kv_dtype).removeprefix("torch."),
        "tp": len(placement.ranks),
        "placement": [rank.reason for rank in placement.ranks],
        "load_s": engine.load_report.seconds,
        "load_bytes": engine.load_report.bytes_read,
        "weight_bytes": [rank.weight_bytes for rank in ranks],
        "loaded_rss": loaded_rss,
        "peak_rss": most_rss,
        "work": asdict(work),
        "timings": [[asdict(timing) for timing in of_case] for of_case in timings],
        "overhead_share": [_overhead_share(engine, case) for case in todo],
    }


def _time(engine: Engine, case: Case, seed: int) -> Timing:
    return timing_of([(event.request, event.time_s) for event in _generate(engine, case, seed)], case)


def _overhead_share(engine: Engine, case: Case) -> float | None:
    """What part of a decode step of the case is not spent in kernels, the median of some steps whose kernels are
    watched. None where steps are not recorded."""
    shares: list[float] = []
    engine.watch()
    step_s, at, made = 0.0, -1.0, 0
    events = _generate(engine, case, seed=-2)
    began = time.monotonic()
    for event in events:
        if event.time_s != at:  # the first token of a step: the others were computed with it
            step_s, at, made = time.monotonic() - began, event.time_s, 0
        made += 1
        if made == case.batch:
            profile = engine.profile()
            if profile is not None:
                shares.append(1 - sum(seconds for _, seconds in profile.entries) / step_s)
        if len(shares) == PROFILES:
            break
        began = time.monotonic()
    events.close()
    return statistics.median(shares) if shares else None


def _generate(engine: Engine, case: Case, seed: int) -> Generator[TokenEvent]:
    from tilerank.runtime.engine import Request
    from tilerank.runtime.sampling import SamplingParams

    params = SamplingParams(max_new_tokens=new_tokens_of(case), ignore_eos=True)
    return engine.generate([Request(ids, params) for ids in prompts(case, engine.config.vocab_size, seed)])


def peak_rss(pid: int) -> int:
    """The most bytes that a process of this host has had resident."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    if found is None:
        raise LaunchError(f"/proc/{pid}/status has no VmHWM; expected the peak resident size of a rank")
    return int(found[1]) * 1024
