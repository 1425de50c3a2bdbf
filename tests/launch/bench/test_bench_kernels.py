"""bench kernels and bench comm: the work of entries by hand, their results against torch, and the rows."""

import argparse
import json
import math
from pathlib import Path

import pytest
import torch
from command import known_peaks, run
from torch.nn import functional

from tilerank.kernels import core
from tilerank.launch.bench import (
    comm,
    command,
    kernels,
    kernels_attention,
    kernels_experts,
    kernels_small,
    kernels_vision,
)
from tilerank.launch.bench.entry import Entry
from tilerank.launch.bench.formats import WEIGHT_FORMATS
from tilerank.launch.bench.kernels import Measurement, row_of
from tilerank.launch.bench.peaks import Peaks
from tilerank.launch.errors import LaunchError
from tilerank.parallel.cost import Work

VECTORS = Peaks(20.0, None, None, 100.0, 5.0, 0.0, "avx512", 0.25, 0.5, 1.0)
PEAKS = Peaks(stream_read_gbs=20.0, amx_bf16_tflops=4.0, amx_int8_tops=8.0, core_to_core_ns=100.0, first_touch_gbs=5.0)
READ = {"stream_read_gbs": 20.0}


@pytest.fixture(autouse=True)
def few_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilerank.launch.bench.entry.MAX_COPIES", 2)


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(words)


def entries(*words: str) -> dict[str, Entry]:
    return {f"{e.kernel} {e.shape} {e.format}": e for e in kernels.entries(parse("kernels", *words))}


def nothing() -> None:
    """A kernel that takes no time."""


def tensor_of(entry: Entry, number: int = 0) -> torch.Tensor:
    """Return the result of a kernel that makes one tensor."""
    result = entry.calls[number]()
    assert isinstance(result, torch.Tensor)
    return result


def test_linear_counts_weights_and_agrees_with_torch() -> None:
    found = entries("--only", "linear", "--m", "3", "--shape", "64x96")
    assert found["linear 3 x 64 x 96 bfloat16"].work == Work(64 * 96 * 2, bf16=2 * 3 * 64 * 96)
    assert found["linear 3 x 64 x 96 float32"].work == Work(64 * 96 * 4, fp32=2 * 3 * 64 * 96)
    for entry in found.values():
        assert tensor_of(entry).shape == (3, 64)
        if not entry.torch_calls:
            assert entry.format in (
                "int8",
                "token-int8",
                "int4",
                "int4-g32",
                "mxfp4",
                "mxfp4-a8",
                "int4-a8",
                "int4-a8-g32",
                "fp8",
                "block-int8",
                "channel-fp8",
                "fp8-g128",
                "group-int8",
            )
            continue
        for number in range(2):
            ours, theirs = entry.calls[number](), entry.torch_calls[number]()
            assert isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor)
            assert torch.allclose(ours.float(), theirs.float(), atol=0.02, rtol=0.02)
    one = found["linear 3 x 64 x 96 bfloat16"]
    first = tensor_of(one).clone()
    assert not torch.equal(first, tensor_of(one, 1))  # the next copy has other weights


