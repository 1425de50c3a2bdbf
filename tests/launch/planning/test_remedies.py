"""A refusal for want of memory names the option with which the model fits."""

import json
from pathlib import Path
from typing import Any

from fake_sysfs import GIB, sockets
from planning import PARAMETERS, ROPE, config_of

from tilerank.launch.bench.public import public_config
from tilerank.launch.host.placement import place
from tilerank.launch.host.topology import read_topology
from tilerank.launch.options.model import ModelOptions
from tilerank.launch.planning.plan import plan_model
from tilerank.launch.planning.plan_types import RANK_OVERHEAD, Plan
from tilerank.launch.planning.remedies import plan_with_remedy
from tilerank.loader.card import ModelCard, read_card

WEIGHTS = 2 * (PARAMETERS + ROPE)
TOKEN = 48 * 2 * 4 * 128 * 2  # bytes in the KV cache


def plan_in(tmp_path: Path, free: float, card: ModelCard, **options: Any) -> Plan:
    """Return the plan of one rank on a node of which `free` bytes, a half, are free."""
    machine = sockets(1, 8)
    machine.memory = {0: int(2 * free)}
    topology = read_topology(machine.write(tmp_path / "machine"))
    placement = place(topology, 1)

    def planner(card: ModelCard, options: ModelOptions) -> Plan:
        return plan_model(card, 1, options, model="models/it", topology=topology, placement=placement)

    return plan_with_remedy(card, ModelOptions(**options), planner)


def remedy(plan: Plan) -> str | None:
    refusal = plan.refusal()
    assert refusal is not None
    _, fits, option = refusal.rpartition("; it fits with ")
    return option if fits else None


def test_a_smaller_cache(tmp_path: Path) -> None:
    free = WEIGHTS + RANK_OVERHEAD + 1000 * TOKEN
    plan = plan_in(tmp_path, free, config_of(tmp_path), cached_tokens=20000)
    assert remedy(plan) == "--max-total-tokens 992"  # whole pages of 32


def test_less_memory_for_media(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(public_config("qwen3-vl-2b")))
    card = read_card(tmp_path)
    free = plan_in(tmp_path, 30 * GIB, card, cached_tokens=0).memory.weights + RANK_OVERHEAD + 0.6 * GIB
    assert remedy(plan_in(tmp_path, free, card, mm_cache_bytes=2 * GIB)) == "--mm-cache-gib 0.5"
    assert plan_in(tmp_path, free, card, mm_cache_bytes=GIB // 2).refusal() is None


def test_a_shorter_context(tmp_path: Path) -> None:
    """The cosines and sines of 16 million positions take 4 GiB."""
    card = config_of(tmp_path, max_position_embeddings=1 << 24)
    assert remedy(plan_in(tmp_path, WEIGHTS + RANK_OVERHEAD + GIB, card)) == "--max-model-len 32768"


def test_a_larger_fraction_of_the_memory(tmp_path: Path) -> None:
    plan = plan_in(tmp_path, WEIGHTS + RANK_OVERHEAD + GIB, config_of(tmp_path), mem_fraction=0.3)
    assert remedy(plan) == "--mem-fraction-static 0.9"


def test_smaller_formats(tmp_path: Path) -> None:
    card = config_of(tmp_path)
    assert remedy(plan_in(tmp_path, 0.9 * WEIGHTS, card)) == "--quantization int8"
    assert remedy(plan_in(tmp_path, 0.45 * WEIGHTS, card)) == "--quantization int4"
    assert remedy(plan_in(tmp_path, 1.5 * WEIGHTS, card, dtype="float32")) == "--dtype bfloat16"
    card = config_of(tmp_path, max_position_embeddings=4096)
    free = 2 * (PARAMETERS + 4096 * 128) + RANK_OVERHEAD + 31 * TOKEN  # no room for a page of 32 tokens
    assert remedy(plan_in(tmp_path, free, card)) == "--kv-cache-dtype int8"


def test_without_the_weights_of_speech(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(public_config("qwen3-omni-30b-a3b-instruct")))
    card = read_card(tmp_path)
    whole = plan_in(tmp_path, 200 * GIB, card, cached_tokens=0)
    free = whole.memory.weights - sum(rank.speaker for rank in whole.ranks) + RANK_OVERHEAD + GIB
    assert remedy(plan_in(tmp_path, free, card)) == "--no-talker"


def test_nothing_helps(tmp_path: Path) -> None:
    assert remedy(plan_in(tmp_path, GIB, config_of(tmp_path))) is None
