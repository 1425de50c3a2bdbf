"""The rows of one and of several systems from known reports, their chart, and the end of a benchmark on SIGTERM."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tilerank.launch.bench import chart
from tilerank.launch.bench.cases import Case
from tilerank.launch.bench.peaks import Peaks
from tilerank.launch.bench.report import merged, rows_of, table
from tilerank.launch.planning.work import ModelWork
from tilerank.parallel.cost import Cost, Work

PEAKS = Peaks(stream_read_gbs=20.0, amx_bf16_tflops=4.0, amx_int8_tops=8.0, core_to_core_ns=100.0, first_touch_gbs=5.0)
WORK = asdict(ModelWork(Cost(10**9, token=Work(bf16=2e9)), Cost(), cached=0))


def make_report(prefill: float, step: float, read_gbs: float | None = None, **more: Any) -> dict[str, Any]:
    timing = {
        "first_token": prefill,
        "prefill": prefill,
        "step": step,
        "rates": read_gbs and {"stream_read_gbs": read_gbs},
    }
    return {"load_s": 1.0, "ready_s": 2.0, "timings": [[timing]], **more}


def known_rows() -> list[dict[str, Any]]:
    ours = [make_report(step, step / 10, 20.0, dtype="bfloat16", tp=2, work=WORK) for step in (1.0, 9.0, 2.0)]
    peer = [make_report(step, step / 10, version="5.0") for step in (8.0, 4.0, 6.0)]
    reports = {"tilerank": merged(ours), "transformers": merged(peer)}
    return rows_of(reports, [Case(4, 500, 8)], "tiny", PEAKS)


def test_rows_are_medians_of_the_rounds() -> None:
    rows = {(row["system"], row["phase"]): row for row in known_rows()}
    ours, theirs = rows["tilerank", "prefill"], rows["transformers", "prefill"]
    assert (ours["tokens_per_s"], theirs["tokens_per_s"]) == (4 * 500 / 2.0, pytest.approx(4 * 500 / 6.0))
    assert theirs["ours_ratio"] == pytest.approx(3.0) and ours["ours_ratio"] == 1.0 and theirs["version"] == "5.0"
    # 4 x 500 tokens x 2 x 1e9 at 4 TFLOP/s are 1 s; a step reads 1e9 bytes at 20 GB/s, 0.05 s.
    assert ours["limit_share"] == pytest.approx(1.0 / 2.0) and theirs["limit_share"] == pytest.approx(1.0 / 6.0)
    assert rows["tilerank", "decode"]["limit_share"] == pytest.approx(0.05 / 0.2)
    printed = table(known_rows())
    assert "transformers" in printed[2] and printed[2].endswith("3.00x")


def test_shares_are_against_the_read_rate_of_a_run() -> None:
    # A step reads 1e9 bytes: 100, 50 and 20 ms at these rates, which are shares of 0.5, 0.25 and 0.8 of the steps.
    ours = [
        make_report(1.0, step, read, dtype="bfloat16", tp=1, work=WORK)
        for step, read in ((0.2, 10.0), (0.2, 20.0), (0.025, 50.0))
    ]
    peer = [make_report(1.0, step) for step in (0.4, 0.1, 0.2)]
    reports = {"tilerank": merged(ours), "transformers": merged(peer)}
    rows = rows_of(reports, [Case(4, 500, 8)], "tiny", PEAKS)
    ours_decode, theirs_decode = (row for row in rows if row["phase"] == "decode")
    assert (ours_decode["tpot_s"], ours_decode["limit_share"]) == (0.2, pytest.approx(0.5))
    assert (theirs_decode["tpot_s"], theirs_decode["limit_share"]) == (0.2, pytest.approx(0.25))
    rates = [row["peaks"]["stream_read_gbs"] for row in (ours_decode, theirs_decode)]
    assert rates == [10.0, 20.0] and theirs_decode["ours_ratio"] == pytest.approx(1.0)


def test_chart_has_a_bar_for_every_row() -> None:
    drawn = ElementTree.fromstring(chart.draw(known_rows()))
    name = "{http://www.w3.org/2000/svg}"
    bars = [bar for bar in drawn.iter(f"{name}rect") if bar.get("height") == str(chart.BAR)]
    widths = [float(bar.attrib["width"]) for bar in bars]
    # By phase, tilerank first; the widths are proportional to the shares 0.5 : 1/6 : 0.25 : 1/12.
    assert [width / widths[0] for width in widths] == pytest.approx([1, 1 / 3, 1 / 2, 1 / 6], abs=0.01)
    full = chart.WIDTH - chart.LEFT - chart.RIGHT
    assert widths[0] == pytest.approx(full / 2, abs=0.1)
    texts = [text.text for text in drawn.iter(f"{name}text")]
    assert "prefill 500 x 4" in texts and "1,000 tokens/s · 0.50" in texts and texts.count("transformers") == 1


def test_the_chart_title_has_the_median_peaks() -> None:
    rows = known_rows()[:3]
    for row, rate in zip(rows, (10.0, 50.0, 30.0), strict=True):
        row["peaks"] = row["peaks"] | {"stream_read_gbs": rate}
    assert "limit (30.0 GB/s read, 4.00 TFLOP/s AMX bf16)" in chart.draw(rows)


def test_chart_names_are_escaped_and_shares_above_the_limit_fit() -> None:
    rows = known_rows()
    rows[0] |= {"model": "<&>", "limit_share": 2.0}
    drawn = ElementTree.fromstring(chart.draw(rows))
    rects = list(drawn.iter("{http://www.w3.org/2000/svg}rect"))
    right = max(float(rect.get("x", 0)) + float(rect.attrib["width"]) for rect in rects)
    assert right <= chart.WIDTH


def test_sigterm_ends_child_processes_and_removes_temporary_files(tmp_path: Path) -> None:
    code = (
        "import argparse, os, subprocess, sys, tempfile\n"
        "from tilerank.launch.bench import command\n"
        "def measure(args):\n"
        "    with tempfile.TemporaryDirectory() as scratch:\n"
        "        open(scratch + '/result', 'w').close()\n"
        "        subprocess.run(['sh', '-c', 'echo $$; sleep 1; kill -TERM $PPID; exec sleep 600'])\n"
        "sys.exit(command.run(argparse.Namespace(run_bench=measure)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE, timeout=60
    )
    assert done.returncode == 143
    assert list(tmp_path.iterdir()) == []
    assert not Path(f"/proc/{int(done.stdout)}").exists()