def test_linear_counts_packed_bytes() -> None:
    if core.isa() == "reference":
        pytest.skip("plain torch packs nothing")
    found = entries("--only", "linear", "--m", "3", "--shape", "64x96", "--formats", "int8,int4,int4-a8,int4-g32,fp8")
    products = 2 * 3 * 64 * 96
    assert found["linear 3 x 64 x 96 int8"].work == Work(64 * (128 + 4), int8=products)
    # Inputs padded to groups; a scale of two bytes for each group of an output, or of four for each block.
    assert found["linear 3 x 64 x 96 int4"].work == Work(64 * (128 // 2 + 2), bf16=products)
    assert found["linear 3 x 64 x 96 int4-a8"].work == Work(64 * (128 // 2 + 2), int8=products)
    assert found["linear 3 x 64 x 96 int4-g32"].work == Work(64 * (96 // 2 + 3 * 2), bf16=products)
    assert found["linear 3 x 64 x 96 fp8"].work == Work(64 * 128 + 64, bf16=products)


def test_attention_counts_cached_bytes_and_visible_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_attention, "WINDOWS", ((5, 4, 2, 16),))
    found = entries("--only", "attention", "--cached-tokens", "40", "--new-tokens", "5")
    token = 2 * 8 * 128 * 2  # K and V, heads, head size, bytes
    assert found["decode attention 8 x 1 after 39 bfloat16"].work == Work(8 * 40 * token, bf16=4 * 32 * 128 * 8 * 40)
    codes = 2 * 8 * (128 + 4)  # one byte each, and a scale for each head
    assert found["decode attention 8 x 1 after 39 int8"].work == Work(8 * 40 * codes, bf16=4 * 32 * 128 * 8 * 40)
    pairs = 1 + 2 + 3 + 4 + 5
    assert found["extend attention 1 x 5 after 0 bfloat16"].work == Work(5 * token, bf16=4 * 32 * 128 * pairs)
    assert found["extend attention 1 x 5 after 5 bfloat16"].work == Work(10 * token, bf16=4 * 32 * 128 * (25 + pairs))
    windowed = found["window attention 8 x 4 x 16 of 5 after 39 bfloat16"].work
    assert windowed == Work(8 * 5 * 2 * 2 * 16 * 2, bf16=4 * 4 * 16 * 8 * 5)
    latents = 8 * 40 * (512 + 64)
    products = 2 * 22 * 8 * 40 * (512 + 64 + 512)
    assert found["latent attention 22 x 8 after 39 bfloat16"].work == Work(2 * latents, bf16=products)
    assert found["latent attention 22 x 8 after 39 int8"].work == Work(latents + 8 * 40 * 2 * 4, bf16=products)
    assert found["join queries 22 x 8 bfloat16"].work == Work(2 * 8 * 22 * 576 * 2)
    assert found["weigh part 128 x 8 of 6 bfloat16"].work == Work(2 * 8 * 128 * 512 * 2 + 6 * 8 * 128 * 4)
    expanded = found["latent extend 22 x 5 after 5 bfloat16"].work
    assert expanded == Work(10 * (22 * 256 + 64) * 2, bf16=2 * 22 * (192 + 128) * (25 + pairs))
    weights, product = 22 * 512 * 128, 2 * 8 * 22 * 512 * 128
    assert found["head linear 22 x 8 x 512x128 bfloat16"].work == Work(2 * weights, bf16=product)
    assert found["head linear 22 x 8 x 512x128 int8"].work == Work(weights + 22 * 512 * 4, int8=product)
    for entry in found.values():
        out = entry.calls[-1]()
        # Copies or means of standard normal values: unwritten memory and zeros would fail.
        most = 1.1 if entry.kernel == "join queries" else 0.8
        assert isinstance(out, torch.Tensor) and out.isfinite().all() and 0.05 < out.float().std() < most


def test_experts_count_chosen_experts_and_agree_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"EXPERTS": 16, "TOP_K": 2, "HIDDEN": 64, "WIDTH": 32}.items():
        monkeypatch.setattr(kernels_experts, name, value)
    found = entries("--only", "experts", "--tokens", "1,40", "--formats", "bfloat16,float32")
    one, many = found["experts 1 x 2 of 16 bfloat16"], found["experts 40 x 2 of 16 bfloat16"]
    expert = 3 * 64 * 32
    assert len(found) == 2 and one.work == Work(2 * expert * 2, bf16=2 * 2 * expert)
    # An expert gets none of 40 tokens, each with two of 16 experts, with probability (7/8)^40.
    assert 14 * expert * 2 <= many.work.nbytes <= 16 * expert * 2 and many.work.bf16 == 40 * one.work.bf16
    for entry in found.values():
        assert entry.torch_calls
        for number in (0, 5):
            ours, theirs = entry.calls[number](), entry.torch_calls[number]()
            assert isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor)
            assert (ours.float() - theirs.float()).norm() < 0.02 * theirs.float().norm()


def test_vision_kernels_agree_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"HIDDEN": 64, "WIDTH": 48, "PATCHES": 5, "PICTURES": (((20, 70), (2, 4)),), "ATTENTION_PATCHES": 5}
    sizes |= {"CONVOLUTIONS": ((40, 9, 7), (33, 4, 1)), "SOUND_ROWS": 3}
    for name, value in sizes.items():
        monkeypatch.setattr(kernels_vision, name, value)
    attend = functional.scaled_dot_product_attention

    def attend_in_double(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend(q.double(), k.double(), v.double()).to(q.dtype)

    if core.isa() not in ("amx", "avx512_bf16"):  # torch rounds the weights of attention to bf16, as these rungs do
        monkeypatch.setattr(functional, "scaled_dot_product_attention", attend_in_double)
    torch.manual_seed(0)  # torch and the kernels round a few sums of other inputs to different sides
    found = entries("--only", "vision")
    assert found["patches 20 x 70 pixels bfloat16"].work == Work(20 * 70 * 3 + 2 * 4 * 1536 * 2)
    assert found["layer_norm 5 x 64 bfloat16"].work == Work(2 * 5 * 64 * 2)
    assert found["rotary_float_ 5 x 16+16 x 72 bfloat16"].work == Work(2 * 5 * 32 * 72 * 2 + 5 * 72 * 4)
    attention = found["attention_varlen 5 x 16 x 72 bfloat16"].work
    assert attention == Work(4 * 5 * 16 * 72 * 2, bf16=5 * 5 * 16 * 4 * 72)
    convolution = found["convolve_ 9 x 40, 7 taps bfloat16"].work
    assert convolution == Work((9 + 18 + 9 + 7 * 40) * 40 * 2, bf16=2 * 9 * 7 * 40**2)
    compared = 0
    for entry in found.values():
        ours = entry.calls[0]()
        if entry.torch_calls:
            theirs = entry.torch_calls[0]()
            assert isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor)
            torch.testing.assert_close(ours, theirs)
            compared += 1
    assert len(found) == 13 and compared == 8


def test_small_kernels_agree_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"HIDDEN": 64, "WIDTH": 48, "VOCABULARY": 300, "EXPERTS": 32}.items():
        monkeypatch.setattr(kernels_small, name, value)
    found = entries("--only", "small", "--rows", "3,65")
    assert (sum(" 3 x" in name for name in found), sum(" 65 x" in name for name in found)) == (21, 15)
    assert found["argmax 3 x 300 float32"].work == Work(3 * 300 * 4)
    assert found["silu_mul 3 x 48 bfloat16"].work == Work(3 * 3 * 48 * 2)
    assert found["rotary_ 3 x 32+8 x 128 bfloat16"].work == Work(2 * 3 * 40 * 128 * 2)
    assert found["norm_rotary_ 3 x 32+8 x 128 bfloat16"].work == Work(2 * 3 * 40 * 128 * 2)
    compared = 0
    for name, entry in found.items():
        ours = entry.calls[-1]()
        if entry.torch_calls:
            compared += 1
            theirs = entry.torch_calls[-1]()
            if name.startswith("softmax_top_k"):  # ties may be broken either way: only the weights are unique
                assert isinstance(ours, tuple) and isinstance(theirs, tuple)
                ours, theirs = ours[1], theirs[1]
            pairs = (one if isinstance(one, tuple) else (one,) for one in (ours, theirs))
            for mine, other in zip(*pairs, strict=True):
                assert isinstance(mine, torch.Tensor) and isinstance(other, torch.Tensor)
                assert torch.allclose(mine.float(), other.float(), rtol=0.02, atol=0.01), name
    assert compared == 21


def test_every_format_has_a_name_on_the_command_line() -> None:
    assert tuple(WEIGHT_FORMATS) == kernels.FORMAT_NAMES


def test_rows_are_shares_of_the_peaks() -> None:
    entry = Entry("linear", "1 x 2 x 3", Work(40e6, bf16=1e9), [nothing])
    row = row_of(entry, [Measurement(0.004, 0.006, READ)], PEAKS, "amx")
    assert row["stream_share"] == pytest.approx(0.5) and row["amx_share"] == pytest.approx(1 / 16)
    assert row["limit_share"] == pytest.approx(0.5) and row["torch_ratio"] == pytest.approx(1.5)
    # At the int8 peak, 8 TOP/s, 16e9 operations take 2 ms.
    whole = Entry("linear", "1 x 2 x 3", Work(20e6, int8=16e9), [nothing], format="int8")
    row = row_of(whole, [Measurement(0.004, None, READ)], PEAKS, "amx")
    assert row["amx_share"] == row["compute_share"] == row["limit_share"] == pytest.approx(0.5) and row["flops"] == 16e9
    # AMX has no fp32 tiles, so reading is the only limit.
    single = Entry("linear", "1 x 2 x 3", Work(40e6, fp32=1e12), [nothing], format="float32")
    row = row_of(single, [Measurement(0.004, None, READ)], PEAKS, "amx")
    assert row["amx_share"] is row["compute_share"] is None
    assert row["limit_share"] == pytest.approx(0.5) and row["torch_ratio"] is None


@pytest.mark.parametrize(("kind", "flops"), [("fp32", 0.25e12), ("bf16", 0.5e12), ("int8", 1e12)])
def test_rows_without_amx_are_shares_of_the_vector_peaks(kind: str, flops: float) -> None:
    entry = Entry("linear", "1 x 2 x 3", Work(1e9, **{kind: flops}), [nothing], format="some")
    row = row_of(entry, [Measurement(2.0, None, READ)], VECTORS, "avx512")
    assert row["compute_share"] == row["limit_share"] == pytest.approx(0.5) and row["amx_share"] is None


def test_shares_are_against_the_rates_of_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.004, 9.0, 0.008, 9.5, 0.002, 9.9])
    monkeypatch.setattr(kernels, "seconds_per_call", lambda calls, budget: next(seconds))
    rates = iter({"stream_read_gbs": rate} for rate in (10.0, 30.0, 10.0, 70.0))
    entry = Entry("linear", "1 x 2 x 3", Work(40e6), [nothing], [nothing])
    measurements = kernels.measure(entry, lambda _: next(rates), 0.3)
    assert measurements == [
        Measurement(0.004, 9.0, READ),
        Measurement(0.008, 9.5, READ),
        Measurement(0.002, 9.9, {"stream_read_gbs": 40.0}),
    ]
    # 40 MB take 2, 2 and 1 ms at these rates, which are shares of 0.5, 0.25 and 0.5.
    row = row_of(entry, measurements[1:], PEAKS, "amx")
    assert (row["seconds"], row["stream_share"]) == (0.008, pytest.approx(0.25))
    row = row_of(entry, measurements, PEAKS, "amx")
    assert (row["seconds"], row["torch_seconds"], row["stream_share"]) == (0.004, 9.0, pytest.approx(0.5))
    assert row["peaks"]["stream_read_gbs"] == 20.0


