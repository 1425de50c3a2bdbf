"""bench kernels and comm: what a call counts as by hand, that it computes what it says, and the commands' rows."""

import argparse
import json
import math
from pathlib import Path

import pytest
import torch
from command import run

from tilerank.kernels import core
from tilerank.launch import (
    bench,
    bench_comm,
    bench_entry,
    bench_formats,
    bench_kernels,
    bench_kernels_experts,
    bench_kernels_small,
)
from tilerank.launch.bench_entry import Entry
from tilerank.launch.bench_kernels import Turn
from tilerank.launch.bench_peaks import Peaks
from tilerank.launch.bench_work import Work
from tilerank.launch.errors import LaunchError

VECTORS = Peaks(20.0, None, None, 100.0, 5.0, 0.0, "avx512", 0.25, 0.5, 1.0)
PEAKS = Peaks(stream_read_gbs=20.0, amx_bf16_tflops=4.0, amx_int8_tops=8.0, core_to_core_ns=100.0, first_touch_gbs=5.0)
READ = {"stream_read_gbs": 20.0}


@pytest.fixture(autouse=True)
def few_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_entry, "MOST_COPIES", 2)


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(words)


def entries(*words: str) -> dict[str, Entry]:
    return {f"{e.kernel} {e.shape} {e.format}": e for e in bench_kernels.entries(parse("kernels", *words))}


def test_linear_counts_weights_and_computes_what_torch_does() -> None:
    found = entries("--only", "linear", "--m", "3", "--shape", "64x96")
    assert found["linear 3 x 64 x 96 bfloat16"].work == Work(64 * 96 * 2, bf16=2 * 3 * 64 * 96)
    assert found["linear 3 x 64 x 96 float32"].work == Work(64 * 96 * 4, fp32=2 * 3 * 64 * 96)
    for entry in found.values():
        assert entry.run(0).shape == (3, 64)  # type: ignore[attr-defined]
        if entry.torch is None:
            assert entry.format in ("int8", "int4", "int4-g32", "fp8")
            continue
        for number in range(2):
            ours, theirs = entry.run(number), entry.torch(number)
            assert isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor)
            assert torch.allclose(ours.float(), theirs.float(), atol=0.02, rtol=0.02)
    one = found["linear 3 x 64 x 96 bfloat16"]
    first = one.run(0).clone()  # type: ignore[attr-defined]
    assert not torch.equal(first, one.run(1))  # type: ignore[arg-type]  # copies of other weights


