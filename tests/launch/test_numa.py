"""Topology, placement, binding and the location of pages on several NUMA nodes of a virtual machine.

`make test-numa` runs it. The results come from the kernels of virtual machines: a program that the bound process
starts reads affinity and policy back, and pages are counted by move_pages and by /proc/self/numa_maps.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.numa import image

pytestmark = pytest.mark.numa

PAGES = 256  # of the MiB that every rank touches
NODE_MIB = 256


def qemu_machine(
    cores: str, cpus: Mapping[int, str | None], memoryless: int | None, distances: dict[tuple[int, int], int]
) -> list[str]:
    """Return qemu's arguments. `cpus`: the CPUs of each node, None for a node without CPUs."""
    arguments = ["-cpu", "max,vendor=GenuineIntel", "-smp", cores]  # qemu hides hyper-threads of its default vendor
    arguments += ["-m", f"{NODE_MIB * (len(cpus) - (memoryless is not None))}M"]
    for node, list_ in cpus.items():
        backing = ""
        if node != memoryless:
            arguments += ["-object", f"memory-backend-ram,id=m{node},size={NODE_MIB}M"]
            backing = f",memdev=m{node}"
        arguments += ["-numa", f"node,nodeid={node}{backing}" + (f",cpus={list_}" if list_ else "")]
    for (a, b), distance in distances.items():
        arguments += ["-numa", f"dist,src={a},dst={b},val={distance}", "-numa", f"dist,src={b},dst={a},val={distance}"]
    return arguments


def boot(directory: Path, machine: list[str], checks: str, append: str = "") -> dict[str, Any]:
    missing = image.missing()
    if missing:
        if os.environ.get("TILERANK_REQUIRE_NUMA") == "1":
            pytest.fail(missing)
        pytest.skip(missing)
    return image.boot(directory, machine, checks, append=append)


