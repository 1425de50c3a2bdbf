"""bench kernels and comm: what a call counts as by hand, that it computes what it says, and the commands' rows."""

import argparse
import json
import math
from pathlib import Path

import pytest
import torch
from command import run

from tilerank.launch import bench, bench_comm, bench_kernels
from tilerank.launch.bench_kernels import Entry
from tilerank.launch.bench_peaks import Peaks
from tilerank.launch.bench_work import Work
from tilerank.launch.errors import LaunchError

PEAKS = Peaks(stream_read_gbs=20.0, amx_bf16_tflops=4.0, core_to_core_ns=100.0)


@pytest.fixture(autouse=True)
def few_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_kernels, "MOST_COPIES", 2)


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(words)


def entries(*words: str) -> dict[str, Entry]:
    return {f"{e.kernel} {e.shape} {e.dtype}": e for e in bench_kernels.entries(parse("kernels", *words))}


def test_linear_counts_weights_and_computes_what_torch_does() -> None:
    found = entries("--only", "linear", "--m", "3", "--shape", "64x96")
    assert found["linear 3 x 64 x 96 bfloat16"].work == Work(64 * 96 * 2, 2 * 3 * 64 * 96)
    assert found["linear 3 x 64 x 96 float32"].work == Work(64 * 96 * 4, 2 * 3 * 64 * 96)
    for entry in found.values():
        assert entry.torch is not None
        for number in range(2):
            ours, theirs = entry.run(number), entry.torch(number)
            assert isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor)
            assert torch.allclose(ours.float(), theirs.float(), atol=0.02, rtol=0.02)
    one = found["linear 3 x 64 x 96 bfloat16"]
    assert not torch.equal(one.run(0), one.run(1))  # type: ignore[arg-type]  # copies of other weights


def test_attention_counts_cached_bytes_and_visible_pairs() -> None:
    found = entries("--only", "attention", "--cached-tokens", "40", "--new-tokens", "5")
    token = 2 * 8 * 128 * 2  # K and V, heads, dims, bytes
    assert found["decode attention 8 x 1 after 39 bfloat16"].work == Work(8 * 40 * token, 4 * 32 * 128 * 8 * 40)
    pairs = 1 + 2 + 3 + 4 + 5
    assert found["extend attention 1 x 5 after 0 bfloat16"].work == Work(5 * token, 4 * 32 * 128 * pairs)
    assert found["extend attention 1 x 5 after 5 bfloat16"].work == Work(10 * token, 4 * 32 * 128 * (25 + pairs))
    for entry in found.values():
        out = entry.run(1)
        # A mean of normal values: neither zeros nor anything unwritten.
        assert isinstance(out, torch.Tensor) and out.isfinite().all() and 0.05 < out.float().std() < 0.8


def test_rows_are_shares_of_the_peaks() -> None:
    entry = Entry("linear", "1 x 2 x 3", "bfloat16", Work(40e6, 1e9), lambda _: None)
    row = bench_kernels.row_of(entry, 0.004, 0.006, PEAKS, "amx")
    assert row["stream_share"] == pytest.approx(0.5) and row["amx_share"] == pytest.approx(1 / 16)
    assert row["limit_share"] == pytest.approx(0.5) and row["torch_ratio"] == pytest.approx(1.5)
    # There are no fp32 tiles: only reading limits.
    single = Entry("linear", "1 x 2 x 3", "float32", Work(40e6, 1e12), lambda _: None)
    row = bench_kernels.row_of(single, 0.004, None, PEAKS, "amx")
    assert row["amx_share"] is None and row["limit_share"] == pytest.approx(0.5) and row["torch_ratio"] is None


def test_the_median_call_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(bench_kernels.time, "perf_counter", lambda: now[0])
    lengths = [9.0, 1.0, 2.0, 30.0]

    def call(number: int) -> None:
        now[0] += lengths[number]

    # The first call warms up for longer than a fifth of 10 s; then three at least.
    assert bench_kernels.seconds_per_call(call, 10.0) == 2.0


@pytest.mark.parametrize(
    "words",
    [
        ("--shape", "4096"),
        ("--shape", "0x64"),
        ("--dtype", "int3"),
        ("--only", "linear,conv"),
        ("--m", "0"),
        ("--seconds", "x"),
    ],
)
def test_options_that_cannot_be(words: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("kernels", *words)
    assert words[0] in capsys.readouterr().err


def test_bench_kernels_from_end_to_end(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    sizes = ("--m", "1,4", "--shape", "64x64", "--cached-tokens", 32, "--new-tokens", 32, "--seconds", 0.001)
    result = run("bench", "kernels", *sizes, "--json", file)
    assert result.status == 0, result.err
    rows = json.loads(file.read_text())
    assert {row["kernel"] for row in rows} == {
        "linear",
        "decode attention",
        "extend attention",
        "rms_norm",
        "add_rms_norm",
    }
    for row in rows:
        assert row["seconds"] > 0 and f"{row['kernel']:<18}{row['shape']}" in result.out
        assert math.isclose(
            row["stream_share"], row["bytes"] / row["seconds"] / (row["peaks"]["stream_read_gbs"] * 1e9)
        )
        assert row["kernel"] != "linear" or row["torch_ratio"] > 0


def test_comm_rows_are_ratios() -> None:
    ours = [{"operation": "all_reduce", "bytes": 8192, "seconds": 2e-6}]
    gloo = [{"operation": "all_reduce", "bytes": 8192, "seconds": 80e-6}]
    (row,) = bench_comm.rows_of(ours, gloo, 2, False, PEAKS)
    assert row["gloo_ratio"] == pytest.approx(40) and row["latency_ratio"] == pytest.approx(20)
    assert (row["ranks"], row["bytes"], row["oversubscribed"]) == (2, 8192, False)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--tp", "1"), "needs two ranks or more"),
        (("--collectives", "gloo"), "found --collectives gloo"),
    ],
)
def test_comm_refuses(words: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(LaunchError, match=sentence):
        bench.run(parse("comm", *words))


def test_bench_comm_from_end_to_end(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    result = run("bench", "comm", "--tp", 2, "--bytes", "64,4096", "--repeat", 3, "--json", file)
    assert (result.status, result.errors) == (0, []), result.err
    rows = json.loads(file.read_text())
    assert [(row["operation"], row["bytes"]) for row in rows] == [
        (operation, nbytes) for operation in ("all_reduce", "all_gather") for nbytes in (64, 4096)
    ]
    assert all(row["ranks"] == 2 and row["seconds"] > 0 and row["gloo_seconds"] > 0 for row in rows)
    assert result.out.count("all_reduce") == 2
