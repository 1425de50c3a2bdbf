"""`tilerank bench model`: prefill and decode of a model on its ranks, as shares of the machine's limit."""

from __future__ import annotations

import argparse
import re
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilerank.loader.quantization_config import held_codes
from tilerank.parallel.cost import Work

from ..errors import LaunchError
from ..host.topology import read_topology
from ..options.hub import add_model_argument
from ..options.model import model_options
from ..text import count
from .cases import Case, add_case_arguments, cases_of, check_cases, prompts, timing_of
from .chart import add_chart_argument, check_chart_argument, write_chart
from .harness import add_json_argument, check_json_argument, write_json
from .media_inputs import media_prompts, random_frames
from .peaks import RateProbe, peaks_of
from .rank_job import (
    EngineJob,
    add_engine_arguments,
    add_rank_arguments,
    cache_tokens,
    cores_of,
    is_rank,
    placement_of,
    run_as_rank,
    run_ranks,
)
from .report import OURS, loading_text, rows_of, table
from .step_shares import median_step, shares_of, step_table

if TYPE_CHECKING:
    from collections.abc import Generator

    from tilerank.runtime.lead.engine import Engine
    from tilerank.runtime.protocol.events import TokenEvent

    from ..host.placement import Placement
    from .cases import Timing
    from .rank_job import RankMemory
    from .report import Report

WARM_UP_TOKENS = 64
PROFILED_STEPS = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
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
    placement, cores = placement_of(args)
    peaks = peaks_of(cores)
    report = measure_model(args, args.argv)
    rows = rows_of({OURS: report}, cases_of(args), args.model.name, peaks)
    ranks = len(placement.ranks)
    weights = report["quantization"] or report["dtype"]
    cache = " with an int8 KV cache" if report["kv_cache_dtype"] == "int8" else ""
    print(f"{args.model.name}: {weights}{cache} on {count(ranks, 'rank')}, {report['isa']}; {peaks.text()}")
    for rank, reason in enumerate(report["placement"]):
        print(f"  rank {rank}: {reason}")
    print("\n".join([loading_text(report, peaks), "", *table(rows), "", *step_table(rows)]))
    write_json(args, rows)
    write_chart(args, rows)
    return 0


def measure_model(args: argparse.Namespace, argv: list[str]) -> Report:
    """Start ranks with the command line `argv` and return their report."""
    start = time.monotonic()
    report: Report = run_ranks(args, argv)
    return report | {"ready_s": report["ready_at"] - start}


def model_job(args: argparse.Namespace) -> EngineJob:
    """Return the job of the ranks: an engine in whose cache the sequences of every case run at once."""
    batches = ((case.batch, case.prompt_tokens + new_tokens_of(case)) for case in cases_of(args))
    total = cache_tokens(args, batches)
    return EngineJob(args, total_tokens=total, measure=lambda *context: _measure(args, *context))


def new_tokens_of(case: Case) -> int:
    """Return how many new tokens each sequence gets.

    They suffice for `case.new_tokens` decode steps with all sequences after the last prompt is prefilled.
    """
    from tilerank.runtime.protocol.sizes import PREFILL_CHUNK

    return case.new_tokens + case.prefill_steps(PREFILL_CHUNK)


