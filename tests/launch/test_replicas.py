"""How hosts are divided into replicas, on simulated machines."""

import argparse
import math
from pathlib import Path

import pytest
from command import DEMO
from fake_sysfs import GIB, SNC3, Machine, sockets

from tilerank.launch.commands import serve
from tilerank.launch.host.placement import divide_placement, place
from tilerank.launch.host.topology import read_topology
from tilerank.launch.planning.replicas import ModelBytes, divide


def never() -> ModelBytes:
    raise AssertionError("the model's size does not matter here")


@pytest.mark.parametrize(
    ("tp", "dp", "expected"),
    [
        (2, 2, (2, 2)),
        (None, 2, (3, 2)),
        (None, 4, (1, 4)),
        (None, 9, (1, 9)),
        (2, None, (2, 3)),
        (4, None, (4, 1)),
        (7, None, (7, 1)),
    ],
)
def test_what_was_asked_for_is_kept(tmp_path: Path, tp: int | None, dp: int | None, expected: tuple[int, int]) -> None:
    division = divide(read_topology(Machine(SNC3).write(tmp_path)), tp, dp, never)
    assert (division.tp, division.dp) == expected
    assert (division.reason is None) == (None not in (tp, dp))


@pytest.mark.parametrize(
    ("weights", "token", "memory", "expected", "says"),
    [
        (1, 1, 64, (1, 6), "6 NUMA nodes, 1 for each replica, which read 1.00 GiB each for a token"),
        (8, 8, 64, (1, 6), "8.00 GiB each for a token"),
        (15, 15, 64, (2, 3), "7.50 GiB each for a token; fewer would read 15.0 GiB each, more than 8.00 GiB"),
        (24, 24, 64, (3, 2), "8.00 GiB each for a token; fewer would read 12.0 GiB each, more than 8.00 GiB"),
        (140, 140, 256, (6, 1), "23.3 GiB each for a token; fewer would read 46.7 GiB each, more than 8.00 GiB"),
        # A mixture of experts: one node reads it fast enough but does not have the memory.
        (60, 6, 64, (2, 3), "3.00 GiB each for a token; fewer would hold 60.0 GiB of weights each, of 64.0 GiB"),
        (600, 36, 64, (6, 1), "6.00 GiB each for a token; fewer would hold 200 GiB of weights each, of 64.0 GiB"),
    ],
)
def test_the_fewest_nodes_that_hold_and_read_it_well(
    tmp_path: Path, weights: int, token: int, memory: int, expected: tuple[int, int], says: str
) -> None:
    machine = Machine(SNC3, memory=dict.fromkeys(range(6), memory * GIB))
    topology = read_topology(machine.write(tmp_path))
    division = divide(topology, None, None, lambda: ModelBytes(weights * GIB, token * GIB))
    assert (division.tp, division.dp) == expected
    assert division.reason is not None and division.reason.endswith(says)


def test_the_node_with_the_least_memory_counts(tmp_path: Path) -> None:
    topology = read_topology(Machine([(0, 8), (1, 8)], memory={0: 64 * GIB, 1: 16 * GIB}).write(tmp_path))
    division = divide(topology, None, None, lambda: ModelBytes(9 * GIB, 4 * GIB))
    assert (division.tp, division.dp) == (2, 1)


def test_one_node(tmp_path: Path) -> None:
    division = divide(read_topology(sockets(1, 4).write(tmp_path)), None, None, never)
    assert (division.tp, division.dp, division.reason) == (1, 1, "there is one NUMA node")


def test_what_the_demo_model_takes() -> None:
    """A token reads the whole checkpoint, whose output head is the embedding table; the rope tables are added."""
    from safetensors import safe_open

    values = 0
    for path in DEMO.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            values += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    model = serve.ServeJob(parser.parse_args([str(DEMO), "--dtype", "float32"])).model_bytes()
    assert model.token == 4 * values
    assert model.token <= model.weights < 1.1 * model.token


def test_replicas_get_neighbouring_nodes(tmp_path: Path) -> None:
    topology = read_topology(Machine(SNC3).write(tmp_path))
    parts = divide_placement(place(topology, 6), [2, 2, 2])
    assert [[rank.mem_nodes for rank in part.ranks] for part in parts] == [
        [(0,), (1,)],
        [(2,), (3,)],
        [(4,), (5,)],
    ]
    assert [[rank.rank for rank in part.ranks] for part in parts] == [[0, 1]] * 3
    assert {(part.replicas, part.sharers) for part in parts} == {(3, 1)}
    cores = [core for part in parts for rank in part.ranks for core in rank.cores]
    assert len(cores) == len(set(cores)) == 256


def test_replicas_that_share_memory_know_it(tmp_path: Path) -> None:
    topology = read_topology(sockets(2, 6).write(tmp_path))
    assert {part.sharers for part in divide_placement(place(topology, 4), [1] * 4)} == {2}
    assert {part.sharers for part in divide_placement(place(topology, 2, "none"), [1, 1])} == {2}
