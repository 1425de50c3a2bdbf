"""The file of measured rates: measured once, damaged, not writable, written by two at once; the ranks' agreement."""

import logging
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rungs import COMPILED

from tilerank.kernels import core, rung_rates
from tilerank.kernels.rung_rates import KINDS, ROUNDS, Rates
from tilerank.launch.host import kept_rates
from tilerank.launch.host.kept_rates import known_rates, read_rates, rung_texts
from tilerank.launch.host.placement import RankPlacement
from tilerank.launch.ranks import agreed_rungs

RUNGS = ["avx512_bf16", "avx512"]


def rates_of(*by_rung: float) -> Rates:
    return {kind: {rung: [rate] * ROUNDS for rung, rate in zip(RUNGS, by_rung, strict=True)} for kind in KINDS}


class Measure:
    """Returns these rates and counts the calls."""

    def __init__(self, rates: Rates) -> None:
        self.rates, self.calls = rates, 0

    def __call__(self, rungs: Sequence[str]) -> Rates:
        self.calls += 1
        return self.rates


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "tilerank"


def test_rates_are_measured_once(cache: Path) -> None:
    first, second = Measure(rates_of(34e9, 64e9)), Measure(rates_of(1e9, 1e9))
    assert read_rates(RUNGS) is None
    assert known_rates(RUNGS, first) == known_rates(RUNGS, second) == read_rates(RUNGS) == first.rates
    assert (first.calls, second.calls, len(list(cache.iterdir()))) == (1, 0, 1)


def test_another_cpu_build_or_set_of_rungs_has_rates_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [kept_rates._file(RUNGS), kept_rates._file(RUNGS[:1])]
    monkeypatch.setattr(core, "build_digest", lambda: "another")
    files.append(kept_rates._file(RUNGS))
    monkeypatch.setattr(kept_rates, "cpu_fields", lambda: {"model": "another"})
    files.append(kept_rates._file(RUNGS))
    assert len(set(files)) == 4


def test_the_cpu_is_its_model_with_stepping_and_microcode(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(
        "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 1\nstepping\t: 1\n"
        "microcode\t: 0xa001\ncpu MHz\t\t: 2450.0\n\nprocessor\t: 1\nstepping\t: 2\n"
    )
    expected = {"vendor_id": "AuthenticAMD", "cpu family": "25", "model": "1", "stepping": "1", "microcode": "0xa001"}
    assert kept_rates.cpu_fields(tmp_path / "cpuinfo") == expected


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("", "expected rates of the rungs in JSON"),
        ('{"cpu": {}, "rates": ', "expected rates of the rungs in JSON"),
        ('{"cpu": {}, "rates": {"bf16": {"avx512_bf16": ["fast"]}}}', "expected 5 rates for each of"),
        ('{"cpu": {}, "rates": {"bf16": {"avx512": [1, 1, 1, 1, 1]}}}', "expected 5 rates for each of bf16, "),
    ],
)
def test_a_damaged_file_is_measured_again(content: str, found: str, caplog: pytest.LogCaptureFixture) -> None:
    path, measure = kept_rates._file(RUNGS), Measure(rates_of(34e9, 64e9))
    path.parent.mkdir()
    path.write_text(content)
    assert read_rates(RUNGS) is None
    assert known_rates(RUNGS, measure) == read_rates(RUNGS) == measure.rates
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.startswith(f"{path}: {found}") and warning.endswith("the rates of the rungs are measured again")


@pytest.mark.parametrize("directory", ["a file", "relative"])
def test_a_start_does_without_the_file(
    directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file") if directory == "a file" else "relative")
    measure = Measure(rates_of(34e9, 64e9))
    assert known_rates(RUNGS, measure) == measure.rates and measure.calls == 1
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.startswith("the rates of the rungs cannot be kept, so that each start measures them: ")
    assert str(tmp_path / "file") in warning or "'relative'" in warning


def test_of_two_processes_the_first_to_write_decides() -> None:
    first, second = Measure(rates_of(34e9, 64e9)), Measure(rates_of(60e9, 64e9))

    def meanwhile(rungs: Sequence[str]) -> Rates:
        known_rates(rungs, first)
        return second(rungs)

    assert known_rates(RUNGS, meanwhile) == read_rates(RUNGS) == first.rates
    assert (first.calls, second.calls) == (1, 1)


def test_doctor_and_plan_show_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rung_rates, "candidates", list)
    assert rung_texts() == []
    monkeypatch.setattr(rung_rates, "candidates", lambda: RUNGS)
    assert rung_texts() == ["not measured yet: the first start of a model does that"]
    known_rates(RUNGS, Measure(rates_of(34e9, 64e9)))
    assert rung_texts()[0] == "bf16 on avx512: 64 GFLOP/s (avx512_bf16 34)"


# Agreement of the ranks


class Line:
    """The control channel between a rank 0 and one other rank."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def send(self, message: bytes) -> None:
        self.sent.append(message)

    def receive(self) -> bytes:
        return self.sent.pop(0)


@pytest.mark.usefixtures("restored")
@pytest.mark.skipif(not COMPILED, reason="plain torch has one rung")
def test_all_ranks_use_what_rank_0_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rates are those of this machine's rungs; the newest is made to look slow, if there are two."""
    newest, oldest = COMPILED[0], COMPILED[-1]
    rungs = list(dict.fromkeys([newest, oldest]))
    rates = {kind: {rung: [1e9 * (1 + index)] * ROUNDS for index, rung in enumerate(rungs)} for kind in KINDS}
    monkeypatch.setattr(rung_rates, "candidates", lambda: rungs)
    monkeypatch.setattr(rung_rates, "measure", Measure(rates))
    line, own = Line(), RankPlacement(0, (), (), (), 1, False, "")
    for rank in (0, 1):
        core.force_isa(newest)
        team: Any = SimpleNamespace(isa=newest, group=SimpleNamespace(rank=rank), channel=line)
        agreed_rungs.agree_on_rungs(team, own, spin=False)
        assert core.isa() == newest and core.rungs() == dict.fromkeys(KINDS, oldest)
    assert line.sent == []


@pytest.mark.usefixtures("restored")
def test_ranks_go_down_to_the_rung_that_all_have(caplog: pytest.LogCaptureFixture) -> None:
    if core.isa() == "reference":
        pytest.skip("there is no rung below plain torch")
    newest = core.isa()
    team: Any = SimpleNamespace(isa="reference", group=SimpleNamespace(rank=0), channel=Line())
    agreed_rungs.agree_on_rungs(team, RankPlacement(0, (), (), (), 1, False, ""), spin=False)
    assert core.isa() == "reference" and core.rungs() == {}
    assert f"rank 0 runs on reference instead of {newest}: another rank has no newer rung" in caplog.text
