"""The plan of a known model on invented machines, against arithmetic by hand."""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_sysfs import GIB, SNC3, Machine, sockets
from planning import DEMO, NORMS, PARAMETERS, ROPE, by_name, config_of, plan_on

from tilerank.launch.commands import plan as command
from tilerank.launch.host.placement import divide_placement, place
from tilerank.launch.host.topology import read_topology
from tilerank.launch.options.model import ModelOptions
from tilerank.launch.planning.plan import plan_model, without_held_weights
from tilerank.launch.planning.plan_text import as_json, render, render_replicas, replicas_as_json
from tilerank.launch.planning.plan_types import RANK_OVERHEAD, ReplicaPlans
from tilerank.launch.text import size
from tilerank.loader.card import ModelCard, read_card


def test_one_rank_has_everything(tmp_path: Path) -> None:
    """bf16, all sizes multiples of a tile: two bytes a parameter, K and V of 4 heads a token and layer."""
    plan = plan_on(sockets(1, 8), tmp_path, config_of(tmp_path), 1)
    assert plan.parameters == PARAMETERS
    assert plan.memory.weights == 2 * (PARAMETERS + ROPE)
    assert plan.memory.cache_per_token == 48 * 2 * 4 * 128 * 2
    assert all(dimension.waste == 0 for dimension in plan.dimensions)
    assert (plan.dtype, plan.num_layers) == ("bfloat16", 48)


def test_fp32_is_twice_as_much(tmp_path: Path) -> None:
    plan = plan_on(sockets(1, 8), tmp_path, config_of(tmp_path), 1, dtype="float32")
    assert (plan.memory.weights, plan.memory.cache_per_token) == (4 * (PARAMETERS + ROPE), 48 * 2 * 4 * 128 * 4)


def test_six_nodes(tmp_path: Path) -> None:
    """The published figures for 32 query and 4 KV heads over 6 ranks: 1.17 split, 1.50 padded."""
    plan = plan_on(Machine(SNC3), tmp_path, config_of(tmp_path), 6)
    assert plan.attention is not None
    assert plan.attention.strategy == "split"
    assert plan.attention.waste == pytest.approx(7 / 6 - 1)
    assert plan.attention.other_waste == pytest.approx(0.5)
    cuts = by_name(plan)
    assert [span.size for span in cuts["query heads"].spans] == [5, 5, 6, 5, 5, 6]
    assert cuts["query heads"].waste == pytest.approx(6 * 6 / 32 - 1)
    assert [span.size for span in cuts["KV heads"].spans] == [1, 2, 1, 1, 2, 1]
    assert [span.size for span in cuts["MLP width"].spans] == [1024] * 6
    assert [span.size for span in cuts["vocabulary"].spans] == [25344, 25344, 25312, 25312, 25312, 25312]
    assert [node.ranks for node in plan.nodes] == [(rank,) for rank in range(6)]
    assert [node.weights for node in plan.nodes] == [rank.weights for rank in plan.ranks]
    # Every KV head is held twice; norms are whole on every rank; the head is as high as its highest part.
    doubled = 48 * 4 * (2 * 128 * 2048)
    head = (25344 * 6 - 151936) * 2048
    assert plan.memory.weights == 2 * (PARAMETERS + doubled + 5 * NORMS + head + 6 * ROPE)


def test_padding_when_asked(tmp_path: Path) -> None:
    plan = plan_on(Machine(SNC3), tmp_path, config_of(tmp_path), 6, strategy="pad")
    assert plan.attention is not None
    assert plan.attention.strategy == "pad" and plan.attention.waste == pytest.approx(0.5)
    assert by_name(plan)["KV heads"].waste == pytest.approx(0.5)
    assert len({rank.weights for rank in plan.ranks}) == 1


def test_cached_tokens_change_the_choice(tmp_path: Path) -> None:
    """At 64 k cached tokens both strategies read 50 % too much, and ties go to padding."""
    plan = plan_on(Machine(SNC3), tmp_path, config_of(tmp_path), 6, cached_tokens=64 * 1024)
    assert plan.attention is not None
    assert plan.attention.strategy == "pad"
    assert plan.need == plan.memory.weights + 64 * 1024 * plan.memory.cache_per_token + 6 * RANK_OVERHEAD


