"""bench compare, its chart, and bench quality: rows of known reports, and the commands on the demo model."""

import argparse
import json
import math
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from command import DEMO, known_peaks, run

from tilerank.kernels import core
from tilerank.launch.bench import chart, command, compare, quality
from tilerank.launch.bench.cases import Case
from tilerank.launch.bench.compare import Peer
from tilerank.launch.bench.peaks import Peaks
from tilerank.launch.bench.report import merged, rows_of, table
from tilerank.launch.bench.work import ModelWork
from tilerank.launch.errors import LaunchError
from tilerank.parallel.cost import Cost, Work

PEAKS = Peaks(stream_read_gbs=20.0, amx_bf16_tflops=4.0, amx_int8_tops=8.0, core_to_core_ns=100.0, first_touch_gbs=5.0)
WORK = asdict(ModelWork(Cost(10**9, token=Work(bf16=2e9)), Cost(), cached=0))


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(words)


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


def test_why_a_peer_cannot_be_measured(tmp_path: Path) -> None:
    assert Peer("transformers", sys.executable).obstacle() is None
    assert Peer("transformers", str(tmp_path / "python")).obstacle() == (
        f"{tmp_path / 'python'} cannot be run: No such file or directory"
    )
    without = tmp_path / "without"
    without.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    without.chmod(0o755)
    assert Peer("transformers", str(without)).obstacle() == f"not installed: {without} has no module transformers"
    assert Peer("vllm", sys.executable).obstacle() is not None
    for name, quantization in (("transformers", "int8"), ("llama.cpp", "fp8")):
        expected = f"bench compare does not support --quantization {quantization} for it"
        assert Peer(name, sys.executable).obstacle(quantization) == expected


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("compare", str(DEMO), "--chart", "x.png"), "--chart: expected a .svg file"),
        (("model", str(DEMO), "--chart", "/nowhere/x.svg"), "--chart: expected a .svg file"),
        (("quality", str(DEMO), "--dtype", "float32"), "takes lists: --dtypes and --ranks"),
        (("quality", str(DEMO), "--tp", "2"), "takes lists: --dtypes and --ranks"),
        (("quality", str(DEMO), "--kv-cache-dtype", "int8"), "takes lists: --dtypes bfloat16\\+int8-kv"),
        (("quality", str(DEMO), "--tokens", "/nowhere"), "/nowhere cannot be read"),
    ],
)
def test_refusals_come_before_any_work(words: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(LaunchError, match=sentence):
        command.run(parse(*words))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{}", "missing required field `sequences`"),
        ("[", "tokens.json: "),
        ('{"sequences": []}', "expected at least one"),
        ('{"sequences": [[1, 2], [3]]}', "sequence 1: expected 2 to 4096 tokens, found 1"),
        ('{"sequences": [[1, 4096]]}', "sequence 0: expected token ids from 0 to 4095, found 4096"),
    ],
)
def test_invalid_token_files_are_refused(content: str, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    file.write_text(content)
    with pytest.raises(LaunchError, match=sentence):
        command.run(parse("quality", str(DEMO), "--tokens", str(file)))


def test_likelihood_by_hand() -> None:
    logits = torch.tensor([[math.log(3.0), 0.0], [0.0, 0.0], [9.0, 0.0]])
    # p = 3/4 for token 0, then 1/2 for token 1; no token follows the last row.
    assert quality.negative_log_likelihood(logits, [1, 0, 1]) == pytest.approx(-math.log(3 / 8), rel=1e-6)
    row = quality.row_of("float32", 2, {"loss": 2 * math.log(5.0), "tokens": 2, "isa": "amx"}, 4.0, 10.0)
    assert row["perplexity"] == pytest.approx(5.0) and row["reference_ratio"] == pytest.approx(1.25)
    assert row["first_ratio"] == pytest.approx(0.5)


def test_bench_compare_from_end_to_end(tmp_path: Path) -> None:
    file, chart = tmp_path / "rows.json", tmp_path / "chart.svg"
    sizes = ("--prompt-tokens", 8, "--batch", 2, "--new-tokens", 2, "--repeat", 1, "--tp", 2)
    outputs = ("--json", file, "--chart", chart, "--scratch", tmp_path / "scratch")
    result = run(
        "bench", "compare", DEMO, "--with", "transformers,sglang", *sizes, *outputs, env=known_peaks(core.isa())
    )
    assert (result.status, result.errors) == (0, []), result.err
    rows = json.loads(file.read_text())
    assert [(row["system"], row["phase"]) for row in rows] == [
        (system, phase) for system in ("tilerank", "transformers") for phase in ("prefill", "decode")
    ]
    assert all(row["tokens_per_s"] > 0 and row["load_s"] > 0 for row in rows)
    assert "sglang: skipped" in result.out and result.out.count("transformers") == 2
    assert ElementTree.parse(chart).getroot().tag.endswith("svg")
    assert (tmp_path / "scratch" / "transformers" / "result.json").exists()


def test_peers_get_the_quantization(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import json, sys, time\n"
        "workload = json.load(open(sys.argv[1]))\n"
        "events = [[[0, 0.1 * (i + 1)] for i in range(case['new_tokens'] + 1)] for case in workload['cases']]\n"
        "json.dump({'load_s': 0, 'ready_at': time.monotonic(), 'events': events}, open(sys.argv[2], 'w'))\n"
    )
    monkeypatch.setitem(compare.PEERS, "llama.cpp", ("json", str(program), ("int8", "int4")))
    peer = Peer("llama.cpp", sys.executable)
    received: list[tuple[str | None, int]] = []
    for words in ((), ("--quantization", "int8"), ("--quantization", "int4", "--quantization-group", "32")):
        args = parse("compare", str(DEMO), "--prompt-tokens", "4", "--batch", "1", *words)
        assert peer.obstacle(args.quantization) is None
        compare._measure_peer(args, peer, [0], "bfloat16", 0, tmp_path)
        workload = json.loads((tmp_path / "llama.cpp" / "workload.json").read_text())
        received.append((workload["quantization"], workload["group"]))
    assert received == [(None, 64), ("int8", 64), ("int4", 32)]


def test_bench_quality_finds_the_perplexity_of_transformers(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    result = run("bench", "quality", DEMO, "--ranks", 2, "--dtypes", "float32,bfloat16", "--json", file)
    assert (result.status, result.errors) == (0, []), result.err
    known = json.loads((DEMO / "eval_tokens.json").read_text())
    single, half = json.loads(file.read_text())
    assert single["perplexity"] == pytest.approx(known["fp32_perplexity"], rel=1e-4)
    assert half["perplexity"] == pytest.approx(known["bf16_perplexity"], rel=2e-3)
    assert single["reference_ratio"] == pytest.approx(1, rel=1e-4) and half["first_ratio"] != 1.0
    assert single["tokens"] == sum(len(ids) - 1 for ids in known["sequences"])


def test_bench_quality_of_an_int8_cache_is_close_to_that_of_bf16(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    options = ("--ranks", 1, "--limit", 4, "--dtypes", "bfloat16,bfloat16+int8-kv", "--json", file)
    result = run("bench", "quality", DEMO, *options)
    assert (result.status, result.errors) == (0, []), result.err
    bf16, int8 = json.loads(file.read_text())
    assert (bf16["dtype"], int8["dtype"]) == ("bfloat16", "bfloat16+int8-kv")
    assert 0 < abs(int8["perplexity"] / bf16["perplexity"] - 1) < 2e-3


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
