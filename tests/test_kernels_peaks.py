"""Peaks: what can be checked of a measurement without timing anything is its limits, its failures and its report."""

import argparse
import json
import os
from pathlib import Path

import pytest

from tilerank.kernels import core, peaks
from tilerank.kernels.errors import KernelError
from tilerank.launch import bench
from tilerank.launch.errors import LaunchError

CORES = sorted(os.sched_getaffinity(0))

pytestmark = pytest.mark.skipif(not core.isa_report()[2].usable, reason=core.isa_report()[2].reason)


@pytest.fixture(autouse=True)
def small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peaks, "_last_level_cache_bytes", lambda: 1 << 20)


def test_figures_are_possible() -> None:
    # No machine reads 1e4 GB/s from one core, none is slower than a disk.
    assert 0.01 < peaks.stream_read_gbs(1) < 1e4
    assert 1e-4 < peaks.first_touch_gbs(1) < 1e4
    if len(CORES) > 1:
        assert 1 < peaks.core_to_core_ns(CORES[0], CORES[1]) < 1e9
    if core.isa_report()[0].usable:
        # A tile product is 16 x 16 x 32 x 2 operations in at least 16 cycles of at most 6 GHz.
        assert 0.001 < peaks.amx_tflops("bf16", 1) < 6.2
        assert 0.001 < peaks.amx_tflops("int8", 1) < 12.3


def test_wrong_arguments() -> None:
    with pytest.raises(KernelError, match=f"threads: expected 1 to {len(CORES)}, one for each core, found 0"):
        peaks.stream_read_gbs(0)
    with pytest.raises(KernelError, match="found 2"):
        peaks.amx_tflops("bf16", 2, [CORES[0]])
    with pytest.raises(KernelError, match="expected bf16 or int8, found 'fp8'"):
        peaks.amx_tflops("fp8", 1)  # type: ignore[arg-type]
    with pytest.raises(KernelError, match="two different cores"):
        peaks.core_to_core_ns(CORES[0], CORES[0])
    with pytest.raises(KernelError, match="a core this process may use, found 100000"):
        peaks.core_to_core_ns(CORES[0], 100000)
    with pytest.raises(KernelError, match="a core this process may use, found -1"):
        peaks.stream_read_gbs(1, [-1])


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(words)


@pytest.fixture
def known_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peaks, "stream_read_gbs", lambda count, cores: 12.34 * count)
    monkeypatch.setattr(peaks, "first_touch_gbs", lambda count, cores: 4.56 * count)
    monkeypatch.setattr(peaks, "amx_tflops", lambda kind, count, cores: (3 if kind == "bf16" else 6) * count)
    monkeypatch.setattr(peaks, "core_to_core_ns", lambda a, b: 140.4)


def run_on(rungs: list[core.Rung], monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(core, "isa_report", lambda: rungs)
    assert bench.run(arguments("peaks", *words)) == 0


USABLE = [core.Rung(name, True, "") for name in core.ISAS]


@pytest.mark.usefixtures("known_figures")
def test_bench_peaks_prints_and_writes_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "peaks.json"
    monkeypatch.setattr("os.getloadavg", lambda: (7.25, 0, 0))
    run_on(USABLE, monkeypatch, "--json", str(file))
    report, printed = json.loads(file.read_text()), capsys.readouterr().out
    cores = len(report["cores"])
    assert report["stream_read_gbs"] == {"1": 12.34} | {str(cores): 12.34 * cores}
    assert report["first_touch_gbs"] == {str(cores): 4.56 * cores} and f"{4.56 * cores:.2f} GB/s" in printed
    assert report["amx_int8_tops"][str(cores)] == 6 * cores
    assert "the load average was 7.2 before the start" in printed
    assert "12.34 GB/s" in printed and "3.00 TFLOP/s" in printed and "6.00 TOP/s" in printed
    if cores > 1:
        assert 140.4 in report["core_to_core_ns"].values() and "140 ns, one way" in printed


@pytest.mark.usefixtures("known_figures")
def test_bench_peaks_as_json_alone(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    run_on(USABLE, monkeypatch, "--json")
    printed = capsys.readouterr()
    assert json.loads(printed.out)["stream_read_gbs"]["1"] == 12.34 and "12.34 GB/s" in printed.err


@pytest.mark.usefixtures("known_figures")
def test_bench_peaks_without_amx(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_on([core.Rung("amx", False, "the CPU has no amx_tile"), *USABLE[1:]], monkeypatch)
    printed = capsys.readouterr().out
    assert "not available: the CPU has no amx_tile" in printed and "TFLOP/s" not in printed


def test_bench_peaks_says_what_it_cannot_write(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="--json: expected a file in a directory that can be written"):
        bench.run(arguments("peaks", "--json", str(tmp_path / "missing" / "peaks.json")))
