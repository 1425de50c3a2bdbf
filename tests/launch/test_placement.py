"""Placement of ranks on simulated machines."""

import tempfile
from pathlib import Path

import pytest
from fake_sysfs import SNC3, Machine, sockets
from hypothesis import given, settings
from hypothesis import strategies as st

from tilerank.launch.errors import LaunchError
from tilerank.launch.host.cgroup import CgroupLimits
from tilerank.launch.host.neighbours import neighbour_notes, pinned_by_others
from tilerank.launch.host.placement import Placement, auto_ranks, cpus_beside, place
from tilerank.launch.host.topology import Core, Node, Topology, read_topology

EXPECTED = "expected lists like 0-39|43-82, auto or none"


def helpers(cpus: str) -> str:
    return f"one hyper-thread of each core computes; CPUs {cpus} are left to sockets and other helper threads"


def topology_of(machine: Machine) -> Topology:
    with tempfile.TemporaryDirectory() as root:
        return read_topology(machine.write(Path(root)))


def sizes(placement: Placement) -> list[int]:
    return [len(rank.cores) for rank in placement.ranks]


def mems(placement: Placement) -> list[tuple[int, ...]]:
    return [rank.mem_nodes for rank in placement.ranks]


def test_one_rank_per_snc_node() -> None:
    topology = topology_of(Machine(SNC3, threads=2))
    assert auto_ranks(topology) == 6
    placement = place(topology, 6)
    assert sizes(placement) == [43, 43, 42, 43, 43, 42]
    assert mems(placement) == [(0,), (1,), (2,), (3,), (4,), (5,)]
    assert placement.ranks[1].cores == tuple(range(43, 86))
    assert placement.ranks[1].affinity == (*range(43, 86), *range(256 + 43, 256 + 86))  # with the hyper-threads
    assert placement.ranks[1].pool_cores == placement.ranks[1].cores
    assert placement.ranks[2].reason == "42 cores of node 2"
    assert not placement.oversubscribed


@pytest.mark.parametrize(
    ("ranks", "expected_sizes", "expected_mems"),
    [
        (1, [256], [(0, 1, 2, 3, 4, 5)]),
        (2, [128, 128], [(0, 1, 2), (3, 4, 5)]),  # a package each
        (3, [86, 85, 85], [(0, 1), (2, 3), (4, 5)]),
        (4, [64, 64, 64, 64], [(0, 1), (1, 2), (3, 4), (4, 5)]),  # no rank straddles the packages
        (12, [21, 22, 21, 22, 21, 21] * 2, [(n,) for n in range(6) for _ in range(2)]),  # half a node each
    ],
)
def test_snc_with_other_numbers_of_ranks(
    ranks: int, expected_sizes: list[int], expected_mems: list[tuple[int, ...]]
) -> None:
    placement = place(topology_of(Machine(SNC3, threads=2)), ranks)
    assert sizes(placement) == expected_sizes
    assert mems(placement) == expected_mems


def test_three_ranks_on_two_sockets() -> None:
    placement = place(topology_of(sockets(2, 40)), 3)
    assert sizes(placement) == [26, 27, 27]
    assert mems(placement) == [(0,), (0, 1), (1,)]
    assert placement.ranks[1].reason == "14 cores of node 0 (which has 40), 13 cores of node 1 (which has 40)"


@pytest.mark.parametrize("packages", range(1, 9))
def test_auto_is_a_rank_per_socket(packages: int) -> None:
    topology = topology_of(sockets(packages, 32, threads=2))
    assert auto_ranks(topology) == packages
    assert mems(place(topology, packages)) == [(p,) for p in range(packages)]


def test_snc2() -> None:
    topology = topology_of(Machine([(0, 30), (0, 30), (1, 30), (1, 30)], threads=2))
    assert auto_ranks(topology) == 4
    assert mems(place(topology, 2)) == [(0, 1), (2, 3)]