def _measure(args: argparse.Namespace, engine: Engine, placement: Placement, ranks: list[RankMemory]) -> dict[str, Any]:
    """Run every case `--repeat` times and return the report. Runs on rank 0.

    A short version of each case warms up first, then the largest case, so that every page of the cache is resident:
    otherwise the first prompts would include the time in which the kernel maps fresh memory.
    """
    from dataclasses import asdict

    from tilerank.kernels import core

    from ..planning.work import encoder_work, model_work

    ready, loaded_rss = time.monotonic(), [peak_rss(rank.pid) for rank in ranks]
    cases = cases_of(args)
    for case in cases:
        _time(engine, Case(case.batch, min(case.prompt_tokens, WARM_UP_TOKENS), 2), seed=-1)
    _time(engine, max(cases, key=lambda case: case.batch * (case.prompt_tokens + case.new_tokens)), seed=-1)
    max_rss = [peak_rss(rank.pid) for rank in ranks]  # before the probe allocates the memory that it reads
    options = model_options(args)
    dtype, cache_dtype = options.torch_dtype(engine.card), options.torch_kv_dtype(engine.card)
    work = model_work(engine.card, dtype, options.quantization, cache_dtype, options.activation_bits)
    if args.image:
        pictures = media_prompts(args.model)
        parts = encoder_work(engine.card, dtype, pictures.grid(args.image))
        work = replace(
            work, picture=sum(parts.values(), start=Work()), source_tokens=pictures.source_tokens(args.image)
        )
    probe, one_token = RateProbe(cores_of(placement, read_topology())), work.prefill(1, 1)

    def timed(case: Case, seed: int) -> Timing:
        timing, rates = probe.around(one_token, lambda: _time(engine, case, seed))
        return replace(timing, rates=rates)

    timings = [[timed(case, args.first_seed + i) for i in range(args.repeat)] for case in cases]
    return {
        "ready_at": ready,
        "isa": core.isa_text(),
        "dtype": str(dtype).removeprefix("torch."),
        "quantization": held_codes(engine.card.quantization, options.quantization),
        "kv_cache_dtype": str(cache_dtype).removeprefix("torch."),
        "tp": len(placement.ranks),
        "placement": [rank.reason for rank in placement.ranks],
        "load_s": engine.worker.load_report.seconds,
        "load_bytes": engine.worker.load_report.bytes_read,
        "weight_bytes": [rank.weight_bytes for rank in ranks],
        "loaded_rss": loaded_rss,
        "peak_rss": max_rss,
        "work": asdict(work),
        "timings": [[asdict(timing) for timing in runs] for runs in timings],
        "step_shares": [_step_shares(engine, case) for case in cases],
    }


def _time(engine: Engine, case: Case, seed: int) -> Timing:
    """Run a case once.

    Prompts with pictures run twice, because sequences decode between the pieces of later pictures' encodes: first up to
    their first tokens, then, from the caches, for the decode steps.
    """
    if case.image is None:
        return timing_of(_events(engine, case, seed), case)
    first = [seconds for _, seconds in _events(engine, case, seed, new_tokens=1)]
    timing = timing_of(_events(engine, case, seed), case)
    return replace(timing, first_token=statistics.median(first), prefill=max(first))


def _events(engine: Engine, case: Case, seed: int, new_tokens: int | None = None) -> list[tuple[int, float]]:
    """Return what `timing_of` takes."""
    return [(event.request, event.time_s) for event in _generate(engine, case, seed, new_tokens)]


def _step_shares(engine: Engine, case: Case) -> dict[str, float] | None:
    """Return the shares of a decode step (step_shares.py): the median one of up to `PROFILED_STEPS`.

    None if steps are not recorded, since only recorded steps can be profiled.
    """
    steps: list[dict[str, float]] = []
    if case.image is not None:
        _events(engine, case, seed=-2, new_tokens=1)
    engine.worker.start_profiling()
    step_s, step_time, tokens = 0.0, -1.0, 0
    events = _generate(engine, case, seed=-2)
    start = time.monotonic()
    for event in events:
        if event.time_s != step_time:  # the first token of a step; the others come out of the same step
            step_s, step_time, tokens = time.monotonic() - start, event.time_s, 0
        tokens += 1
        if tokens == case.batch:
            profile = engine.worker.profile()
            if profile is not None:
                steps.append(shares_of(profile.entries, step_s))
        if len(steps) == PROFILED_STEPS:
            break
        start = time.monotonic()
    events.close()
    return median_step(steps)


def _generate(engine: Engine, case: Case, seed: int, new_tokens: int | None = None) -> Generator[TokenEvent]:
    """Run the prompts of a case. new_tokens: of each (default: those of the case)."""
    from tilerank.runtime.lead.engine import Request
    from tilerank.runtime.lead.sampling import SamplingParams
    from tilerank.runtime.protocol.prompt import Prompt

    params = SamplingParams(max_new_tokens=new_tokens or new_tokens_of(case), ignore_eos=True)
    token_ids = prompts(case, engine.card.vocab_size, seed)
    if case.image is None:
        found = [Prompt(ids) for ids in token_ids]
    else:
        pictures = media_prompts(engine.worker.model_dir)
        frames = (random_frames(case.image, f"{seed} {number}") for number in range(case.batch))
        found = [pictures.before(ids, picture) for ids, picture in zip(token_ids, frames, strict=True)]
    return engine.generate([Request(prompt, params) for prompt in found])


def peak_rss(pid: int) -> int:
    """Return the peak resident size of a process of this host, in bytes."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    if found is None:
        raise LaunchError(f"/proc/{pid}/status: expected VmHWM, the peak resident size, found none")
    return int(found[1]) * 1024