@pytest.mark.parametrize(
    ("published", "asked", "expected"),
    [
        ("bfloat16", "auto", "bfloat16"),
        ("float16", "auto", "bfloat16"),
        ("float32", "auto", "float32"),
        ("float32", "bfloat16", "bfloat16"),
        ("bfloat16", "float32", "float32"),
    ],
)
def test_dtype(tmp_path: Path, published: str, asked: str, expected: str) -> None:
    assert (
        plan_on(sockets(1, 8), tmp_path, config_of(tmp_path, torch_dtype=published), 1, dtype=asked).dtype == expected
    )


def test_ranks_over_several_nodes_share_their_memory(tmp_path: Path) -> None:
    """Two ranks on four equal nodes: half of each rank's bytes on each of its nodes."""
    plan = plan_on(Machine([(0, 4), (0, 4), (1, 4), (1, 4)]), tmp_path, config_of(tmp_path), 2)
    assert [node.ranks for node in plan.nodes] == [(0,), (0,), (1,), (1,)]
    assert plan.nodes[0].weights == plan.ranks[0].weights // 2
    assert plan.nodes[3].cache_per_token == plan.ranks[1].cache_per_token / 2


def test_unbound_ranks_may_lie_anywhere(tmp_path: Path) -> None:
    plan = plan_on(sockets(2, 4), tmp_path, config_of(tmp_path), 2, cores="none")
    assert [node.ranks for node in plan.nodes] == [(0, 1), (0, 1)]
    assert "any node" in render(plan)


def test_node_without_cores_takes_nothing(tmp_path: Path) -> None:
    plan = plan_on(Machine([(0, 4), (0, 0)]), tmp_path, config_of(tmp_path), 1)
    assert (plan.nodes[1].ranks, plan.nodes[1].weights) == ((), 0)


def test_too_little_memory_is_refused_with_numbers(tmp_path: Path) -> None:
    """Half of the invented memory is free: 2 x 3 GiB for 6.2 GiB of weights."""
    machine = sockets(2, 4)
    machine.memory = {0: 6 * GIB, 1: 6 * GIB}
    config = config_of(tmp_path)
    plan = plan_on(machine, tmp_path, config, 2)
    assert plan.refusal() == (
        "models/it: not enough memory for 2 ranks: 6.24 GiB of bfloat16 weights, 600 MiB for the processes, "
        "6.83 GiB together, but this host has 6.00 GiB"
    )
    assert "Does not fit: models/it: not enough memory" in render(plan)
    with_cache = plan_on(machine, tmp_path, config, 2, cached_tokens=20000).refusal()
    assert with_cache is not None
    assert "1.83 GiB of KV cache for 20,000 tokens, " in with_cache


def test_control_group_limit_counts(tmp_path: Path) -> None:
    machine = sockets(2, 4)
    machine.cgroup = {
        "sys/fs/cgroup/memory.max": str(5 * GIB),
        "sys/fs/cgroup/memory.current": str(GIB),
        "sys/fs/cgroup/memory.stat": "inactive_file 0",
    }
    plan = plan_on(machine, tmp_path, config_of(tmp_path), 2)
    assert plan.available == 4 * GIB
    refusal = plan.refusal()
    assert refusal is not None
    assert refusal.endswith("but the control group allows 4.00 GiB")


def test_one_node_too_small_is_a_note(tmp_path: Path) -> None:
    """The memory policy is preferred, not strict: what a node cannot hold goes to another one."""
    machine = sockets(2, 4)
    machine.memory = {0: 4 * GIB}
    plan = plan_on(machine, tmp_path, config_of(tmp_path), 2)
    assert plan.refusal() is None
    assert plan.token_room == 0
    assert "Note: node 0 has too little memory: a part will lie on other nodes and be slower." in render(plan)


def test_room_for_tokens(tmp_path: Path) -> None:
    plan = plan_on(sockets(2, 4), tmp_path, config_of(tmp_path), 2)
    free = 32 * GIB - plan.ranks[0].weights - RANK_OVERHEAD
    assert plan.token_room == free // plan.ranks[0].cache_per_token