def test_more_ranks_than_cores() -> None:
    placement = place(topology_of(sockets(2, 1)), 6)
    assert placement.oversubscribed
    assert [rank.cores for rank in placement.ranks] == [(0,)] * 3 + [(1,)] * 3
    assert {rank.threads for rank in placement.ranks} == {1}
    assert all(rank.pool_cores is None for rank in placement.ranks)
    assert placement.notes == ("6 ranks share 2 cores: waits sleep instead of spinning, and speed is lost",)


def test_nodes_without_cores_or_memory() -> None:
    """Node 1 has no memory, node 2 (CXL) no cores: neither counts for `auto`, but both are usable."""
    machine = Machine([(0, 8), (0, 8), (0, 0)], memory={1: 0}, remote={(0, 1): 12, (1, 2): 20, (0, 2): 20})
    topology = topology_of(machine)
    assert auto_ranks(topology) == 1
    placement = place(topology, 2)
    assert mems(placement) == [(0,), (0,)]
    assert placement.ranks[1].reason == "8 cores of node 1; memory on node 0, the nearest that is allowed"


def test_memoryless_node_joins_the_nearest() -> None:
    """One rank per memory node: with evenly divided cores, one rank would read from both."""
    machine = Machine([(0, 4), (1, 4), (2, 4)], memory={2: 0}, remote={(0, 2): 31, (1, 2): 22})
    placement = place(topology_of(machine), 2)
    assert sizes(placement) == [4, 8]
    assert mems(placement) == [(0,), (1,)]
    assert placement.ranks[1].reason == "4 cores of node 1, 4 cores of node 2"


def test_cpuset_mems_without_the_local_node() -> None:
    machine = Machine(SNC3)
    machine.cgroup = {
        "sys/fs/cgroup/cpuset.cpus.effective": "0-127",
        "sys/fs/cgroup/cpuset.mems.effective": "1,5",
    }
    topology = topology_of(machine)
    assert mems(place(topology, 3)) == [(1,), (1,), (1,)]  # 12 away, node 5 is 21 away
    assert auto_ranks(topology) == 1


def test_lopsided_cpuset_is_evened_out() -> None:
    """Two cores of node 0 and forty of node 1: a rank on two cores would delay the other."""
    machine = sockets(2, 40)
    machine.cgroup = {"sys/fs/cgroup/cpuset.cpus.effective": "38-79"}
    placement = place(topology_of(machine), 2)
    assert sizes(placement) == [21, 21]
    assert mems(placement) == [(0, 1), (1,)]


def test_offline_and_isolated_siblings() -> None:
    machine = Machine([(0, 4)], threads=2, offline=frozenset({5}), isolated="2,6")
    rank = place(topology_of(machine), 1).ranks[0]
    assert rank.cores == (0, 1, 3)
    assert rank.affinity == (0, 1, 3, 4, 7)


def test_only_isolated_cores_allowed() -> None:
    machine = Machine([(0, 4)], isolated="2-3")
    machine.cgroup = {"sys/fs/cgroup/cpuset.cpus.effective": "2-3"}
    assert place(topology_of(machine), 1).ranks[0].cores == (2, 3)


def test_quota_caps_threads_and_unpins() -> None:
    machine = sockets(2, 16)
    machine.cgroup = {"sys/fs/cgroup/cpu.max": "650000 100000"}
    placement = place(topology_of(machine), 2)
    assert [rank.threads for rank in placement.ranks] == [3, 3]  # ceil(6.5) = 7 over 2 ranks
    assert sizes(placement) == [16, 16]
    assert placement.ranks[0].pool_cores is None
    assert not placement.oversubscribed
    assert placement.notes == ("the CPU quota allows 6.5 CPUs at a time: 6 threads on this host instead of 32",)


def test_quota_below_one_cpu_a_rank() -> None:
    machine = sockets(1, 4)
    machine.cgroup = {"sys/fs/cgroup/cpu.max": "50000 100000"}
    placement = place(topology_of(machine), 2)
    assert [rank.threads for rank in placement.ranks] == [1, 1]
    assert placement.oversubscribed  # a spinning wait would use up the CPU time that the other rank needs


