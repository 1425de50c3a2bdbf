"""What the benchmarks of a model report: rows for JSON, and the same as text, of one system or of several."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from .bench_cases import Case, Timing
from .bench_peaks import Peaks, compute_title, median_row, share_text
from .bench_work import ModelWork, Work

OURS = "tilerank"

Report = dict[str, Any]
"""Of a system: `timings` (for every case its runs, a Timing each as a dict), load_s, ready_s, and what it knows of isa,
dtype, quantization, kv_cache_dtype, tp, version, load_bytes, weight_bytes, loaded_rss and peak_rss (bytes of every
rank), and overhead_share (of every case); ours has `work`, a ModelWork."""

Row = dict[str, Any]

_ABOUT = ("version", "isa", "dtype", "quantization", "kv_cache_dtype", "tp", "load_s", "ready_s", "load_bytes")
_MEMORY = ("weight_bytes", "loaded_rss", "peak_rss")


def merged(rounds: Sequence[Report]) -> Report:
    """Runs of all rounds together; medians of the times to load."""
    timings = [
        [run for runs in of_case for run in runs] for of_case in zip(*(r["timings"] for r in rounds), strict=True)
    ]
    times = {name: statistics.median(report[name] for report in rounds) for name in ("load_s", "ready_s")}
    return rounds[0] | times | {"timings": timings}


def rows_of(reports: Mapping[str, Report], cases: Sequence[Case], model: str, peaks: Peaks) -> list[Row]:
    """Two rows a system and case, prefill and decode, each of the run with the median share of its limit, which counts
    the rates measured beside that run; beside a peer's the medians of those beside ours. ours_ratio: our tokens/s
    over this system's."""
    work = msgspec.convert(reports[OURS]["work"], ModelWork)
    rows: list[Row] = []
    for system, report in reports.items():
        about = {name: report.get(name, reports[OURS].get(name)) for name in ("dtype", "quantization", "tp")}
        about = {name: report.get(name) for name in (*_ABOUT, *_MEMORY)} | about
        for index, case in enumerate(cases):
            overhead = report["overhead_share"][index] if report.get("overhead_share") else None
            known = [run["rates"] for run in reports[OURS]["timings"][index]]
            usual = {name: statistics.median(rates[name] for rates in known) for name in known[0]}
            runs = [
                phase_rows(case, timing, work, peaks.at(timing.rates or usual), overhead)
                for timing in msgspec.convert(report["timings"][index], list[Timing])
            ]
            for phase in zip(*runs, strict=True):
                rows.append({"system": system, "model": model, **median_row(phase), **about})
    ours = {_place(row): row["tokens_per_s"] for row in rows if row["system"] == OURS}
    for row in rows:
        row["ours_ratio"] = ours[_place(row)] / row["tokens_per_s"]
    return rows


def phase_rows(case: Case, timing: Timing, work: ModelWork, peaks: Peaks, overhead: float | None = None) -> list[Row]:
    """The figures of one case, whoever computed it. *_share: of the peaks; limit_share: of the peak that binds;
    overhead_share: of a decode step, what is not spent in kernels."""
    prefill, decode = work.prefill(case.batch, case.prompt_tokens), work.decode(case.batch, case.context)
    common = {"batch": case.batch, "prompt_tokens": case.prompt_tokens, "new_tokens": case.new_tokens}
    return [
        {"phase": "prefill", **common, "ttft_s": timing.first_token}
        | _shares(case.batch * case.prompt_tokens, timing.prefill, prefill, peaks),
        {"phase": "decode", **common, "tpot_s": timing.step, "overhead_share": overhead}
        | _shares(case.batch, timing.step, decode, peaks),
    ]


def _shares(tokens: int, seconds: float, work: Work, peaks: Peaks) -> Row:
    least = peaks.least_seconds(work)
    return {
        "tokens_per_s": tokens / seconds,
        "bytes": work.nbytes,
        "flops": work.flops,
        "stream_share": peaks.stream_share(work, seconds),
        "amx_share": peaks.amx_share(work, seconds),
        "compute_share": peaks.compute_share(work, seconds),
        "limit_tokens_per_s": tokens / least,
        "limit_share": least / seconds,
        "peaks": peaks.as_json(),
    }


def loading_text(report: Report, peaks: Peaks) -> str:
    """How long it took to be ready, and in how much memory."""
    text = f"ready after {report['ready_s']:.1f} s, of which loading {report['load_s']:.1f} s"
    if report.get("load_bytes"):
        rate = report["load_bytes"] / 1e9 / max(report["load_s"], 1e-9)
        text += f" ({rate:.2f} GB/s; the system hands out memory at {peaks.first_touch_gbs:.2f})"
    if report.get("peak_rss"):
        text += f"; resident at most {_gigabytes(report['peak_rss'])}"
    if report.get("loaded_rss"):
        text += (
            f", after loading {_gigabytes(report['loaded_rss'])}, of which weights {_gigabytes(report['weight_bytes'])}"
        )
    return text


def table(rows: Sequence[Row]) -> list[str]:
    """A line a row, phase by phase and case by case, with systems and ratios if there are several."""
    several = len({row["system"] for row in rows}) > 1
    computing = f"of {compute_title(rows[0]['peaks']['isa'])}"
    columns: list[tuple[str, int, Callable[[Row], str]]] = [
        ("phase", 8, lambda row: str(row["phase"])),
        ("prompt", -7, lambda row: str(row["prompt_tokens"])),
        ("batch", -6, lambda row: str(row["batch"])),
        *([("  system", 16, lambda row: f"  {row['system']}")] if several else []),
        ("tokens/s", -11, lambda row: f"{row['tokens_per_s']:.1f}"),
        ("limit", -11, lambda row: f"{row['limit_tokens_per_s']:.1f}"),
        ("of limit", -9, lambda row: f"{row['limit_share']:.2f}"),
        ("of read", -9, lambda row: f"{row['stream_share']:.2f}"),
        (computing, -2 - len(computing), lambda row: share_text(row["compute_share"])),
        ("first token", -13, lambda row: f"{row['ttft_s']:.3f} s" if "ttft_s" in row else ""),
        ("step", -11, lambda row: f"{1000 * row['tpot_s']:.2f} ms" if "tpot_s" in row else ""),
        ("no kernel", -11, lambda row: "" if row.get("overhead_share") is None else f"{row['overhead_share']:.1%}"),
        *([("ours is", -9, _ratio)] if several else []),
    ]
    lines = ["".join(_cell(title, width) for title, width, _ in columns)]
    for row in sorted(rows, key=_place):
        lines.append("".join(_cell(value(row), width) for _, width, value in columns))
    return [line.rstrip() for line in lines]


def _cell(text: str, width: int) -> str:
    return f"{text:<{width}}" if width > 0 else f"{text:>{-width}}"


def _ratio(row: Row) -> str:
    return "" if row["system"] == OURS else f"{row['ours_ratio']:.2f}x"


def _place(row: Row) -> tuple[bool, int, int]:
    return row["phase"] == "decode", row["prompt_tokens"], row["batch"]


def _gigabytes(of_ranks: Sequence[int]) -> str:
    return " + ".join(f"{nbytes / 1e9:.2f}" for nbytes in of_ranks) + " GB"