def test_one_of_several_hosts(tmp_path: Path) -> None:
    """Ranks 3 to 5 of 6 run here."""
    topology = read_topology(sockets(1, 6).write(tmp_path / "machine"))
    everything = plan_on(Machine(SNC3), tmp_path / "all", config_of(tmp_path), 6)
    plan = plan_model(
        config_of(tmp_path),
        6,
        ModelOptions(cached_tokens=0),
        model="it",
        topology=topology,
        placement=place(topology, 3),
        here=range(3, 6),
    )
    assert [rank.weights for rank in plan.ranks] == [rank.weights for rank in everything.ranks[3:]]
    assert plan.dimensions == everything.dimensions
    assert plan.nodes[0].overhead == 3 * RANK_OVERHEAD


def test_ranks_beyond_the_units_of_a_width_get_none(tmp_path: Path) -> None:
    """A width of 704 is 22 units of 32 columns."""
    plan = plan_on(sockets(1, 4), tmp_path, read_card(DEMO), 24, cores="none")
    assert [span.size for span in by_name(plan)["MLP width"].spans] == [32] * 22 + [0, 0]
    assert "rank 23        1 zero     1 zero        none    3936-4095" in render(plan)


DEMO_PAGE = """\
models/it: qwen3, 6 layers, 6.3 million parameters, bfloat16, 19.06 bits a weight, 3 ranks

         query heads   KV heads   MLP width   vocabulary
total              8          2         704         4096
units              8          2     22 x 32     128 x 32
rank 0           0-2          0       0-255       0-1375
rank 1           3-4        0-1     256-479    1376-2751
rank 2           5-7          1     480-703    2752-4095
waste         12.5 %    200.0 %       9.1 %        0.8 %

Strategy split: query heads are split unevenly, and a KV head on a border is held by both neighbours.
Slowest rank against a perfect cut, 0 tokens cached: +20.0 % with split, +50.0 % with pad.
"""


def test_page(tmp_path: Path) -> None:
    plan = plan_on(sockets(3, 4), tmp_path, read_card(DEMO), 3)
    page = render(plan)
    assert page.startswith(DEMO_PAGE)
    assert "rank 1   4.65 MiB       3.00 KiB   node 1   4 cores of node 1: CPUs 4-7" in page.splitlines()
    assert max(map(len, page.splitlines())) <= 120
    assert "KV cache of 0 tokens, 0 B, as asked; there is room for " in page


def test_page_of_zeros(tmp_path: Path) -> None:
    page = render(plan_on(sockets(3, 4), tmp_path, read_card(DEMO), 3, strategy="pad", cached_tokens=1000))
    assert "rank 2        4 zero     1 zero   512-703 + 64 zero   2752-4095 + 32 zero" in page
    assert "Slowest rank against a perfect cut, 1,000 tokens cached: +50.0 % with pad, +50.0 % with split." in page


def test_page_of_an_even_cut(tmp_path: Path) -> None:
    assert "Heads divide evenly over the ranks." in render(plan_on(sockets(2, 4), tmp_path, read_card(DEMO), 2))


def test_json_says_the_same(tmp_path: Path) -> None:
    plan = plan_on(Machine(SNC3), tmp_path, config_of(tmp_path), 6)
    read = json.loads(json.dumps(as_json(plan)))
    assert read["parameters"] == PARAMETERS
    assert read["dimensions"][1]["spans"][1] == {"start": 0, "stop": 2, "size": 2}
    assert read["need"] == plan.need
    assert read["refusal"] is None


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (300 << 20, "300 MiB"), (12.25 * GIB, "12.2 GiB")],
)
def test_size(nbytes: float, text: str) -> None:
    assert size(nbytes) == text


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert command.run(parser.parse_args([str(DEMO), "--tp", "3", "--json"])) == 0
    assert json.loads(capsys.readouterr().out)["tp"] == 3
    assert command.run(parser.parse_args([str(DEMO)])) == 0
    assert "rank 0" in capsys.readouterr().out