def test_linear_counts_packed_bytes() -> None:
    if core.isa() == "reference":
        pytest.skip("plain torch packs nothing")
    found = entries("--only", "linear", "--m", "3", "--shape", "64x96", "--formats", "int8,int4,int4-g32,fp8")
    products = 2 * 3 * 64 * 96
    assert found["linear 3 x 64 x 96 int8"].work == Work(64 * (128 + 8), int8=products)
    # Inputs up to groups, and a scale of two bytes for every group of an output, or of four for every block.
    assert found["linear 3 x 64 x 96 int4"].work == Work(64 * (128 // 2 + 2), bf16=products)
    assert found["linear 3 x 64 x 96 int4-g32"].work == Work(64 * (96 // 2 + 3 * 2), bf16=products)
    assert found["linear 3 x 64 x 96 fp8"].work == Work(64 * 128 + 64, bf16=products)


def test_attention_counts_cached_bytes_and_visible_pairs() -> None:
    found = entries("--only", "attention", "--cached-tokens", "40", "--new-tokens", "5")
    token = 2 * 8 * 128 * 2  # K and V, heads, dims, bytes
    assert found["decode attention 8 x 1 after 39 bfloat16"].work == Work(8 * 40 * token, bf16=4 * 32 * 128 * 8 * 40)
    codes = 2 * 8 * (128 + 4)  # a byte each, and a scale for each head
    assert found["decode attention 8 x 1 after 39 int8"].work == Work(8 * 40 * codes, bf16=4 * 32 * 128 * 8 * 40)
    pairs = 1 + 2 + 3 + 4 + 5
    assert found["extend attention 1 x 5 after 0 bfloat16"].work == Work(5 * token, bf16=4 * 32 * 128 * pairs)
    assert found["extend attention 1 x 5 after 5 bfloat16"].work == Work(10 * token, bf16=4 * 32 * 128 * (25 + pairs))
    for entry in found.values():
        out = entry.run(1)
        # A mean of normal values: neither zeros nor anything unwritten.
        assert isinstance(out, torch.Tensor) and out.isfinite().all() and 0.05 < out.float().std() < 0.8


def test_experts_count_those_that_are_chosen_and_compute_what_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"EXPERTS": 16, "TOP_K": 2, "HIDDEN": 64, "WIDTH": 32}.items():
        monkeypatch.setattr(bench_kernels_experts, name, value)
    found = entries("--only", "experts", "--tokens", "1,40", "--formats", "bfloat16,float32")
    one, many = found["experts 1 x 2 of 16 bfloat16"], found["experts 40 x 2 of 16 bfloat16"]
    expert = 3 * 64 * 32
    assert len(found) == 2 and one.work == Work(2 * expert * 2, bf16=2 * 2 * expert)
    # 40 tokens that go to two of 16 experts leave hardly any out: a chance of (7/8)^40 each.
    assert 14 * expert * 2 <= many.work.nbytes <= 16 * expert * 2 and many.work.bf16 == 40 * one.work.bf16
    for entry in found.values():
        assert entry.torch is not None
        for number in (0, 5):
            ours, theirs = entry.run(number), entry.torch(number)
            assert isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor)
            assert (ours.float() - theirs.float()).norm() < 0.02 * theirs.float().norm()


def test_small_kernels_do_what_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"HIDDEN": 64, "WIDTH": 48, "VOCABULARY": 300, "EXPERTS": 32}.items():
        monkeypatch.setattr(bench_kernels_small, name, value)
    found = entries("--only", "small", "--rows", "3,65")
    assert sum(" 3 x" in name for name in found) == len(bench_kernels_small.SMALL + bench_kernels_small.LOGITS)
    assert sum(" 65 x" in name for name in found) == len(bench_kernels_small.SMALL)
    assert found["argmax 3 x 300 float32"].work == Work(3 * 300 * 4)
    assert found["silu_mul 3 x 48 bfloat16"].work == Work(3 * 3 * 48 * 2)
    assert found["rotary_ 3 x 32+8 x 128 bfloat16"].work == Work(2 * 3 * 40 * 128 * 2)
    compared = 0
    for name, entry in found.items():
        ours = entry.run(1)
        if entry.torch is not None:
            compared += 1
            theirs = entry.torch(1)
            if name.startswith("softmax_top_k"):  # of equal logits either may be chosen: only the weights are unique
                ours, theirs = ours[1], theirs[1]  # type: ignore[index]
            assert isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor)
            assert torch.allclose(ours.float(), theirs.float(), rtol=0.02, atol=0.01), name
    assert compared == 9


def test_every_format_has_a_name_on_the_command_line() -> None:
    assert tuple(bench_formats.FORMATS) == bench_kernels.FORMATS


def test_rows_are_shares_of_the_peaks() -> None:
    entry = Entry("linear", "1 x 2 x 3", "bfloat16", Work(40e6, bf16=1e9), lambda _: None)
    row = bench_kernels.row_of(entry, [Turn(0.004, 0.006, READ)], PEAKS, "amx")
    assert row["stream_share"] == pytest.approx(0.5) and row["amx_share"] == pytest.approx(1 / 16)
    assert row["limit_share"] == pytest.approx(0.5) and row["torch_ratio"] == pytest.approx(1.5)
    # int8 has a peak of its own, 8 TOP/s: 16e9 operations take 2 ms of it.
    whole = Entry("linear", "1 x 2 x 3", "int8", Work(20e6, int8=16e9), lambda _: None)
    row = bench_kernels.row_of(whole, [Turn(0.004, None, READ)], PEAKS, "amx")
    assert row["amx_share"] == row["compute_share"] == row["limit_share"] == pytest.approx(0.5) and row["flops"] == 16e9
    # There are no fp32 tiles: only reading limits.
    single = Entry("linear", "1 x 2 x 3", "float32", Work(40e6, fp32=1e12), lambda _: None)
    row = bench_kernels.row_of(single, [Turn(0.004, None, READ)], PEAKS, "amx")
    assert row["amx_share"] is row["compute_share"] is None
    assert row["limit_share"] == pytest.approx(0.5) and row["torch_ratio"] is None


