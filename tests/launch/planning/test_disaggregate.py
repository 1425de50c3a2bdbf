"""`--disaggregate auto`: the number of prefill ranks with the highest predicted goodput, in `plan` and in `serve`."""

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from math import log
from pathlib import Path
from typing import Any

import msgspec
import pytest
from command import DEMO

from tilerank.launch.commands import plan, serve
from tilerank.launch.errors import LaunchError
from tilerank.launch.goodput.limits import Latency, Limits
from tilerank.launch.goodput.mix import Mix, RequestSize
from tilerank.launch.goodput.search import Trial
from tilerank.launch.planning.prediction.machine import Exchange, Machine, Shares, write_machine
from tilerank.launch.planning.prediction.predict import PredictedGoodput
from tilerank.launch.planning.prediction.rank_splits import Choice, RankSplit
from tilerank.launch.ranks.disaggregation import check_arguments, refuse_disaggregate
from tilerank.launch.ranks.rendezvous import Identity
from tilerank.launch.ranks.start import HostRanks
from tilerank.runtime.protocol.errors import EngineError

FULL = [(1.0, 1.0)]
SHARES = Shares("by hand", {"bf16": FULL}, {"bfloat16": FULL}, 1e9, step_us=5000, sequence_us=0, layer_us=0)
# A node computes the 14.2e9 operations of a prompt of 1,000 tokens of the demo model in 0.2 s, and reads in no time.
MACHINE = Machine("by hand", "by hand", 2, 10, 8, 1e9, 1e9, 0.071, 1, SHARES, between_nodes=Exchange(1e-3, 1e9))
PROMPT_S = 0.2
STEP_S = 0.005
ANSWER = 11
MIX = Mix("a mix", [RequestSize(8, 4)])


def serve_arguments(*words: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    argv = [str(DEMO), *map(str, words)]
    args = parser.parse_args(argv)
    args.argv, args.command = ["serve", *argv], "serve"
    return args


@pytest.fixture
def files(tmp_path: Path) -> list[object]:
    """The options that name the machine, and a mix of equal requests."""
    write_machine(tmp_path / "machine.yaml", MACHINE)
    (tmp_path / "mix.jsonl").write_text(json.dumps({"prompt_tokens": 1000, "new_tokens": ANSWER}))
    return ["--machine", tmp_path / "machine.yaml", "--mix", tmp_path / "mix.jsonl"]


def planned(*words: object) -> int:
    parser = argparse.ArgumentParser()
    plan.add_arguments(parser)
    return plan.run(parser.parse_args([str(DEMO), *map(str, words)]))


def report_of(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    planned(*words, "--json")
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_choice_follows_the_limits(files: list[object], capsys: pytest.CaptureFixture[str]) -> None:
    """A prompt takes one node 0.2 s, and two nodes half of that.

    Together, a prompt that arrives in the ten steps of an answer makes them 15 ms instead of 5 ms long on average, so
    that at most 1 % of the answers may meet one within 9 ms. Apart, none does, and a queue for prompts of 0.2 s keeps
    2 s at half of its capacity. No first token comes within 190 ms where one node computes the prompt.
    """
    patient = ("--slo", "ttft=2s,tpot=9ms")
    report = report_of(capsys, "--tp", 2, *files, *patient, "--disaggregate", "auto")
    together, apart = report["prediction"]["splits"]
    assert (together["prefill_nodes"], apart["prefill_nodes"]) == (0, 1)
    assert (together["goodput_requests_per_s"] or 0.0) < 2 * -log(0.99) / (10 * STEP_S)
    assert 0.5 / PROMPT_S < apart["goodput_requests_per_s"] < 1 / PROMPT_S
    assert report["names"] == ["prefill ranks", "decode ranks"]
    given = report_of(capsys, "--tp", 2, *files, *patient, "--prefill-nodes", 1)["prediction"]
    assert report["prediction"] == given | {"splits": [together, apart]}

    assert planned("--tp", 2, *files, "--slo", "ttft=190ms,tpot=90ms", "--disaggregate", "auto") == 0
    page = capsys.readouterr().out
    assert re.search(r"^2 ranks for both +0?\.?\d+ requests/s +\d", page, re.M)
    assert re.search(r"^1 for prompts and 1 to generate +none$", page, re.M)
    assert "Chosen: all ranks together." in page and "Prefill ranks: " not in page


def split(prefill: int, rate: float | None) -> RankSplit:
    """Return a split of three ranks with this goodput, None if it does not fit."""
    if rate is None:
        return RankSplit(prefill, 3, None)
    trial = Trial(rate, 100, Latency(0.1, 0.01), holds=rate > 0, tokens_per_s=128 * rate)
    return RankSplit(prefill, 3, PredictedGoodput(MIX, Limits(2.0, 0.1), [trial]))


@pytest.mark.parametrize(
    ("rates", "chosen"),
    [
        ((1.0, 1.04, 0.5), 0),  # the search finds a rate to 5 %
        ((1.0, 1.06, 1.2), 2),
        ((1.0, 1.2, None), 1),
        ((0.0, 0.0, 0.1), 2),
        ((0.0, 0.0, None), 0),
        ((1.0,), 0),
    ],
)
def test_ranks_are_apart_if_that_is_better_than_the_search_is_precise(
    rates: tuple[float | None, ...], chosen: int
) -> None:
    choice = Choice(MACHINE, [split(prefill, rate) for prefill, rate in enumerate(rates)])
    assert choice.chosen.prefill == chosen


def test_the_line_of_the_log() -> None:
    choice = Choice(MACHINE, [split(0, 1.5), split(1, 2.25), split(2, None)])
    assert choice.text() == (
        "--disaggregate auto: --prefill-nodes 1; predicted goodput on by hand: 3 ranks for both: 1.5 requests/s; "
        "1 for prompts and 2 to generate: 2.25 requests/s; 2 for prompts and 1 to generate: does not fit "
        "(a mix: 8 prompt tokens (at most 8), 4 new tokens (at most 4); first token within 2000 ms, each token after "
        "it within 100 ms, for 99 % of the requests)"
    )


def test_groups_that_do_not_fit_are_not_chosen(files: list[object], capsys: pytest.CaptureFixture[str]) -> None:
    """A token takes 3 KiB, and three times as much with a prefill and a decode rank: 10 and 30 GB of 17."""
    limits = ("--slo", "ttft=2s,tpot=9ms", "--max-total-tokens", 3_200_000)
    report = report_of(capsys, "--tp", 2, *files, *limits, "--disaggregate", "auto")
    assert [split["fits"] for split in report["prediction"]["splits"]] == [True, False]
    assert report["prediction"]["prefill_nodes"] == 0


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--prefill-nodes", 1), "chooses the number of prefill ranks: expected no --prefill-nodes with it, found 1"),
        (("--dp", 2), "--disaggregate auto is for one replica, found --dp 2"),
        (
            (),
            "--disaggregate auto needs --machine, whose file `tilerank doctor --machine FILE.yaml` writes, found none",
        ),
        (("--machine", "none.yaml"), "--machine none.yaml: expected a file or one of"),
        (("--machine", "2x-xeon-6980p", "--task", "embed"), "expected a model that generates text"),
    ],
)
def test_options_that_do_not_go_with_it(options: tuple[object, ...], expected: str) -> None:
    with pytest.raises((LaunchError, EngineError), match=expected):
        planned("--tp", 2, "--disaggregate", "auto", *options)