def replicas_on(machine: Machine, root: Path, card: ModelCard, tp: int, dp: int, **options: Any) -> ReplicaPlans:
    topology = read_topology(machine.write(root / "machine"))
    parts = divide_placement(place(topology, tp * dp), [tp] * dp)
    given = ModelOptions(**options)
    plans = (plan_model(card, tp, given, model="models/it", topology=topology, placement=part) for part in parts)
    return ReplicaPlans(tuple(plans))


def test_replicas_of_two_ranks_each(tmp_path: Path) -> None:
    """Four nodes: each rank of each replica has one, with 32 GiB free, and the model takes 6.24 GiB of each pair."""
    replicas = replicas_on(Machine([(0, 4)] * 4), tmp_path, config_of(tmp_path), 2, 2, cached_tokens=1000)
    first, second = replicas.plans
    assert [node.ranks for node in first.nodes] == [(0,), (1,), (), ()]
    assert [node.ranks for node in second.nodes] == [(), (), (0,), (1,)]
    assert replicas.need == first.need + second.need == 2 * first.need
    assert replicas.node_need(2) == second.ranks[0].weights + RANK_OVERHEAD + 1000 * second.ranks[0].cache_per_token
    assert replicas.refusal() is None
    page = render_replicas(replicas)
    assert "bfloat16, 16.05 bits a weight, 2 ranks in each of 2 replicas" in page
    assert page.count("KV cache of 1,000 tokens, ") == 2
    assert [line.split()[:2] for line in page.splitlines() if line.startswith("Replica")] == [
        ["Replica", "0:"],
        ["Replica", "1:"],
    ]
    assert "rank 1   3.12 GiB       48.0 KiB   46.9 MiB   node 3   4 cores of node 3: CPUs 12-15" in page
    assert "node 3          1   3.12 GiB   46.9 MiB   32.0 GiB   10.8 %" in page
    assert json.loads(json.dumps(replicas_as_json(replicas)))["replicas"][1]["tp"] == 2


def test_replicas_that_fit_one_by_one_and_not_together(tmp_path: Path) -> None:
    """Two replicas on one node of 20 GiB, half of which is free: each takes 6.5 GiB."""
    machine = sockets(1, 8)
    machine.memory = {0: 20 * GIB}
    replicas = replicas_on(machine, tmp_path, config_of(tmp_path), 1, 2, cached_tokens=0)
    assert all(plan.refusal() is None for plan in replicas.plans)
    assert replicas.refusal() == ("models/it: not enough memory for 2 replicas: 13.0 GiB needed, 10.0 GiB available")
    assert "Does not fit: models/it: not enough memory for 2 replicas" in render_replicas(replicas)


def test_command_with_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert command.run(parser.parse_args([str(DEMO), "--tp", "1", "--dp", "2", "--max-total-tokens", "64"])) == 0
    assert "1 rank in each of 2 replicas" in capsys.readouterr().out
    assert command.run(parser.parse_args([str(DEMO), "--tp", "1", "--dp", "2", "--cached-tokens", "64", "--json"])) == 0
    assert json.loads(capsys.readouterr().out)["dp"] == 2


def test_arguments_are_read_without_torch() -> None:
    code = "import sys, tilerank.launch.commands.plan; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_weights_in_memory_files_count_once(tmp_path: Path) -> None:
    """On each of two nodes, a rank of the last start has left 1 GiB, which its successor finds."""
    machine = sockets(2, 8)
    machine.memory = {0: 4 * GIB, 1: 4 * GIB}
    machine.cgroup = {
        "sys/fs/cgroup/memory.max": str(8 * GIB),
        "sys/fs/cgroup/memory.current": str(3 * GIB),
        "sys/fs/cgroup/memory.stat": "inactive_file 0",
    }
    topology = read_topology(machine.write(tmp_path))
    found = without_held_weights(topology, place(topology, 2), [GIB, GIB])
    assert [node.memory_free for node in found.nodes] == [2 * GIB + GIB, 2 * GIB + GIB]
    assert found.limits.memory_available == 8 * GIB - 3 * GIB + 2 * GIB
    wide = without_held_weights(topology, place(topology, 1), [GIB])
    assert [node.memory_free for node in wide.nodes] == [2 * GIB + GIB // 2] * 2, "one rank on both nodes"
    assert without_held_weights(topology, place(topology, 2), []) == topology