@pytest.mark.parametrize(("kind", "flops"), [("fp32", 0.25e12), ("bf16", 0.5e12), ("int8", 1e12)])
def test_rows_without_amx_are_shares_of_the_vector_peaks(kind: str, flops: float) -> None:
    entry = Entry("linear", "1 x 2 x 3", "some", Work(1e9, **{kind: flops}), lambda _: None)
    row = bench_kernels.row_of(entry, [Turn(2.0, None, READ)], VECTORS, "avx512")
    assert row["compute_share"] == row["limit_share"] == pytest.approx(0.5) and row["amx_share"] is None


def test_a_share_is_of_the_rate_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.004, 9.0, 0.008, 9.5, 0.002, 9.9])
    monkeypatch.setattr(bench_kernels, "seconds_per_call", lambda call, budget: next(seconds))
    rates = iter({"stream_read_gbs": rate} for rate in (10.0, 30.0, 10.0, 70.0))
    entry = Entry("linear", "1 x 2 x 3", "bfloat16", Work(40e6), lambda _: None, lambda _: None)
    turns = bench_kernels.turns_of(entry, lambda _: next(rates), 0.3)
    assert turns == [Turn(0.004, 9.0, READ), Turn(0.008, 9.5, READ), Turn(0.002, 9.9, {"stream_read_gbs": 40.0})]
    # 40 MB take 2, 2 and 1 ms at these rates: shares of 0.5, 0.25 and 0.5.
    row = bench_kernels.row_of(entry, turns[1:], PEAKS, "amx")
    assert (row["seconds"], row["stream_share"]) == (0.008, pytest.approx(0.25))
    row = bench_kernels.row_of(entry, turns, PEAKS, "amx")
    assert (row["seconds"], row["torch_seconds"], row["stream_share"]) == (0.004, 9.0, pytest.approx(0.5))
    assert row["peaks"]["stream_read_gbs"] == 20.0


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
        ("--formats", "int3"),
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
    sizes = ("--only", "linear,attention", "--m", "1,4", "--shape", "64x64", "--cached-tokens", 32, "--new-tokens", 32)
    result = run("bench", "kernels", *sizes, "--seconds", 0.001, "--json", file)
    assert result.status == 0, result.err
    rows = json.loads(file.read_text())
    assert [row["kernel"] for row in rows] == 12 * ["linear"] + 2 * ["decode attention"] + 2 * ["extend attention"]
    formats = {"bfloat16", "float32", "int8", "int4", "int4-g32", "fp8"}
    assert {row["format"] for row in rows if row["kernel"] == "linear"} == formats
    for row in rows:
        assert row["seconds"] > 0 and f"{row['kernel']:<18}{row['shape']}" in result.out
        assert math.isclose(
            row["stream_share"], row["bytes"] / row["seconds"] / (row["peaks"]["stream_read_gbs"] * 1e9)
        )
        plain = row["kernel"] == "linear" and row["format"] in ("bfloat16", "float32")
        assert not plain or row["torch_ratio"] > 0


def test_comm_rows_are_ratios() -> None:
    ours = [{"operation": "all_reduce", "bytes": 8192, "seconds": 2e-6, "eager_seconds": 5e-6}]
    gloo = [{"operation": "all_reduce", "bytes": 8192, "seconds": 80e-6}]
    (row,) = bench_comm.rows_of(ours, gloo, 2, False, PEAKS)
    assert row["gloo_ratio"] == pytest.approx(40) and row["latency_ratio"] == pytest.approx(20)
    assert (row["ranks"], row["bytes"], row["oversubscribed"]) == (2, 8192, False)
    assert row["eager_seconds"] == 5e-6


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
