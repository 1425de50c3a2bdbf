"""Writes the tables of docs/performance.md from the recorded figures of results/*.json.

    python -m benchmarks.tables

A block of the page between `<!-- results/NAME.json -->` and `<!-- end -->` is made from that file; the rest of the page
is written by hand. A file has `machine`, `date` and `runs`. A run has the `command` that printed it and either `rows`,
with the fields of `--json`, or `columns` and `rows` of text for figures that no single command prints. `peaks` are
those before the run, `load_average` that of the machine, `setting` and `loading` lines of the command's output, and
`peer` the system of peer_seconds. Runs whose rows have fields share a table.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tilerank.launch.bench.peaks import COMPUTE, compute_peak_texts, compute_unit
from tilerank.launch.bench.step_shares import KERNELS

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "performance.md"
BLOCK = re.compile(r"(<!-- (results/[\w.-]+\.json) -->\n).*?(<!-- end -->\n)", re.S)

Run = dict[str, Any]


def fixed(digits: int, unit: float = 1.0, suffix: str = "") -> Callable[[float], str]:
    return lambda value: f"{value / unit:.{digits}f}{suffix}"


COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "phase": ("phase", str),
    "task": ("task", str),
    "kernel": ("kernel", str),
    "operation": ("operation", str),
    "part": ("part", str),
    "prompt_tokens": ("prompt", str),
    "batch": ("batch", str),
    "system": ("system", str),
    "shape": ("shape", str),
    "format": ("format", str),
    "ranks": ("ranks", str),
    "bytes": ("bytes", str),
    "requests": ("requests", str),
    "frames": ("frames", str),
    "sound_seconds": ("sound ms", fixed(0, 1e-3)),
    "tokens_per_s": ("tokens/s", fixed(1)),
    "plain_tokens_per_s": ("plain tokens/s", fixed(1)),
    "plain_speedup": ("speedup", fixed(2)),
    "drafted_tokens_per_s": ("with drafts", fixed(1)),
    "drafted_speedup": ("speedup", fixed(2)),
    "ratio": ("ratio", fixed(2)),
    "accepted": ("accepted", fixed(0, 1e-2, " %")),
    "tokens_per_step": ("tokens/step", fixed(2)),
    "limit_tokens_per_s": ("limit", fixed(1)),
    "seconds": ("{time}", fixed(1)),
    "times_real_time": ("x real time", fixed(2)),
    "tower_share": ("of tower", fixed(2)),
    "limit_share": ("of limit", fixed(2)),
    "stream_share": ("of read", fixed(2)),
    "stream_gbs": ("at GB/s", fixed(1)),
    "compute_share": ("of {unit}", fixed(2)),
    "ttft_s": ("first token", fixed(3, suffix=" s")),
    "tpot_s": ("step", fixed(2, 1e-3, " ms")),
    **{f"{name}_share": (name, fixed(1, 1e-2, " %")) for name in (*KERNELS, "other", "overhead")},
    "latency_ratio": ("latencies", fixed(0)),
    "eager_seconds": ("eager us", fixed(1, 1e-6)),
    "gloo_seconds": ("gloo us", fixed(1, 1e-6)),
    "gloo_ratio": ("ratio", fixed(1)),
    "torch_seconds": ("torch us", fixed(1, 1e-6)),
    "torch_ratio": ("ratio", fixed(2)),
    "peer_seconds": ("peer ms", fixed(1, 1e-3)),
    "ours_ratio": ("speedup", fixed(2)),
    "real_time": ("x real time", fixed(2)),
    "real_time_each": ("each", fixed(2)),
    "first_sound_s": ("first sound s", fixed(2)),
    "frame_s": ("frame ms", fixed(1, 1e-3)),
    "predictor_s": ("predictor ms", fixed(1, 1e-3)),
    "predictor_stream_share": ("of read", fixed(2)),
    "predictor_limit_share": ("of limit", fixed(2)),
    "talker_s": ("talker ms", fixed(1, 1e-3)),
    "sound_s": ("sound ms", fixed(1, 1e-3)),
    "text_s": ("text ms", fixed(1, 1e-3)),
}
"""Title and text of each field of a row, in the order of the columns. A table has those that occur in its rows."""


def page_with_tables(page: str) -> str:
    """Return the text of a page with its blocks made anew."""
    return BLOCK.sub(lambda block: f"{block[1]}\n{block_of(block[2])}\n\n{block[3]}", page)


def block_of(name: str) -> str:
    """Return the Markdown of one file of results: its runs by number, and their tables."""
    found = json.loads((Path(__file__).parent / name).read_text())
    runs = list(enumerate((run for run in found["runs"] if "command" in run), 1))
    named = [f"{number}. {circumstances(run)}" for number, run in runs]
    tables = [[run["columns"], *run["rows"]] for run in found["runs"] if "columns" in run]
    if measured := [(number, run) for number, run in runs if "columns" not in run]:
        tables.append(table(measured))
    parts = [f"{found['machine']}, {found['date']}.", *(["\n".join(named)] if named else []), *map(markdown, tables)]
    return "\n\n".join(parts)


def circumstances(run: Run) -> str:
    """Return the command of a run, and what is recorded of the machine at the time."""
    texts = [f"beside {run['peer']}"] if "peer" in run else []
    texts += [run[key] for key in ("setting", "loading") if key in run]
    if "stream_read_gbs" in (peaks := run.get("peaks", {})):
        rates = compute_peak_texts(dict.fromkeys([name for name, _, _ in COMPUTE]) | peaks)
        texts.append(f"{peaks['stream_read_gbs']:.1f} GB/s read, {', '.join(rates)}")
        texts.append(f"{peaks['core_to_core_ns']:.0f} ns core to core")
    if "load_average" in run:
        texts.append(f"load average {run['load_average']:.1f}")
    commands = " after ".join(f"`{run[key]}`" for key in ("command", "model") if key in run)
    return f"{commands}: {'; '.join(texts)}" if texts else commands


def table(runs: list[tuple[int, Run]]) -> list[list[str]]:
    """Return the titles and the lines of a table of runs, each with its number."""
    rows = [(number, row) for number, run in runs for row in run["rows"]]
    fields = [field for field in COLUMNS if any(field in row for _, row in rows)]
    in_us = "kernel" in fields or "operation" in fields
    names = {"unit": compute_unit(runs[0][1]["peaks"]["isa"]), "time": "us" if in_us else "ms"}
    unit = 1e-6 if in_us else 1e-3
    titles = [COLUMNS[field][0].format(**names) for field in fields]
    return [
        ["run", *titles],
        *([str(number), *(_cell(field, row.get(field), unit) for field in fields)] for number, row in rows),
    ]


def markdown(lines: list[list[str]]) -> str:
    """Return a table as Markdown. lines: its titles, then its rows."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [lines[0], ["---"] * len(lines[0]), *lines[1:]])


def _cell(field: str, value: Any, unit: float) -> str:
    if value is None:
        return ""
    return fixed(1, unit)(value) if field == "seconds" else COLUMNS[field][1](value)


if __name__ == "__main__":
    PAGE.write_text(page_with_tables(PAGE.read_text()))
