"""Measured rates: the choice of rungs by given rates, kernels on rungs of their own, limits and failures of peaks."""

import math
import os

import pytest
import torch
from rungs import COMPILED

from tilerank.kernels import core, peaks, rung_rates
from tilerank.kernels.errors import KernelError
from tilerank.kernels.linear import linear
from tilerank.kernels.rung_rates import KINDS, ROUNDS, choose, measure, texts
from tilerank.kernels.weight_formats import EXPERT_LAYOUTS, LAYOUTS, Float, Int8

CORES = sorted(os.sched_getaffinity(0))

pytestmark = [
    pytest.mark.usefixtures("restored"),
    pytest.mark.skipif(not COMPILED, reason="plain torch has one rung"),
]


@pytest.mark.parametrize(
    ("rates", "chosen"),
    [
        ({"avx512_bf16": [34, 35, 33], "avx512": [64, 66, 60], "avx2": [33, 34, 31]}, "avx512"),
        ({"avx512_bf16": [120, 121, 119], "avx512": [70, 70, 70], "avx2": [69, 69, 69]}, "avx512_bf16"),
        ({"amx": [900, 900, 900], "avx512_bf16": [120, 120, 120], "avx512": [70, 70, 70]}, "amx"),
        ({"amx": [10, 10, 10], "avx512_bf16": [30, 30, 30], "avx512": [60, 60, 60]}, "avx512"),
        ({"avx512_bf16": [86, 86, 86], "avx512": [100, 100, 100]}, "avx512_bf16"),
        ({"avx512_bf16": [84, 84, 84], "avx512": [100, 100, 100]}, "avx512"),
        ({"avx512_bf16": [40, 99, 40], "avx512": [100, 100, 100]}, "avx512_bf16"),
        ({"avx512_bf16": [60, 60, 60], "avx512": [62, 20, 62], "avx2": [75, 75, 75]}, "avx2"),
    ],
    ids=["bf16 at half the rate", "bf16 at its rate", "tiles", "slow tiles", "14 %", "16 %", "one round", "oldest"],
)
def test_a_newer_rung_loses_only_if_it_is_clearly_slower_in_every_round(
    rates: dict[str, list[float]], chosen: str
) -> None:
    assert choose({"bf16": rates}) == {"bf16": chosen}


def test_a_text_has_the_rates_of_all_candidates() -> None:
    rates = {"bf16": {"avx512_bf16": [34e9, 35e9, 33e9], "avx512": [64e9, 66e9, 60e9]}}
    assert texts(rates) == ["bf16 on avx512: 64 GFLOP/s (avx512_bf16 34)"]


def test_every_weight_format_but_fp32_is_a_kind() -> None:
    from tilerank.kernels import _C  # missing where kernels run in plain torch

    assert {layout.format for layout in LAYOUTS} | {"attention"} == {*KINDS, "f32"}
    kernels = _C.kernels()
    for layout, of_experts in EXPERT_LAYOUTS.items():
        names = [f"linear_{layout.format}", f"head_linear_{layout.format}", f"moe_{of_experts.format}"]
        assert set(names) <= {*kernels}
        assert {core.kind_of(name) for name in names} <= {*KINDS, "f32"}
    unmeasured = {core.kind_of(name) for name in kernels} - {*KINDS}
    assert unmeasured == {"", "f32", "channels"}


def test_every_kind_has_a_rate_on_every_rung() -> None:
    core.use_rungs({"bf16": "avx2"})
    rates = measure(COMPILED)
    assert tuple(rates) == KINDS and core.rungs() == {"bf16": "avx2"}
    for by_rung in rates.values():
        assert list(by_rung) == COMPILED
        assert all(len(rounds) == ROUNDS and all(0 < rate < math.inf for rate in rounds) for rounds in by_rung.values())


def test_each_kind_runs_on_its_own_rung() -> None:
    x, results = torch.randn(3, 64).to(torch.bfloat16), {}
    bf16, int8 = Float(torch.bfloat16).empty(32, 64), Int8().empty(32, 64)
    for weight in (bf16, int8):
        weight.write(torch.randn(32, 64))
    for rung in COMPILED:
        core.force_isa(rung)
        results[rung] = linear(x, bf16).clone(), linear(x, int8).clone()
    for rung in COMPILED:
        core.force_isa(COMPILED[0])
        core.use_rungs({"bf16": rung})
        assert core.rung_of("bf16") == rung and core.rung_of("int8") == core.isa() == COMPILED[0]
        assert torch.equal(linear(x, bf16), results[rung][0])
        assert torch.equal(linear(x, int8), results[COMPILED[0]][1])
    # Nothing is compiled for plain torch, which shows what each kernel was asked to run on.
    core.use_rungs({"bf16": "reference"})
    assert torch.equal(linear(x, int8), results[COMPILED[0]][1])
    with pytest.raises(KernelError, match="linear_bf16 has no version for the rung reference"):
        linear(x, bf16)
    with pytest.raises(KernelError, match="expected a rung that this machine can run, found sse"):
        core.use_rungs({"bf16": "sse"})
    core.force_isa(COMPILED[0])
    assert core.rungs() == {}