def test_quota_that_is_enough_changes_nothing() -> None:
    machine = sockets(1, 4)
    machine.cgroup = {"sys/fs/cgroup/cpu.max": "400000 100000"}
    placement = place(topology_of(machine), 2)
    assert placement.ranks[0].pool_cores == (0, 1)
    assert not placement.oversubscribed


def test_listed_cores() -> None:
    placement = place(topology_of(Machine(SNC3, threads=2)), 2, "0-39|43-82,299-300")
    assert sizes(placement) == [40, 40]  # 299 and 300 are the second threads of 43 and 44
    assert placement.ranks[1].affinity == (*range(43, 83), 299, 300)
    assert mems(placement) == [(0,), (1,)]
    assert placement.ranks[0].reason == "40 cores listed by --cores"
    assert placement.notes == (helpers("299-300"),)


def test_listed_isolated_cores_are_used() -> None:
    topology = topology_of(Machine([(0, 8)], isolated="4-7"))
    assert place(topology, 1, "4-7").ranks[0].cores == (4, 5, 6, 7)


def test_listed_second_thread_alone() -> None:
    topology = topology_of(Machine([(0, 4)], threads=2))
    placement = place(topology, 2, "0-1|4-5")
    assert placement.ranks[1].cores == (4, 5)
    assert placement.notes[0] == "ranks 0 and 1 share a physical core: CPUs 0,4 are its hyper-threads"


@pytest.mark.parametrize(
    ("ranks", "cores", "sentence"),
    [
        (2, "0-2", "--cores '0-2' has 1 group for 2 ranks on this host; one list per rank, separated by |, is needed"),
        (1, "0|1", "--cores '0|1' has 2 groups for 1 rank on this host; one list per rank, separated by |, is needed"),
        (2, "0-1|1-2", "--cores '0-1|1-2': core 1 is in group 0 and in group 1"),
        (2, "0|9-10", "--cores '0|9-10', group 1: no core 9-10 is online; there are 0-2,4-7"),
        (2, "0|3", "--cores '0|3', group 1: no core 3 is online; there are 0-2,4-7"),
        (2, "0|7", "--cores '0|7', group 1: core 7 is outside of this process's cpuset, which allows 0-2,4-6"),
        (2, "0|", "--cores '0|', group 1 is empty; every rank needs a core"),
        (1, "", "--cores '', group 0 is empty; every rank needs a core"),
        (1, "4-2", f"--cores '4-2', group 0: range '4-2' runs backwards; {EXPECTED}"),
        (1, "all", f"--cores 'all', group 0: 'all' is neither a number nor a range like 0-39; {EXPECTED}"),
    ],
)
def test_bad_core_lists(ranks: int, cores: str, sentence: str) -> None:
    machine = Machine([(0, 8)], offline=frozenset({3}))
    machine.cgroup = {"sys/fs/cgroup/cpuset.cpus.effective": "0-2,4-6"}
    with pytest.raises(LaunchError) as error:
        place(topology_of(machine), ranks, cores)
    assert str(error.value) == sentence


FAR_MEMORY = (
    "no rank has cores on memory node 1: memory there is taken only when that of the ranks' own nodes is full "
    "(with --membind strict: never)"
)


