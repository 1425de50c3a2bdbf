"""Turns the runs of `bench media` into JSON rows and a table: a row for each system, size and part."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

import msgspec

from tilerank.parallel.cost import Work

from .harness import Column, Row, median_by
from .harness import table as lines_of
from .peaks import Peaks, compute_unit, share_text
from .report import OURS, Report

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
            tower = median_by(size["runs"], "tower")
            for part in (*PARTS[:3], *TOWER_PARTS, *PARTS[3:]):
                if part not in tower:
                    continue
                run = tower if part in ("tower", *TOWER_PARTS) else median_by(size["runs"], part)
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


def _shares(work: Work | None, seconds: float, peaks: Peaks) -> Row:
    found = {} if work is None else peaks.shares(work, seconds)
    names = ("bytes", "flops", "compute_share", "limit_share")
    return {name: found.get(name) for name in names} | {"peaks": peaks.as_json()}


def table(rows: Sequence[Row]) -> list[str]:
    """Return a header and a line for each size and part; each peer has columns for its time and the speedup."""
    peers = list(dict.fromkeys(row["system"] for row in rows if row["system"] != OURS))
    found = {(row["system"], row["size"], row["part"]): row | {"milliseconds": 1000 * row["seconds"]} for row in rows}
    unit = f"of {compute_unit(rows[0]['peaks']['isa'])}"

    def of_peer(peer: str, text: str) -> Callable[[Row], str]:
        """Return what formats the row of a peer for the same size and part, if there is one."""
        return lambda row: text.format(**other) if (other := found.get((peer, row["size"], row["part"]))) else ""

    columns = [
        Column("medium", 12, lambda row: row["size"]),
        Column("tokens", -8, lambda row: str(row["tokens"])),
        Column("  part", 20, lambda row: f"    {row['part']}" if row["part"] in TOWER_PARTS else f"  {row['part']}"),
        Column("ms", -10, lambda row: f"{1000 * row['seconds']:.1f}"),
        Column("of tower", -10, lambda row: _share(row["tower_share"])),
        Column("of limit", -10, lambda row: _share(row["limit_share"])),
        Column(unit, -2 - len(unit), lambda row: _share(row["compute_share"])),
    ]
    for peer in peers:
        columns += [
            Column(f"{peer} ms", -18, of_peer(peer, "{milliseconds:.1f}")),
            Column("speedup", -9, of_peer(peer, "{ours_ratio:.2f}x")),
        ]
    return lines_of(columns, [row for row in rows if row["system"] == OURS])


def _share(share: float | None) -> str:
    return "" if share is None else share_text(share)
