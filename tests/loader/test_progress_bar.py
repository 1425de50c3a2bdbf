"""The bar and the log lines that show how much is loaded."""

import io
import logging
import sys
import time

import pytest

from tilerank.loader.progress_bar import ProgressBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """A clock that ticks `step` seconds a call."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def test_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(time, "monotonic", Clock(2.0))
    bar = ProgressBar(2_000_000_000, shown=True)
    bar.advance(500_000_000)
    bar.advance(1_500_000_000)
    bar.close()
    frames = [frame.removesuffix("\033[K") for frame in terminal.getvalue().removesuffix("\n").split("\r")[1:]]
    assert frames == [
        "loading [" + "#" * 7 + "." * 23 + "]  25% 0.50/2.00 GB 0.25 GB/s, 6 s left",
        "loading [" + "#" * 30 + "] 100% 2.00/2.00 GB 0.50 GB/s",
    ]


def test_lines_in_a_log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """One every ten seconds, and none for a model that is loaded sooner."""
    plain = io.StringIO()
    monkeypatch.setattr(sys, "stderr", plain)
    monkeypatch.setattr(time, "monotonic", Clock(4.0))
    with caplog.at_level(logging.INFO, "tilerank.loader.progress_bar"):
        bar = ProgressBar(10_000_000_000_000, shown=True)
        for _ in range(7):
            bar.advance(1_000_000_000)
        bar.close()
        ProgressBar(10, shown=True).advance(10)
    assert plain.getvalue() == ""
    assert [record.getMessage().split("]")[1] for record in caplog.records] == [
        "   0% 3.00/10000.00 GB 0.25 GB/s, 666 min left",
        "   0% 6.00/10000.00 GB 0.25 GB/s, 666 min left",
    ]


def test_other_ranks_show_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with caplog.at_level(logging.DEBUG, "tilerank.loader.progress_bar"):
        bar = ProgressBar(10, shown=False)
        bar.advance(10)
        bar.close()
    assert (terminal.getvalue(), caplog.records) == ("", [])