@pytest.mark.parametrize(
    ("machine", "cpus", "mems", "notes"),
    [
        (sockets(2, 4), "0-7", "0-1", []),
        (sockets(2, 4), "0-3", "0", ["the cpuset allows CPUs 0-3 of 0-7 and memory nodes 0 of 0-1"]),
        (sockets(2, 4), "0-3", "0-1", ["the cpuset allows CPUs 0-3 of 0-7", FAR_MEMORY]),
        (Machine([(0, 4), (0, 0)]), "0-3", "0-1", [FAR_MEMORY]),
        (Machine([(0, 4)], threads=2), "0-7", "0", [helpers("4-7")]),
        (
            Machine([(0, 4)], threads=2, offline=frozenset({3, 7, 6})),
            "0-2,4-5",
            "0",
            ["CPUs 3,6-7 are offline and left out", helpers("4-5")],
        ),
        (
            Machine([(0, 4)], threads=2),
            "0-1,4",
            "0",
            [
                "the cpuset allows CPUs 0-1,4 of 0-7",
                "CPUs 5 are not allowed here, but are hyper-threads of cores that are used: "
                "what others run there slows the ranks",
                helpers("4"),
            ],
        ),
        (
            Machine([(0, 4)], isolated="2-3"),
            "0-3",
            "0",
            ["CPUs 2-3 are isolated (isolcpus=) and left out unless --cores names them"],
        ),
        (Machine([(0, 4)], isolated="2-3"), "2-3", "0", ["the cpuset allows CPUs 2-3 of 0-3"]),
    ],
)
def test_what_is_left_out(machine: Machine, cpus: str, mems: str, notes: list[str]) -> None:
    group = {"cpuset.cpus.effective": cpus, "cpuset.mems.effective": mems}
    machine.cgroup = {f"sys/fs/cgroup/{name}": value for name, value in group.items()}
    assert list(place(topology_of(machine), 1).notes) == notes


def test_one_rank_per_node_of_isolated_cores() -> None:
    """A container that has the isolated cores, and no others."""
    machine = Machine([(0, 4), (1, 4)], isolated="2-5")
    machine.cgroup = {"sys/fs/cgroup/cpuset.cpus.effective": "2-5"}
    topology = topology_of(machine)
    assert auto_ranks(topology) == 2
    assert [rank.cores for rank in place(topology, 2).ranks] == [(2, 3), (4, 5)]


@pytest.mark.parametrize(("cores", "beside"), [("auto", {*range(7)}), ("0-3", {4, 5, 6}), ("none", {*range(7)})])
def test_where_the_http_process_runs(cores: str, beside: set[int]) -> None:
    """Never on CPU 7, which is isolated."""
    topology = topology_of(Machine([(0, 8)], isolated="7"))
    assert cpus_beside(topology, place(topology, 1, cores).ranks) == beside


def test_another_server_on_the_same_cores(tmp_path: Path) -> None:
    """Its workers are pinned to CPUs 1 and 2, where CPUs 5 and 6 are on the same cores. Nothing else is a worker."""
    root = sockets(1, 4, threads=2).write(tmp_path)
    for pid, command, masks in (
        (100, "/bin/python -P -m tilerank serve model", ["1", "0-7", "2"]),
        (200, "/bin/python -m other serve tilerank", ["3"]),
        (300, "", ["0"]),
        (400, "/bin/python /bin/tilerank serve model", ["0-7"]),
    ):
        for thread, mask in enumerate(masks):
            task = root / f"proc/{pid}/task/{pid + thread}"
            task.mkdir(parents=True)
            (task / "status").write_text(f"Name:\tpython\nCpus_allowed_list:\t{mask}\n")
        (root / f"proc/{pid}/cmdline").write_text("".join(word + "\0" for word in command.split()))
    pinned, topology = pinned_by_others(root), read_topology(root)
    assert pinned == {100: {1, 2}}
    for cores, cpus in (("auto", "1-2"), ("0-1", "1"), ("5", "1"), ("0,3", None), ("none", None)):
        found = neighbour_notes(topology, place(topology, 1, cores), pinned)
        sentence = (
            f"threads of another tilerank (processes 100) are pinned to CPUs {cpus}, whose cores these ranks use, too: "
            "each slows the other; --cores or a cpuset keeps them apart"
        )
        assert found == (() if cpus is None else (sentence,)), cores


def test_no_ranks() -> None:
    with pytest.raises(LaunchError, match="at least one rank is needed, found 0"):
        place(topology_of(sockets(1, 2)), 0)


