"""Turns the timings of `bench model`, and of systems beside it, into JSON rows and a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tilerank.parallel.cost import Work

from ..planning.work import ModelWork
from .cases import Case, Timing
from .harness import Column, Row, median_by
from .harness import table as lines_of
from .media_inputs import size_text
from .peaks import Peaks, compute_unit, share_text
from .step_shares import FIELDS

OURS = "tilerank"

Report = dict[str, Any]
"""The measurements of one system.

timings: for each case, its runs as dicts of `Timing`. load_s, ready_s: seconds to load, and until ready.
Optional: version, isa, dtype, quantization, kv_cache_dtype, tp, load_bytes; weight_bytes, loaded_rss and peak_rss, in
bytes, for each rank; step_shares, for each case. tilerank's report also has work, a `ModelWork` as a dict.
"""

_SETTINGS = ("version", "isa", "dtype", "quantization", "kv_cache_dtype", "tp", "load_s", "ready_s", "load_bytes")
_MEMORY = ("weight_bytes", "loaded_rss", "peak_rss")


def merged(rounds: Sequence[Report]) -> Report:
    """Merge the reports of one system's rounds: all of their runs, and the medians of load_s and ready_s."""
    timings = [
        [run for runs in rounds_of_case for run in runs]
        for rounds_of_case in zip(*(report["timings"] for report in rounds), strict=True)
    ]
    times = {name: statistics.median(report[name] for report in rounds) for name in ("load_s", "ready_s")}
    return rounds[0] | times | {"timings": timings}


def rows_of(reports: Mapping[str, Report], cases: Sequence[Case], model: str, peaks: Peaks) -> list[Row]:
    """Return two rows for each system and case, prefill and decode, each from the run with the median limit_share.

    Shares are against the rates of the run. A peer's runs have none; their shares are against the median rates of
    tilerank's runs of the case. ours_ratio: tilerank's tokens_per_s / this system's.
    """
    work = msgspec.convert(reports[OURS]["work"], ModelWork)
    rows: list[Row] = []
    for system, report in reports.items():
        shared = {name: report.get(name, reports[OURS].get(name)) for name in ("dtype", "quantization", "tp")}
        settings = {name: report.get(name) for name in (*_SETTINGS, *_MEMORY)} | shared
        for index, case in enumerate(cases):
            step = report["step_shares"][index] if report.get("step_shares") else None
            our_rates = [run["rates"] for run in reports[OURS]["timings"][index]]
            median_rates = {name: statistics.median(rates[name] for rates in our_rates) for name in our_rates[0]}
            runs = [
                phase_rows(case, timing, work, peaks.with_rates(timing.rates or median_rates), step)
                for timing in msgspec.convert(report["timings"][index], list[Timing])
            ]
            for phase in zip(*runs, strict=True):
                rows.append({"system": system, "model": model, **median_by(phase, "limit_share"), **settings})
    ours = {_case_key(row): row["tokens_per_s"] for row in rows if row["system"] == OURS}
    for row in rows:
        row["ours_ratio"] = ours[_case_key(row)] / row["tokens_per_s"]
    return rows


def phase_rows(
    case: Case, timing: Timing, work: ModelWork, peaks: Peaks, step: Mapping[str, float] | None = None
) -> list[Row]:
    """Return the prefill row and the decode row of one run of a case, by any system.

    stream_share, compute_share: fractions of the peaks. limit_share: of the peak that limits the work.
    step: the shares of a decode step (step_shares.py).
    """
    prefill, decode = work.prefill(case.batch, case.prompt_tokens), work.decode(case.batch, case.context)
    common: Row = {"batch": case.batch, "prompt_tokens": case.prompt_tokens, "new_tokens": case.new_tokens}
    common |= {"image": case.image and size_text(case.image), "image_tokens": case.image_tokens}
    return [
        {"phase": "prefill", **common, "ttft_s": timing.first_token}
        | _shares(case.batch * case.prompt_tokens, timing.prefill, prefill, peaks),
        {"phase": "decode", **common, "tpot_s": timing.step, **(step or dict.fromkeys(FIELDS))}
        | _shares(case.batch, timing.step, decode, peaks),
    ]


def _shares(tokens: int, seconds: float, work: Work, peaks: Peaks) -> Row:
    rates = {"tokens_per_s": tokens / seconds, "limit_tokens_per_s": tokens / peaks.limit_seconds(work)}
    return rates | peaks.shares(work, seconds)


def loading_text(report: Report, peaks: Peaks) -> str:
    """Return a line on the time and the memory that loading took."""
    text = f"ready after {report['ready_s']:.1f} s, of which loading {report['load_s']:.1f} s"
    if report.get("load_bytes"):
        rate = report["load_bytes"] / 1e9 / max(report["load_s"], 1e-9)
        text += f" ({rate:.2f} GB/s; first touch of fresh memory {peaks.first_touch_gbs:.2f} GB/s)"
    if report.get("peak_rss"):
        text += f"; peak memory {_gigabytes(report['peak_rss'])}"
    if report.get("loaded_rss"):
        text += (
            f", after loading {_gigabytes(report['loaded_rss'])}, of which weights {_gigabytes(report['weight_bytes'])}"
        )
    return text


def table(rows: Sequence[Row]) -> list[str]:
    """Return a header and a line for each row, by phase and case; for several systems, with their names and ratios."""
    several = len({row["system"] for row in rows}) > 1
    compute = f"of {compute_unit(rows[0]['peaks']['isa'])}"
    columns = [
        Column("phase", 8, lambda row: str(row["phase"])),
        Column("prompt", -7, lambda row: str(row["prompt_tokens"])),
        Column("batch", -6, lambda row: str(row["batch"])),
        *([Column("  system", 16, lambda row: f"  {row['system']}")] if several else []),
        Column("tokens/s", -11, lambda row: f"{row['tokens_per_s']:.1f}"),
        Column("limit", -11, lambda row: f"{row['limit_tokens_per_s']:.1f}"),
        Column("of limit", -9, lambda row: f"{row['limit_share']:.2f}"),
        Column("of read", -9, lambda row: f"{row['stream_share']:.2f}"),
        Column(compute, -2 - len(compute), lambda row: share_text(row["compute_share"])),
        Column("first token", -13, lambda row: f"{row['ttft_s']:.3f} s" if "ttft_s" in row else ""),
        Column("step", -11, lambda row: f"{1000 * row['tpot_s']:.2f} ms" if "tpot_s" in row else ""),
        Column(
            "overhead", -11, lambda row: "" if row.get("overhead_share") is None else f"{row['overhead_share']:.1%}"
        ),
        *([Column("speedup", -9, _speedup)] if several else []),
    ]
    return lines_of(columns, sorted(rows, key=_case_key))


def _speedup(row: Row) -> str:
    return "" if row["system"] == OURS else f"{row['ours_ratio']:.2f}x"


def _case_key(row: Row) -> tuple[bool, int, int]:
    return row["phase"] == "decode", row["prompt_tokens"], row["batch"]


def _gigabytes(nbytes_by_rank: Sequence[int]) -> str:
    return " + ".join(f"{nbytes / 1e9:.2f}" for nbytes in nbytes_by_rank) + " GB"
