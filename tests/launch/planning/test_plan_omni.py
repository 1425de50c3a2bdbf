"""How Qwen3-Omni-30B is cut over numbers of ranks that do not divide it."""

import json
from pathlib import Path
from typing import Any

import pytest
from fake_sysfs import SNC3, Machine
from planning import by_name, plan_on

from tilerank.launch.bench.public import public_config
from tilerank.launch.planning.plan_types import Plan
from tilerank.loader.card import read_card

CONFIG = public_config("qwen3-omni-30b-a3b-instruct")


def plan_of(tmp_path: Path, config: dict[str, Any], tp: int) -> Plan:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return plan_on(Machine(SNC3), tmp_path, read_card(tmp_path), tp)


@pytest.mark.parametrize(("tp", "heads"), [(3, [7, 7, 6]), (6, [4, 4, 4, 4, 4, 0])])
def test_no_rank_holds_the_audio_tower_of_another(tmp_path: Path, tp: int, heads: list[int]) -> None:
    """20 heads are padded with zeros; a width of 5,120 is 160 tiles, of which each rank has its own."""
    cuts = by_name(plan_of(tmp_path, CONFIG, tp))
    spans = cuts["audio heads"].spans
    assert [span.real for span in spans] == heads and {span.size for span in spans} == {max(heads)}
    for name, total in (("audio MLP width", 5120), ("audio projection width", 1280), ("audio channels", 480)):
        spans = cuts[name].spans
        assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])] and spans[-1].stop == total
        assert max(span.size for span in spans) <= 32 * -(-total // (32 * tp))


def test_the_audio_tower_of_all_ranks_is_little_more_than_that_of_one(tmp_path: Path) -> None:
    """In bytes: its MLPs once, the matrices of its attention for padded heads, and vectors on every rank."""
    deaf = json.loads(json.dumps(CONFIG))
    deaf["thinker_config"]["audio_config"]["encoder_layers"] = 1
    mlp, attention, vectors = 2 * 1280 * 5120, 4 * 1280 * 1280, 6 * 1280
    biases = 5120 + 3 * 1280
    for tp, heads in ((1, 20), (3, 21), (6, 24)):
        found = plan_of(tmp_path, CONFIG, tp).memory.weights - plan_of(tmp_path, deaf, tp).memory.weights
        assert found <= 2 * 31 * (mlp + heads * attention // 20 + tp * vectors + heads * biases // 20)
        assert found >= 2 * 31 * (mlp + heads * attention // 20)
