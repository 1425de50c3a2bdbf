"""The plan of prefill ranks and decode ranks, which hold the model once each."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from command import DEMO

from tilerank.launch.bench.public import public_config
from tilerank.launch.commands import plan as command
from tilerank.launch.errors import LaunchError
from tilerank.launch.planning.groups import PREFILL_AND_DECODE
from tilerank.runtime.protocol.errors import EngineError


def planned(*options: object) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert command.run(parser.parse_args([*map(str, options), "--max-total-tokens", "3200"])) == 0


def test_both_groups_hold_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    """A cached token takes twice its bytes on prefill ranks, which have the memory between the groups."""
    reports: list[dict[str, Any]] = []
    for options in (("--tp", 3, "--prefill-nodes", 2), ("--tp", 2), ("--tp", 1)):
        planned(DEMO, *options, "--json")
        reports.append(json.loads(capsys.readouterr().out))
    both, two, one = reports
    prefill, decode = both["replicas"]
    assert both["names"] == ["prefill ranks", "decode ranks"]
    assert (prefill["tp"], decode["tp"]) == (2, 1)
    assert [rank["weights"] for rank in prefill["ranks"]] == [rank["weights"] for rank in two["ranks"]]
    assert [rank["cache_per_token"] for rank in prefill["ranks"]] == [2 * r["cache_per_token"] for r in two["ranks"]]
    assert decode["ranks"][0]["cache_per_token"] == one["ranks"][0]["cache_per_token"]
    assert both["need"] == two["need"] + one["need"] + 3200 * two["cache_per_token"]
    planned(DEMO, "--tp", 3, "--prefill-nodes", 2)
    page = capsys.readouterr().out
    assert f"Prefill ranks: {DEMO}: qwen3, " in page and f"Decode ranks: {DEMO}: qwen3, " in page
    assert "Half of the cache of prefill ranks is the memory through which they give pages to decode ranks." in page


def test_what_moves_beside_pages_does_so_through_as_much_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of the cache of media is that of sources, in a model with cross-attention."""
    for kind, name, more in (
        ("window_per_token", "gemma-3-1b", 2),
        ("state", "qwen3.5-9b", 2),
        ("media", "llama-3.2-11b-vision", 1.5),
    ):
        (tmp_path / "config.json").write_text(json.dumps(public_config(name)))
        planned(tmp_path, "--tp", 2, "--prefill-nodes", 1, "--nodes", 2, "--node-memory", 256, "--json")
        prefill, decode = json.loads(capsys.readouterr().out)["replicas"]
        assert prefill["ranks"][0][kind] == more * decode["ranks"][0][kind] > 0


def test_what_cannot_be_divided_is_refused() -> None:
    with pytest.raises(EngineError, match="expected a model that generates text, found one of type qwen3"):
        planned(DEMO, "--tp", 2, "--prefill-nodes", 1, "--task", "embed")
    with pytest.raises(LaunchError, match="expected fewer than the 2 ranks of --tp"):
        planned(DEMO, "--tp", 2, "--prefill-nodes", 2)
    with pytest.raises(LaunchError, match="--prefill-nodes 1 --dp auto: expected --tp N as well, found --tp auto"):
        planned(DEMO, "--prefill-nodes", 1, "--dp", "auto")


def test_replicas_of_two_groups(capsys: pytest.CaptureFixture[str]) -> None:
    """Each replica has the groups of one alone, and all together need the memory of all."""
    two, one = (("--tp", 3, "--prefill-nodes", 2, "--dp", dp, "--cores", "none") for dp in (2, 1))
    planned(DEMO, *one, "--json")
    alone = json.loads(capsys.readouterr().out)
    planned(DEMO, *two, "--json")
    both = json.loads(capsys.readouterr().out)
    assert (alone["dp"], both["dp"]) == (1, 2)
    assert both["names"] == [f"{role} of replica {number}" for number in (0, 1) for role in PREFILL_AND_DECODE]
    assert [plan["tp"] for plan in both["replicas"]] == [2, 1, 2, 1]
    weights = [[rank["weights"] for rank in plan["ranks"]] for plan in alone["replicas"]]
    assert [[rank["weights"] for rank in plan["ranks"]] for plan in both["replicas"]] == weights * 2
    assert both["need"] == 2 * alone["need"]
    planned(DEMO, *two)
    page = capsys.readouterr().out
    assert "Prefill ranks of replica 1: " in page and page.count("Half of the cache of prefill ranks") == 1