@pytest.mark.parametrize(("option", "value"), [("--slo", "ttft=1s,tpot=1s"), ("--mix", "mlperf-llama-3.1-8b")])
def test_goodput_is_predicted_for_a_machine_alone(option: str, value: str) -> None:
    with pytest.raises(LaunchError, match=f"{option}: expected --machine with it, found none"):
        planned(option, value)


def test_prefill_ranks_on_several_hosts_are_not_predicted(tmp_path: Path) -> None:
    hosts = msgspec.structs.replace(MACHINE, hosts=2, between_hosts=Exchange(1.0, 1.0))
    write_machine(tmp_path / "machine.yaml", hosts)
    for options in (("--prefill-nodes", 1), ("--disaggregate", "auto")):
        with pytest.raises(LaunchError, match="by hand: expected one host for a prediction of prefill ranks, found 2"):
            planned("--tp", 4, "--machine", tmp_path / "machine.yaml", *options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--machine", "2x-xeon-6980p"), "--machine: expected --disaggregate auto with it, found none"),
        (("--slo", "ttft=1s,tpot=1s"), "--slo: expected --disaggregate auto with it, found none"),
        (("--disaggregate", "auto"), "--disaggregate auto needs --machine"),
        (
            ("--disaggregate", "auto", "--machine", "2x-xeon-6980p", "--nnodes", 2),
            "--disaggregate auto is for ranks of one host, found --nnodes 2",
        ),
    ],
)
def test_options_of_serve(options: tuple[object, ...], expected: str) -> None:
    with pytest.raises(LaunchError, match=expected):
        check_arguments(serve_arguments(*options))


def test_another_launcher_is_refused() -> None:
    args = serve_arguments("--disaggregate", "auto", "--machine", "2x-xeon-6980p")
    refuse_disaggregate(args, Identity("tilerank"))
    with pytest.raises(LaunchError, match="--disaggregate auto is for ranks of one host that this command starts"):
        refuse_disaggregate(args, Identity("torchrun"))


def test_a_server_starts_the_groups_that_are_chosen(
    files: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each rank has a core, which is a node of the machine."""
    started: list[Sequence[HostRanks]] = []

    def supervise(_: argparse.Namespace, job: object, groups: Sequence[HostRanks]) -> int:
        started.append(groups)
        return 0

    monkeypatch.setattr(serve, "_supervise", supervise)
    monkeypatch.setattr(sys, "stdout", sys.stderr)  # as `serve` sets it
    write_machine(tmp_path / "machine.yaml", msgspec.structs.replace(MACHINE, cores=1))
    cores = "|".join(map(str, sorted(os.sched_getaffinity(0))[:2]))
    where = ("--tp", 2, "--cores", cores, "--max-total-tokens", 3200, "--port", 0)
    args = serve_arguments(*files, "--slo", "ttft=2s,tpot=9ms", "--disaggregate", "auto", *where)
    assert serve.run(args) == 0
    assert [[len(group.here) for group in groups] for groups in started] == [[1, 1]]
    assert args.argv[-1] == "--prefill-nodes=1"  # for the HTTP process
    assert "tilerank: --disaggregate auto: --prefill-nodes 1; predicted goodput on by hand: " in capsys.readouterr().err
