"""bench peaks: what it measures, prints and writes, on machines whose peaks are given."""

import argparse
import json
import os
from pathlib import Path

import pytest

from tilerank.kernels import core, peaks
from tilerank.launch.bench import command
from tilerank.launch.bench.peaks import Peaks, RateProbe, mean_rates, peaks_from
from tilerank.launch.errors import LaunchError
from tilerank.parallel.cost import Work

CORES = sorted(os.sched_getaffinity(0))

pytestmark = pytest.mark.skipif(not core.isa_report()[-2].usable, reason=core.isa_report()[-2].reason)


@pytest.fixture(autouse=True)
def small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peaks, "_last_level_cache_bytes", lambda: 1 << 20)


@pytest.mark.parametrize("rung", core.ISAS)
def test_a_probe_measures_the_rates_that_limit_the_work(rung: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Return the peaks of hardware whose newest rung is `rung`."""
    monkeypatch.setattr(peaks, "vector_tflops", lambda kind, count, cores: {"bf16": 0.25, "int8": 0.75}[kind])
    monkeypatch.setattr(peaks, "amx_tflops", lambda kind, count, cores: {"bf16": 3.0, "int8": 6.0}[kind])
    monkeypatch.setattr(core, "hardware_isa", lambda: rung)
    probe = RateProbe(CORES[:1])
    monkeypatch.setattr(probe._stream, "read_gbs", lambda: 12.5)
    monkeypatch.setattr(probe._stream, "update_gbs", lambda: 17.5)
    read, part = {"stream_read_gbs": 12.5}, {"amx": "amx_bf16_tflops"}.get(rung, "vector_bf16_tflops")
    both = {"amx": {"amx_bf16_tflops": 3.0, "amx_int8_tops": 6.0}}.get(
        rung, {"vector_bf16_tflops": 0.25, "vector_int8_tops": 0.75}
    )
    if rung == "reference":  # nothing multiplies there but torch
        both = {}
    assert probe.measure(Work(1e9)) == read
    assert probe.measure(Work(updated=1e9)) == read | {"stream_update_gbs": 17.5}
    assert probe.measure(Work(1e9, bf16=1e9)) == read | {name: rate for name, rate in both.items() if name == part}
    assert probe.measure(Work(1e9, bf16=1e9, int8=1e9)) == read | both


def test_rates_beside_a_figure_take_the_place_of_those_before() -> None:
    before = Peaks(20.0, None, None, 100.0, 5.0, 0.0, "avx512", 0.25, 0.5, 1.0)
    found = before.with_rates({"stream_read_gbs": 10.0, "vector_bf16_tflops": 0.25})
    # 20 GB/s and 0.5 TFLOP/s had been half a second.
    assert before.limit_seconds(Work(10e9)) == 0.5 and found.limit_seconds(Work(10e9)) == 1.0
    assert found.limit_seconds(Work(bf16=0.25e12)) == 1.0 and found.vector_int8_tops == 1.0
    assert mean_rates({"a": 1.0, "b": 8.0}, {"a": 2.0, "b": 4.0}) == {"a": 1.5, "b": 6.0}


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(words)


@pytest.fixture
def known_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peaks, "stream_read_gbs", lambda count, cores: 12.34 * count)
    monkeypatch.setattr(peaks, "stream_update_gbs", lambda count, cores: 23.45 * count)
    monkeypatch.setattr(peaks, "first_touch_gbs", lambda count, cores: 4.56 * count)
    monkeypatch.setattr(peaks, "amx_tflops", lambda kind, count, cores: (3 if kind == "bf16" else 6) * count)
    vectors = {"fp32": 0.15, "bf16": 0.25, "int8": 0.75}
    monkeypatch.setattr(peaks, "vector_tflops", lambda kind, count, cores: vectors[kind] * count)
    monkeypatch.setattr(peaks, "core_to_core_ns", lambda a, b: 140.4)
    monkeypatch.setattr("tilerank.kernels._C.emulates_amx", False)


def run_on(rungs: list[core.Rung], monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(core, "isa_report", lambda: rungs)
    monkeypatch.setattr(core, "hardware_isa", lambda: next(rung.name for rung in rungs if rung.usable))
    assert command.run(arguments("peaks", *words)) == 0


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
    assert report["amx_int8_tops"][str(cores)] == 6 * cores and "vector_fp32_tflops" not in report
    assert "the load average was 7.2 before the start" in printed
    assert "12.34 GB/s" in printed and "3.00 TFLOP/s" in printed and "6.00 TOP/s" in printed
    assert peaks_from(report, 0.0).stream_update_gbs == 23.45 * cores and "23.45 GB/s" in printed
    if cores > 1:
        assert 140.4 in report["core_to_core_ns"].values() and "140 ns, one way" in printed


@pytest.mark.usefixtures("known_figures")
def test_bench_peaks_as_json_alone(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    run_on(USABLE, monkeypatch, "--json")
    printed = capsys.readouterr()
    assert json.loads(printed.out)["stream_read_gbs"]["1"] == 12.34 and "12.34 GB/s" in printed.err


@pytest.mark.usefixtures("known_figures")
@pytest.mark.parametrize(("rung", "title"), [("avx512_bf16", "AVX-512"), ("avx512", "AVX-512"), ("avx2", "AVX2")])
def test_bench_peaks_without_amx(
    rung: str, title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = core.ISAS.index(rung)
    rungs = [core.Rung(name, False, "the CPU has no amx_tile") for name in core.ISAS[:first]] + USABLE[first:]
    run_on(rungs, monkeypatch, "--json", str(tmp_path / "peaks.json"))
    printed, report = capsys.readouterr().out, json.loads((tmp_path / "peaks.json").read_text())
    assert "AMX           not available: the CPU has no amx_tile" in printed
    assert report["isa"] == rung and "amx_bf16_tflops" not in report
    assert f"{title} fp32".ljust(14) + "1 core          0.15 TFLOP/s" in printed
    assert f"{title} int8".ljust(14) + "1 core          0.75 TOP/s" in printed
    found = peaks_from(report, 0.0)
    cores = len(report["cores"])
    assert (found.vector_fp32_tflops, found.vector_bf16_tflops) == (0.15 * cores, 0.25 * cores)
    assert (
        f"{0.15 * cores:.2f} TFLOP/s {title} fp32, {0.25 * cores:.2f} TFLOP/s bf16, {0.75 * cores:.2f} TOP/s int8"
        in (found.text())
    )


@pytest.mark.usefixtures("known_figures")
def test_bench_peaks_in_plain_torch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_on([*(core.Rung(name, False, "capped") for name in core.ISAS[:-1]), USABLE[-1]], monkeypatch)
    assert "OP/s" not in capsys.readouterr().out


def test_bench_refuses_to_measure_emulated_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilerank.kernels._C.emulates_amx", True)
    monkeypatch.delenv("TILERANK_ISA", raising=False)
    with pytest.raises(LaunchError, match="bench: expected AMX tiles of the CPU, found a build that emulates them"):
        command.run(arguments("peaks"))


@pytest.mark.usefixtures("known_figures")
def test_bench_peaks_says_what_it_cannot_write(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="--json: expected a file in a writable directory"):
        command.run(arguments("peaks", "--json", str(tmp_path / "missing" / "peaks.json")))


@pytest.mark.usefixtures("known_figures")
def test_bench_peaks_says_that_a_disk_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LaunchError, match=r"^--json: /dev/full cannot be written: No space left on device$"):
        run_on([USABLE[-1]], monkeypatch, "--json", "/dev/full")