@pytest.fixture(scope="module")
def snc3(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two packages divided by SNC3 into nodes of 2, 2 and 1 cores."""
    cpus = dict(enumerate(["0-1", "2-3", "4", "5-6", "7-8", "9"]))
    distances = {(a, b): 12 if a // 3 == b // 3 else 21 for a in cpus for b in cpus if a < b}
    machine = qemu_machine("10,sockets=2,cores=5,threads=1", cpus, None, distances)
    return boot(tmp_path_factory.mktemp("snc3"), machine, "on_snc3.py")


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Three packages of 2 cores with hyper-threads, one of them without memory; a memory-only node; CPU 3 isolated, and
    CPUs 9 to 11 offline. A fourth package, CPUs 12 to 15, may be plugged in."""
    cpus = {0: "0-3", 1: "4-7", 2: "8-15", 3: None}
    distances = {(0, 1): 21, (0, 2): 31, (1, 2): 22, (0, 3): 14, (1, 3): 24, (2, 3): 33}
    machine = qemu_machine("12,maxcpus=16,sockets=4,cores=2,threads=2", cpus, 2, distances)
    return boot(tmp_path_factory.mktemp("mixed"), machine, "on_mixed.py", append="isolcpus=3 maxcpus=9")


def cores_of(seen: dict[str, Any]) -> list[tuple[int, int, list[int]]]:
    return [(core["package"], core["node"], core["threads"]) for core in seen["topology"]["cores"]]


def test_snc3_topology(snc3: dict[str, Any]) -> None:
    nodes = snc3["topology"]["nodes"]
    assert [node["cpus"] for node in nodes] == [[0, 1], [2, 3], [4], [5, 6], [7, 8], [9]]
    assert [node["package"] for node in nodes] == [0, 0, 0, 1, 1, 1]
    assert list(nodes[2]["distances"].values()) == [12, 12, 10, 21, 21, 21]
    assert all(200 << 20 < node["memory_total"] <= NODE_MIB << 20 for node in nodes)
    assert cores_of(snc3)[4:6] == [(0, 2, [4]), (1, 3, [5])]


def test_snc3_placement(snc3: dict[str, Any]) -> None:
    assert snc3["auto"] == 6
    placements = snc3["placements"]
    assert placements["6"] == [[[0, 1], [0]], [[2, 3], [1]], [[4], [2]], [[5, 6], [3]], [[7, 8], [4]], [[9], [5]]]
    assert placements["2"] == [[[0, 1, 2, 3, 4], [0, 1, 2]], [[5, 6, 7, 8, 9], [3, 4, 5]]]
    assert placements["3"] == [[[0, 1, 2, 3], [0, 1]], [[4, 5, 6], [2, 3]], [[7, 8, 9], [4, 5]]]
    assert {tuple(cores) for cores, _ in placements["20"]} == {(0, 1), (2, 3), (4,), (5, 6), (7, 8), (9,)}


def test_snc3_binding(snc3: dict[str, Any]) -> None:
    """Each of the six ranks runs on its node and has its memory there, and the programs that it starts inherit both."""
    cpus = [("0-1", [0, 1]), ("2-3", [2, 3]), ("4", [4]), ("5-6", [5, 6]), ("7-8", [7, 8]), ("9", [9])]
    for node, (text, numbers) in enumerate(cpus):
        pages = {str(node): PAGES}
        assert snc3["ranks"][node] == {
            "cpus": numbers,
            "policy": "preferred",
            "notes": [],
            "pages": pages,
            "numa_maps": pages,
            "local_share": 1.0,
            "executed": {"policy": f"prefer:{node}", "cpus": text, "mems": "0-5"},
        }


def test_snc3_first_touch_without_a_policy(snc3: dict[str, Any]) -> None:
    """First touch alone, as in a container that refuses memory policies."""
    assert [rank["pages"] for rank in snc3["first_touch"]] == [{str(node): PAGES} for node in range(6)]
    assert {rank["executed"]["policy"] for rank in snc3["first_touch"]} == {"default"}


def test_snc3_workers_of_one_rank_on_all_nodes(snc3: dict[str, Any]) -> None:
    """A rank over six nodes: the part of every pinned worker is on the worker's node."""
    node_of_core = [0, 0, 1, 1, 2, 3, 3, 4, 4, 5]
    assert snc3["workers"] == [[core, {str(node): 256}] for core, node in enumerate(node_of_core)]


def test_snc3_mask_left_by_mpirun(snc3: dict[str, Any]) -> None:
    assert snc3["mpirun"] == {"inherited": [0], "allowed": list(range(10)), "cpus": [9]}


def test_snc3_full_node(snc3: dict[str, Any]) -> None:
    """With the preferred policy memory spills to a node of the same package; with the strict policy the rank is killed,
    and the cgroup counts it."""
    fill = snc3["fill"]
    pages = {int(node): n for node, n in fill["preferred"]["pages"].items()}
    assert pages[fill["node"]] > 0
    assert {node // 3 for node in pages} == {fill["node"] // 3}
    assert len(pages) > 1
    assert fill["preferred_kills"] == 0
    assert fill["strict"] == {"code": -9}
    assert fill["strict_kills"] == 1


def test_snc3_control_group(snc3: dict[str, Any]) -> None:
    """CPUs of node 0 with memory of node 1 only, as Kubernetes may assign them."""
    group = snc3["group"]["topology"]
    assert (group["allowed_cpus"], group["allowed_mems"]) == ([0, 1], [1])
    assert (group["limits"]["cpu_quota"], group["limits"]["memory_limit"]) == (1.5, 100 << 20)
    reason = "2 cores of node 0; memory on node 1, the nearest that is allowed"
    assert snc3["group"]["rank"]["reason"] == reason
    (rank,) = snc3["group_server"]["ranks"]
    assert (rank["policy"], rank["pages"], rank["executed"]["mems"]) == ("preferred", {"1": PAGES}, "1")
    assert snc3["group_outside"] == {"error": "rank 5 cannot run on CPUs 9: Invalid argument"}


def test_snc3_findings(snc3: dict[str, Any]) -> None:
    assert snc3["findings"] == ["automatic NUMA balancing is on: it unmaps pages of bound ranks to sample them"]


def test_mixed_topology(mixed: dict[str, Any]) -> None:
    topology = mixed["topology"]
    assert cores_of(mixed) == [
        (0, 0, [0, 1]), (0, 0, [2, 3]), (1, 1, [4, 5]), (1, 1, [6, 7]), (2, 2, [8])
    ]  # fmt: skip
    assert (topology["nodes"][2]["memory_total"], topology["nodes"][3]["cpus"]) == (0, [])
    assert list(topology["nodes"][3]["distances"].values()) == [14, 24, 33, 10]
    assert topology["allowed_mems"] == [0, 1, 3]
    assert (topology["isolated"], topology["inherited_cpus"]) == ([3], [0, 1, 2, *range(4, 9)])
    assert mixed["findings"][0] == "node 2 has cores but no memory"


def test_mixed_placement(mixed: dict[str, Any]) -> None:
    """One thread per core; no rank on the memory-only node; the cores without memory join their nearest node."""
    assert mixed["auto"] == 2
    assert mixed["placements"]["2"] == [[[0, 2], [0]], [[4, 6, 8], [1]]]
    assert mixed["placements"]["1"] == [[[0, 2, 4, 6, 8], [0, 1]]]


def test_mixed_binding(mixed: dict[str, Any]) -> None:
    first, second = mixed["ranks"]
    assert (first["cpus"], first["pages"]) == (
        [0, 1, 2],
        {"0": PAGES},
    )  # with the hyper-threads, without isolated CPU 3
    assert (second["cpus"], second["pages"]) == (list(range(4, 9)), {"1": PAGES})


FAR_MEMORY = (
    "no rank has cores on memory node 3: memory there is taken only when that of the ranks' own nodes is full "
    "(with --membind strict: never)"
)
OFFLINE = "CPUs 9-11 are offline and left out"
ISOLATED = "CPUs 3 are isolated (isolcpus=) and left out unless --cores names them"


def helpers(cpus: str) -> str:
    return f"one hyper-thread of each core computes; CPUs {cpus} are left to sockets and other helper threads"


def cpuset(cpus: str) -> str:
    return f"the cpuset allows CPUs {cpus} of 0-8 and memory nodes 1 of 0-1,3"


def kernel_of(server: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return Cpus_allowed_list, Mems_allowed_list and the memory policy of a program that each rank starts."""
    executed = [rank["executed"] for rank in server["ranks"]]
    return [(program["cpus"], program["mems"], program["policy"]) for program in executed]


def pages_of(server: dict[str, Any]) -> list[dict[str, int]]:
    assert all(rank["numa_maps"] == rank["pages"] for rank in server["ranks"])
    return [rank["pages"] for rank in server["ranks"]]


def test_mixed_notes(mixed: dict[str, Any]) -> None:
    assert mixed["notes"] == [OFFLINE, ISOLATED, FAR_MEMORY, helpers("1,5,7")]


def test_mixed_memory_without_cores(mixed: dict[str, Any]) -> None:
    """What node 0 cannot hold goes to the memory beside it, not to the next package."""
    assert set(mixed["fill"]["pages"]) == {"0", "3"}


def test_mixed_exclusive_cpuset(mixed: dict[str, Any]) -> None:
    """Ranks inside have the cores and the memory of the cpuset, and ranks outside have none of them."""
    found = mixed["exclusive"]
    assert found["partition"] == "root"
    assert kernel_of(found["inside"]) == [("4-5", "1", "prefer:1"), ("6-7", "1", "prefer:1")]
    assert pages_of(found["inside"]) == [{"1": PAGES}] * 2
    assert found["inside"]["notes"] == [cpuset("4-7"), OFFLINE, helpers("5,7")]
    assert [cpus for cpus, _, _ in kernel_of(found["outside"])] == ["0-2,8"]
    outside = "the cpuset allows CPUs 0-3,8 of 0-8"
    assert found["outside"]["notes"] == [outside, OFFLINE, ISOLATED, FAR_MEMORY, helpers("1")]


def test_mixed_two_cpusets_on_one_package(mixed: dict[str, Any]) -> None:
    first, second = mixed["side_by_side"]
    assert (kernel_of(first), pages_of(first)) == ([("4-5", "1", "prefer:1")], [{"1": PAGES}])
    assert (kernel_of(second), pages_of(second)) == ([("6-7", "1", "prefer:1")], [{"1": PAGES}])
    assert first["notes"] == [cpuset("4-5"), OFFLINE, helpers("5")]


def test_mixed_two_cpusets_that_divide_cores(mixed: dict[str, Any]) -> None:
    """As the static CPU manager of Kubernetes assigns hyper-threads, unless full-pcpus-only is set."""
    first, second = mixed["halves"]
    slows = "are not allowed here, but are hyper-threads of cores that are used: what others run there slows the ranks"
    assert (kernel_of(first), first["notes"]) == (
        [("4,6", "1", "prefer:1")],
        [cpuset("4,6"), f"CPUs 5,7 {slows}", OFFLINE],
    )
    assert (kernel_of(second), second["notes"]) == (
        [("5,7", "1", "prefer:1")],
        [cpuset("5,7"), f"CPUs 4,6 {slows}", OFFLINE],
    )


def test_mixed_two_servers_without_cpusets(mixed: dict[str, Any]) -> None:
    """The second one says that the first has the same cores; with --cores, both have their own."""
    found = mixed["beside_another"]
    assert found["pinned"] == {str(found["pid"]): [4, 6]}
    assert found["notes"] == [
        f"threads of another tilerank (processes {found['pid']}) are pinned to CPUs 4,6, whose cores these ranks use, "
        "too: each slows the other; --cores or a cpuset keeps them apart"
    ]
    assert found["apart"]["notes"] == []
    assert kernel_of(found["apart"]) == [("0,2", "0-1,3", "prefer:0")]
    assert found["apart"]["http"] == [1, *range(4, 9)]  # neither on the ranks nor on isolated CPU 3


def test_mixed_container_without_group_files(mixed: dict[str, Any]) -> None:
    assert mixed["without_group_files"] == mixed["side_by_side"][0]


def test_mixed_offline_cores(mixed: dict[str, Any]) -> None:
    """A core with one hyper-thread offline still computes. CPUs that may be plugged in are not called offline."""
    assert mixed["topology"]["offline"] == [9, 10, 11]
    assert [kernel[:1] + kernel[2:] for kernel in kernel_of(mixed)] == [("0-2", "prefer:0"), ("4-8", "prefer:1")]
    assert pages_of(mixed) == [{"0": PAGES}, {"1": PAGES}]