def test_none_binds_nothing_and_shares_threads() -> None:
    topology = topology_of(sockets(2, 8, threads=2))
    placement = place(topology, 4, "none")
    assert [rank.threads for rank in placement.ranks] == [4] * 4
    assert all(not (rank.cores or rank.affinity or rank.mem_nodes) for rank in placement.ranks)
    assert not placement.oversubscribed
    assert place(topology, 17, "none").oversubscribed


def test_none_keeps_the_mask_of_a_foreign_launcher() -> None:
    machine = sockets(2, 8)
    machine.affinity = "4-7"
    topology = topology_of(machine)
    assert place(topology, 4, "none", own_mask=True).ranks[3].threads == 4
    assert place(topology, 2, "none").ranks[0].threads == 2  # taskset around the whole job
    assert place(topology_of(sockets(2, 8)), 4, "none", own_mask=True).ranks[3].threads == 4  # nothing was narrowed


def test_none_shares_all_but_the_isolated_cores() -> None:
    """The kernel leaves isolated CPUs out of every mask, which is no mask of a rank's own."""
    topology = topology_of(Machine([(0, 8)], isolated="6-7", affinity="0-5"))
    assert place(topology, 3, "none", own_mask=True).ranks[0].threads == 2


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Any machine: nodes without cores or memory, cores with one or two threads, odd cpusets, isolated CPUs, quotas."""
    cores: list[Core] = []
    nodes = range(draw(st.integers(1, 8)))
    for node in nodes:
        for _ in range(draw(st.integers(0 if node else 1, 6))):
            first = sum(len(core.threads) for core in cores)
            cores.append(Core(tuple(range(first, first + draw(st.integers(1, 2)))), node, node // 3))
    online = [cpu for core in cores for cpu in core.threads]
    with_memory = draw(st.sets(st.sampled_from(nodes), min_size=1))
    quota = draw(st.none() | st.floats(0.01, 60))
    return Topology(
        nodes=tuple(
            Node(
                n, n // 3, (), int(n in with_memory), 0, {m: 10 if m == n else draw(st.integers(11, 31)) for m in nodes}
            )
            for n in nodes
        ),
        cores=tuple(cores),
        offline=(),
        isolated=tuple(sorted(draw(st.sets(st.sampled_from(online))))),
        allowed_cpus=tuple(sorted(draw(st.sets(st.sampled_from(online), min_size=1)))),
        allowed_mems=tuple(sorted(with_memory)),
        inherited_cpus=tuple(online),
        limits=CgroupLimits(cpu_quota=quota),
    )


@settings(deadline=None)
@given(topologies(), st.integers(1, 20))
def test_every_rank_has_cores_of_its_own(topology: Topology, ranks: int) -> None:
    placement = place(topology, ranks)
    assert [rank.rank for rank in placement.ranks] == list(range(ranks))
    core_of = {cpu: core.threads[0] for core in topology.cores for cpu in core.threads}
    quota = topology.limits.cpu_quota
    for rank in placement.ranks:
        assert rank.cores
        assert set(rank.cores) <= set(rank.affinity) <= set(topology.allowed_cpus)
        assert len({core_of[cpu] for cpu in rank.cores}) == len(rank.cores)  # one thread per physical core
        assert 1 <= rank.threads <= len(rank.cores)
        assert rank.mem_nodes
        assert set(rank.mem_nodes) <= set(topology.allowed_mems)
        assert rank.pool_cores is None or len(rank.pool_cores) == rank.threads
    used = [core_of[cpu] for rank in placement.ranks for cpu in rank.cores]
    workers = sum(rank.threads for rank in placement.ranks)
    if not placement.oversubscribed:
        assert len(set(used)) == len(used)
        assert quota is None or workers <= quota
    usable = topology.usable_cores()
    if ranks <= len(usable) and quota is None:
        assert not placement.oversubscribed
        assert len(used) == len(usable)  # none is left out
        assert 2 * min(sizes(placement)) >= len(usable) // ranks