def test_reports_name_the_rungs_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "_isa", "avx512_bf16")
    assert core.isa_text() == "avx512_bf16"
    monkeypatch.setattr(core, "_rungs", {"bf16": "avx512", "int8": "avx512_bf16", "int4": "avx512"})
    assert core.isa_text() == "avx512_bf16+avx512"
    monkeypatch.setattr(core, "_rungs", {"bf16": "avx512", "int8": "avx512"})
    assert core.isa_text() == "avx512"


def test_scratch_memory_is_that_of_the_rung_of_the_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "_isa", "avx512_bf16")
    weight = Int8().empty(32, 64)
    assert weight.scratch(100) == 100 * (64 + 8)  # codes, a scale and a start
    monkeypatch.setattr(core, "_rungs", {"bf16": "amx", "int8": "avx2"})
    assert weight.scratch(100) == 100 * (2 * 64 + 8)


def test_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(usable: str, newest: str, emulated: bool = False, given: str | None = None) -> list[str]:
        report = [core.Rung(name, name in usable.split(), "", emulated and name == "amx") for name in core.ISAS]
        monkeypatch.setattr(core, "isa_report", lambda: report)
        monkeypatch.setattr(core, "isa", lambda: newest)
        monkeypatch.setattr(core, "given_isa", lambda: given)
        return rung_rates.candidates()

    assert found("avx512_bf16 avx512 avx2", "avx512_bf16") == ["avx512_bf16", "avx512", "avx2"]
    assert found("avx512_bf16 avx512 avx2", "avx512") == ["avx512", "avx2"]  # another rank has no newer one
    assert found("avx512_bf16 avx512 avx2", "avx2") == found("avx2", "avx2") == found("", "reference") == []
    assert found("avx512 avx2", "avx512", given="avx512") == []
    assert found("amx avx512_bf16 avx512 avx2", "amx", emulated=True) == []


# Peaks


@pytest.fixture
def small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peaks, "_last_level_cache_bytes", lambda: 1 << 20)


@pytest.mark.usefixtures("small_cache")
def test_figures_are_possible() -> None:
    # No machine reads 1e4 GB/s from one core, none is slower than a disk.
    assert 0.01 < peaks.stream_read_gbs(1) < 1e4
    assert 0.01 < peaks.stream_update_gbs(1) < 1e4
    assert 1e-4 < peaks.first_touch_gbs(1) < 1e4
    if len(CORES) > 1:
        assert 1 < peaks.core_to_core_ns(CORES[0], CORES[1]) < 1e9
    amx = core.isa_report()[0]
    if amx.emulated:
        with pytest.raises(KernelError, match="emulates its tiles"):
            peaks.amx_tflops("bf16", 1)
    elif amx.usable:
        # A tile product is 16 x 16 x 32 x 2 operations in at least 16 cycles of at most 6 GHz.
        assert 0.001 < peaks.amx_tflops("bf16", 1) < 6.2
        assert 0.001 < peaks.amx_tflops("int8", 1) < 12.3


@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])
def test_vector_figures_are_possible(kind: str) -> None:
    # Two products of 16 lanes, of four inputs each in int8, a cycle of at most 6 GHz.
    assert 1e-4 < peaks.vector_tflops(kind, 1) < 6e-3 * 2 * 16 * 2 * 4


def test_the_vector_peak_is_that_of_the_fastest_rung(monkeypatch: pytest.MonkeyPatch) -> None:
    """With bf16 products at half the rate of fp32 ones, those of two inputs are as slow as widening."""
    monkeypatch.setattr("tilerank.kernels._C.obstacles", lambda: [("amx", ""), ("avx512_bf16", ""), ("avx512", "")])
    rates = {"avx512_bf16": 34e9, "avx512": 64e9}
    monkeypatch.setattr("tilerank.kernels._C.measure_vectors", lambda cores, rung, dtype: [rates[rung] * len(cores)])
    peaks._fastest_vectors.cache_clear()
    try:
        assert peaks.vector_tflops("bf16", len(CORES)) == pytest.approx(0.064 * len(CORES))
    finally:
        peaks._fastest_vectors.cache_clear()


@pytest.mark.usefixtures("small_cache")
def test_wrong_arguments() -> None:
    with pytest.raises(KernelError, match=f"threads: expected 1 to {len(CORES)}, one for each core, found 0"):
        peaks.stream_read_gbs(0)
    with pytest.raises(KernelError, match="found 2"):
        peaks.amx_tflops("bf16", 2, [CORES[0]])
    with pytest.raises(KernelError, match="expected bf16 or int8, found 'fp8'"):
        peaks.amx_tflops("fp8", 1)
    with pytest.raises(KernelError, match="expected one of fp32, bf16, int8, found 'fp8'"):
        peaks.vector_tflops("fp8", 1)
    with pytest.raises(KernelError, match="found 2"):
        peaks.vector_tflops("fp32", 2, [CORES[0]])
    with pytest.raises(KernelError, match="two different cores"):
        peaks.core_to_core_ns(CORES[0], CORES[0])
    with pytest.raises(KernelError, match="a core this process may use, found 100000"):
        peaks.core_to_core_ns(CORES[0], 100000)
    with pytest.raises(KernelError, match="a core this process may use, found -1"):
        peaks.stream_read_gbs(1, [-1])