def test_a_row_that_updates_memory_is_a_share_of_the_update_rate() -> None:
    entry = Entry("delta_step", "1 x 2 x 3", Work(updated=3e9), [nothing], format="float32")
    row = row_of(entry, [Measurement(0.2, None, READ | {"stream_update_gbs": 30.0})], PEAKS, "amx")
    # 3 GB at 30 GB/s take 0.1 s.
    assert row["stream_share"] == row["limit_share"] == pytest.approx(0.5) and row["bytes"] == 3e9
    assert row["peaks"][row["stream_rate"]] == 30.0


def test_the_time_of_a_call_is_the_median(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("tilerank.launch.bench.kernels.time.perf_counter", lambda: now[0])
    lengths = iter([9.0, 1.0, 2.0, 30.0])

    def call() -> None:
        now[0] += next(lengths)

    # The first call is the warm-up, longer than a fifth of 10 s. At least three calls follow.
    assert kernels.seconds_per_call([call], 10.0) == 2.0


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
def test_invalid_options_are_refused(words: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("kernels", *words)
    assert words[0] in capsys.readouterr().err


def test_bench_kernels_from_end_to_end(tmp_path: Path) -> None:
    """Few rows: each takes a fifth of a second for the rates beside it. The tests above run all other entries."""
    file = tmp_path / "rows.json"
    sizes = ("--only", "linear", "--m", "1,4", "--shape", "64x64", "--formats", "bfloat16,float32,int8")
    result = run("bench", "kernels", *sizes, "--seconds", 0.001, "--json", file)
    assert result.status == 0, result.err
    rows = json.loads(file.read_text())
    assert [(row["kernel"], row["shape"], row["format"]) for row in rows] == [
        ("linear", f"{m} x 64 x 64", name) for name in ("bfloat16", "float32", "int8") for m in (1, 4)
    ]
    for row in rows:
        assert row["seconds"] > 0 and f"{row['kernel']:<18}{row['shape']}" in result.out
        assert math.isclose(
            row["stream_share"], row["bytes"] / row["seconds"] / (row["peaks"]["stream_read_gbs"] * 1e9)
        )
        assert row["format"] == "int8" or row["torch_ratio"] > 0


def test_comm_rows_are_ratios() -> None:
    ours = [{"operation": "all_reduce", "bytes": 8192, "seconds": 2e-6, "eager_seconds": 5e-6}]
    gloo = [{"operation": "all_reduce", "bytes": 8192, "seconds": 80e-6}]
    (row,) = comm.rows_of(ours, gloo, 2, False, PEAKS)
    assert row["gloo_ratio"] == pytest.approx(40) and row["latency_ratio"] == pytest.approx(20)
    assert (row["ranks"], row["bytes"], row["oversubscribed"]) == (2, 8192, False)
    assert row["eager_seconds"] == 5e-6


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--tp", "1"), "needs two ranks or more"),
        (("--collectives", "gloo"), "expected no --collectives, found gloo"),
    ],
)
def test_comm_refuses(words: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(LaunchError, match=sentence):
        command.run(parse("comm", *words))


def test_bench_comm_from_end_to_end(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    result = run(
        "bench", "comm", "--tp", 2, "--bytes", "64,4096", "--repeat", 3, "--json", file, env=known_peaks(core.isa())
    )
    assert (result.status, result.errors) == (0, []), result.err
    rows = json.loads(file.read_text())
    assert [(row["operation"], row["bytes"]) for row in rows] == [
        (operation, nbytes) for operation in ("all_reduce", "all_gather") for nbytes in (64, 4096)
    ]
    assert all(row["ranks"] == 2 and row["seconds"] > 0 and row["gloo_seconds"] > 0 for row in rows)
    assert result.out.count("all_reduce") == 2
