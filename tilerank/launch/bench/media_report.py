"""Turns the runs of `bench media` into JSON rows and a table: a row for each system, size and part."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tilerank.parallel.cost import Work

from .peaks import Peaks, compute_unit, share_text
from .report import OURS, Report, Row

PARTS = ("decode", "preprocessing", "tower", "first token", "next token")
"""decode: a file to pixels. preprocessing: pixels to patches. tower: patches to tokens. first token: all of these, and
the prompt in the language model. next token: one after the first, the mean of a run."""
TOWER_PARTS = ("linear layers", "attention", "norms", "sums", "other kernels", "between kernels")


def rows_of(reports: Mapping[str, Report], model: str, peaks: Peaks) -> list[Row]:
    """Return the rows of all systems. A report is as in media.py; a peer's has neither "work" nor "rates".

    The tower and its parts are those of the run with the median time of the tower; every other part has its own median.
    tower_share: of the time of the tower. ours_ratio: this system's time / tilerank's. Shares of a peer are against
    the median rates of tilerank's runs.
    """
    rows: list[Row] = []
    for system, report in reports.items():
        for number, size in enumerate(report["sizes"]):
            own = reports[OURS]["sizes"][number]
            settings = {name: report.get(name) for name in ("version", "isa", "dtype", "tp")}
            common = {"system": system, "model": model, "size": size["size"], "tokens": own["tokens"]}
            work = msgspec.convert(own["work"], dict[str, Work])
            work["tower"] = sum(work.values(), start=Work())
            rates = [run["rates"] for run in own["runs"]]
            median_rates = {name: statistics.median(of[name] for of in rates) for name in rates[0]}
            tower = _median_run(size["runs"], "tower")
            for part in (*PARTS[:3], *TOWER_PARTS, *PARTS[3:]):
                if part not in tower:
                    continue
                run = tower if part in ("tower", *TOWER_PARTS) else _median_run(size["runs"], part)
                shares = _shares(work.get(part), run[part], peaks.with_rates(run.get("rates", median_rates)))
                tower_share = run[part] / run["tower"] if part in TOWER_PARTS else None
                rows.append(
                    {**common, "part": part, "seconds": run[part], "tower_share": tower_share} | shares | settings
                )
    ours = {(row["size"], row["part"]): row["seconds"] for row in rows if row["system"] == OURS}
    for row in rows:
        seconds = ours.get((row["size"], row["part"]))
        row["ours_ratio"] = row["seconds"] / seconds if seconds else None
    return rows


def _median_run(runs: Sequence[dict[str, Any]], part: str) -> dict[str, Any]:
    return sorted(runs, key=lambda run: float(run[part]))[(len(runs) - 1) // 2]


def _shares(work: Work | None, seconds: float, peaks: Peaks) -> Row:
    if work is None:
        return dict.fromkeys(("bytes", "flops", "compute_share", "limit_share")) | {"peaks": peaks.as_json()}
    return {
        "bytes": work.nbytes,
        "flops": work.flops,
        "compute_share": peaks.compute_share(work, seconds),
        "limit_share": peaks.limit_seconds(work) / seconds,
        "peaks": peaks.as_json(),
    }


def table(rows: Sequence[Row]) -> list[str]:
    """Return a header and a line for each size and part; each peer has columns for its time and the speedup."""
    peers = list(dict.fromkeys(row["system"] for row in rows if row["system"] != OURS))
    found = {(row["system"], row["size"], row["part"]): row for row in rows}
    unit = f"of {compute_unit(rows[0]['peaks']['isa'])}"
    header = (
        f"{'medium':<12}{'tokens':>8}  {'part':<18}{'ms':>10}{'of tower':>10}{'of limit':>10}{unit:>{len(unit) + 2}}"
    )
    header += "".join(f"{peer + ' ms':>18}{'speedup':>9}" for peer in peers)
    lines = [header]
    for row in rows:
        if row["system"] != OURS:
            continue
        part = f"  {row['part']}" if row["part"] in TOWER_PARTS else row["part"]
        line = f"{row['size']:<12}{row['tokens']:>8}  {part:<18}{1000 * row['seconds']:>10.1f}"
        line += "".join(_share(row[name], 10) for name in ("tower_share", "limit_share"))
        line += _share(row["compute_share"], len(unit) + 2)
        for peer in peers:
            other = found.get((peer, row["size"], row["part"]))
            if other is not None:
                line += f"{1000 * other['seconds']:>18.1f}{other['ours_ratio']:>8.2f}x"
        lines.append(line.rstrip())
    return lines


def _share(share: float | None, width: int) -> str:
    return " " * width if share is None else f"{share_text(share):>{width}}"
