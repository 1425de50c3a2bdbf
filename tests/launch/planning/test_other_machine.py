"""`tilerank plan --nodes N --node-memory GIB`: a plan for another machine, from config.json alone."""

import argparse
import json
from pathlib import Path

import pytest
from planning import HEADS_32_4, config_of

from tilerank.launch.commands import plan as command
from tilerank.launch.errors import LaunchError
from tilerank.launch.planning.other_machine import described_machine

GIB = 1 << 30


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(words)


def test_a_model_of_more_than_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """70 layers of 4 GiB, which six nodes of 128 GiB hold, one rank on each."""
    config = HEADS_32_4 | {"hidden_size": 16384, "num_attention_heads": 128, "num_hidden_layers": 70}
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 32768}))
    words = (str(tmp_path), "--nodes", "6", "--node-memory", "128")
    assert command.run(parse(*words, "--json")) == 0
    plan = json.loads(capsys.readouterr().out)
    weights = 2 * (70 * (16384 * 128 * (2 * 128 + 2 * 4) + 3 * 16384 * 32768) + 2 * 151936 * 16384)
    assert weights > 280 * GIB and plan["weights"] == pytest.approx(weights, rel=0.01)
    assert (plan["tp"], plan["available"], plan["refusal"]) == (6, 6 * 128 * GIB, None)
    assert [node["ranks"] for node in plan["nodes"]] == [[rank] for rank in range(6)]
    assert [rank["placement"]["cores"] for rank in plan["ranks"]] == [[]] * 6
    assert command.run(parse(*words)) == 0
    page = capsys.readouterr().out
    assert "node 5   cores not known" in page and "CPUs" not in page
    assert command.run(parse(str(tmp_path), "--nodes", "2", "--node-memory", "128")) == 1
    assert "not enough memory for 2 ranks" in capsys.readouterr().out


@pytest.mark.parametrize(("tp", "homes"), [(3, [[0], [0], [1], [1], [2], [2]]), (12, [[0, 1], [2, 3]])])
def test_ranks_are_placed_on_whole_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tp: int, homes: list[list[int]]
) -> None:
    config_of(tmp_path)
    assert command.run(parse(str(tmp_path), "--nodes", "6", "--node-memory", "32", "--tp", str(tp), "--json")) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [node["ranks"] for node in plan["nodes"]][: len(homes)] == homes


def test_replicas_share_the_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config_of(tmp_path)
    assert command.run(parse(str(tmp_path), "--nodes", "6", "--node-memory", "32", "--dp", "auto", "--json")) == 0
    assert json.loads(capsys.readouterr().out)["dp"] == 6


@pytest.mark.parametrize("words", [("--nodes", "6"), ("--node-memory", "128"), ("--nodes", "6", "--node-memory", "0")])
def test_both_figures_are_needed(tmp_path: Path, words: tuple[str, ...]) -> None:
    with pytest.raises(LaunchError, match="--nodes and --node-memory describe a machine together"):
        command.run(parse(str(tmp_path), *words))


def test_cores_are_those_of_this_machine(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="--cores 0-3 names cores of this machine, but --nodes plans for another one"):
        command.run(parse(str(tmp_path), "--nodes", "2", "--node-memory", "8", "--cores", "0-3"))


def test_nothing_described_is_this_machine() -> None:
    assert described_machine(None, None) is None
