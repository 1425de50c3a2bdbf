"""Which cores and which memory each rank of this host gets. Pure: the `Topology` is its only input.

Each rank gets whole NUMA nodes, or nodes are divided evenly, where the numbers allow it: then the cores, weights and
cache of a rank are on one node. Otherwise every rank gets the same number of cores, in the order of packages and nodes.
Ranks work in lockstep, so the smallest one sets the pace; pinned threads that touch their own part first keep it local.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from ..errors import LaunchError
from ..text import count
from .cpulist import format_cpulist, parse_cpulist
from .left_out import left_out
from .topology import Core, Topology


@dataclass(frozen=True)
class RankPlacement:
    """The cores and memory nodes of one rank. `rank` counts the ranks of this host.

    `cores` has one logical CPU per physical core. `affinity` is the mask of the process: the cores and their
    hyper-threads, which are for helper threads (sockets, watchers). If it is empty, the mask is left unchanged. Empty
    `mem_nodes` means no memory policy. `threads` workers run. If `pinned`, worker i stays on cores[i]; otherwise
    workers may run anywhere in the mask.
    """

    rank: int
    cores: tuple[int, ...]
    affinity: tuple[int, ...]
    mem_nodes: tuple[int, ...]
    threads: int
    pinned: bool
    reason: str

    @property
    def pool_cores(self) -> tuple[int, ...] | None:
        """Return the argument for `kernels.core.start_pool`: one core per worker, or None for unpinned workers."""
        return self.cores[: self.threads] if self.pinned else None


@dataclass(frozen=True)
class Placement:
    """All ranks of a model on this host. `oversubscribed`: more workers than CPUs, so that waits must sleep instead of
    spin. The host has `replicas` of the model, of which at most `sharers` have ranks near the same memory."""

    ranks: tuple[RankPlacement, ...]
    oversubscribed: bool
    notes: tuple[str, ...] = ()  # sentences for the log and `plan`
    replicas: int = 1
    sharers: int = 1


def auto_ranks(topology: Topology) -> int:
    """Return `--tp auto`: one rank per NUMA node that has both usable cores and allowed memory; 1 if none has both."""
    with_cores = {core.node for core in topology.usable_cores()}
    return max(1, len(with_cores & set(topology.allowed_mems)))


def place(topology: Topology, ranks: int, cores: str = "auto", *, own_mask: bool = False) -> Placement:
    """Place `ranks` ranks on this host.

    `cores`: "auto"; "none", which binds nothing; or one list of logical CPUs per rank, "0-39|43-82". `own_mask` matters
    only for "none": a narrowed mask belongs to this rank alone (mpirun, srun), so its cores are not divided among
    ranks. LaunchError if a list names a core that does not exist, is not allowed or is in another list, or if the
    number of lists differs from the number of ranks.
    """
    if ranks < 1:
        raise LaunchError(f"at least one rank is needed, found {ranks}")
    if cores == "none":
        placement = _unbound(topology, ranks, own_mask)
    elif cores == "auto":
        placement = _auto(topology, ranks)
    else:
        placement = _listed(topology, ranks, cores)
    placement = _within_quota(topology, placement)
    return replace(placement, notes=(*placement.notes, *_helper_notes(placement)))


def divide_placement(placement: Placement, sizes: Sequence[int]) -> list[Placement]:
    """Divide the ranks of one host into groups of neighbours of these sizes. Each group counts its ranks from 0.

    The notes, which are about the host, stay with the first group.
    """
    ends = list(accumulate(sizes))
    parts = [placement.ranks[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    homes = Counter(node for part in parts for node in {node for rank in part for node in rank.mem_nodes})
    sharers = max(homes.values(), default=len(sizes))
    return [
        Placement(
            tuple(replace(rank, rank=number) for number, rank in enumerate(part)),
            placement.oversubscribed,
            () if i else placement.notes,
            len(sizes),
            sharers,
        )
        for i, part in enumerate(parts)
    ]


def cpus_beside(topology: Topology, ranks: Sequence[RankPlacement]) -> set[int]:
    """Return the CPUs for processes that serve the ranks: beside them where there is room, since a core that ranks spin
    on is late to answer."""
    taken = {cpu for rank in ranks for cpu in rank.affinity}
    return topology.usable_cpus - taken or topology.usable_cpus


def _unbound(topology: Topology, ranks: int, own_mask: bool) -> Placement:
    allowed = set(topology.allowed_cpus)
    mask = set(topology.inherited_cpus) & allowed or allowed
    available = sum(1 for core in topology.cores if mask & set(core.threads))
    # MPICH and torchrun give the whole mask to every rank.
    sharers = 1 if own_mask and mask != topology.usable_cpus else ranks
    threads = max(1, available // sharers)
    reason = f"not bound: {count(threads, 'thread')} on CPUs {format_cpulist(mask)}"
    one = RankPlacement(0, (), (), (), threads, pinned=False, reason=reason)
    return Placement(tuple(replace(one, rank=r) for r in range(ranks)), oversubscribed=sharers > available)


def _auto(topology: Topology, ranks: int) -> Placement:
    usable = topology.usable_cores()
    if ranks > len(usable):
        return _shared(topology, ranks, usable)
    domains: dict[int, list[Core]] = {}  # by memory node, so that a node without memory joins its nearest one
    for core in usable:
        domains.setdefault(topology.nearest_memory(core.node), []).append(core)
    groups = _whole_nodes(list(domains.values()), ranks)
    if groups is None or 2 * min(len(g) for g in groups) < len(usable) // ranks:
        groups = _even([core for domain in domains.values() for core in domain], ranks)
    placed = [_rank(topology, r, group, _describe(usable, group)) for r, group in enumerate(groups)]
    return Placement(tuple(placed), oversubscribed=False, notes=tuple(left_out(topology)))


def _whole_nodes(nodes: Sequence[Sequence[Core]], ranks: int) -> list[Sequence[Core]] | None:
    """Return several nodes per rank or several ranks per node; None if the numbers do not divide."""
    if len(nodes) % ranks == 0:
        each = len(nodes) // ranks
        return [[core for node in nodes[r * each : (r + 1) * each] for core in node] for r in range(ranks)]
    if ranks % len(nodes) == 0 and all(len(node) >= ranks // len(nodes) for node in nodes):
        return [part for node in nodes for part in _even(node, ranks // len(nodes))]
    return None


def _even(cores: Sequence[Core], parts: int) -> list[Sequence[Core]]:
    """Split `cores` into consecutive parts whose sizes differ by at most one."""
    cuts = [len(cores) * i // parts for i in range(parts + 1)]
    return [cores[a:b] for a, b in pairwise(cuts)]


def _shared(topology: Topology, ranks: int, usable: Sequence[Core]) -> Placement:
    """Place more ranks than cores: every rank may use all cores of a node, so that the scheduler can be fair."""
    placed = []
    for r in range(ranks):
        node = usable[r * len(usable) // ranks].node
        group = [core for core in usable if core.node == node]
        reason = f"shares the {count(len(group), 'core')} of node {node} with other ranks"
        placed.append(replace(_rank(topology, r, group, reason), threads=1, pinned=False))
    note = f"{ranks} ranks share {count(len(usable), 'core')}: waits sleep instead of spinning, and speed is lost"
    return Placement(tuple(placed), oversubscribed=True, notes=(*left_out(topology), note))


def _rank(topology: Topology, rank: int, group: Sequence[Core], reason: str) -> RankPlacement:
    nodes = sorted({core.node for core in group})
    mem_nodes = tuple(sorted({topology.nearest_memory(node) for node in nodes}))
    if not set(mem_nodes) <= set(nodes):
        reason += f"; memory on node {format_cpulist(mem_nodes)}, the nearest that is allowed"
    return RankPlacement(
        rank=rank,
        cores=tuple(core.threads[0] for core in group),
        affinity=tuple(sorted(cpu for core in group for cpu in core.threads)),
        mem_nodes=mem_nodes,
        threads=len(group),
        pinned=True,
        reason=reason,
    )


def _describe(usable: Sequence[Core], group: Sequence[Core]) -> str:
    total, here = Counter(core.node for core in usable), Counter(core.node for core in group)
    parts = [
        f"{count(n, 'core')} of node {node}" + ("" if n == total[node] else f" (which has {total[node]})")
        for node, n in sorted(here.items())
    ]
    return ", ".join(parts)


def _listed(topology: Topology, ranks: int, text: str) -> Placement:
    groups = [_parse_group(topology, i, part, text) for i, part in enumerate(text.split("|"))]
    if len(groups) != ranks:
        raise LaunchError(
            f"--cores {text!r} has {count(len(groups), 'group')} for {count(ranks, 'rank')} on this host; "
            "one list per rank, separated by |, is needed"
        )
    owner: dict[int, int] = {}
    for i, cpus in enumerate(groups):
        for cpu in cpus:
            if owner.setdefault(cpu, i) != i:
                raise LaunchError(f"--cores {text!r}: core {cpu} is in group {owner[cpu]} and in group {i}")
    placed, notes = [], []
    for i, cpus in enumerate(groups):
        group = [replace(core, threads=own) for core in topology.cores if (own := _intersect(core.threads, cpus))]
        placed.append(_rank(topology, i, group, f"{count(len(group), 'core')} listed by --cores"))
    for core in topology.cores:
        sharers = sorted({owner[cpu] for cpu in core.threads if cpu in owner})
        if len(sharers) > 1:
            names, threads = " and ".join(map(str, sharers)), format_cpulist(core.threads)
            notes.append(f"ranks {names} share a physical core: CPUs {threads} are its hyper-threads")
    return Placement(tuple(placed), oversubscribed=False, notes=tuple(notes))


def _parse_group(topology: Topology, index: int, part: str, text: str) -> tuple[int, ...]:
    """Return the CPUs of one group. Isolated CPUs are accepted, because the user named them."""
    where = f"--cores {text!r}, group {index}"
    try:
        cpus = parse_cpulist(part)
    except ValueError as error:
        raise LaunchError(f"{where}: {error}; expected lists like 0-39|43-82, auto or none") from None
    if not cpus:
        raise LaunchError(f"{where} is empty; every rank needs a core")
    absent = format_cpulist(set(cpus) - set(topology.online))
    if absent != "none":
        raise LaunchError(f"{where}: no core {absent} is online; there are {format_cpulist(topology.online)}")
    denied = format_cpulist(set(cpus) - set(topology.allowed_cpus))
    if denied != "none":
        allowed = format_cpulist(topology.allowed_cpus)
        raise LaunchError(f"{where}: core {denied} is outside of this process's cpuset, which allows {allowed}")
    return cpus


def _intersect(threads: tuple[int, ...], cpus: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(cpu for cpu in threads if cpu in cpus)


def _within_quota(topology: Topology, placement: Placement) -> Placement:
    """Use fewer workers if the CPU quota cannot run all of them at once.

    They are then not pinned: other groups share the same cores, and would all pin to the same few.
    """
    limit, quota = topology.limits.max_threads, topology.limits.cpu_quota
    wanted = sum(rank.threads for rank in placement.ranks)
    if limit is None or quota is None or wanted <= quota:
        return placement
    ranks = placement.ranks
    if wanted > limit:
        each = max(1, limit // len(ranks))
        ranks = tuple(replace(rank, threads=min(rank.threads, each), pinned=False) for rank in ranks)
    threads = sum(rank.threads for rank in ranks)
    note = f"the CPU quota allows {quota:g} CPUs at a time: {count(threads, 'thread')} on this host instead of {wanted}"
    return Placement(ranks, placement.oversubscribed or threads > quota, (*placement.notes, note))


def _helper_notes(placement: Placement) -> tuple[str, ...]:
    """Return a sentence about hyper-threads of the ranks' cores on which no worker runs, if there are any."""
    helpers = {cpu for rank in placement.ranks if rank.pinned for cpu in set(rank.affinity) - set(rank.cores)}
    if not helpers:
        return ()
    left = format_cpulist(helpers)
    return (f"one hyper-thread of each core computes; CPUs {left} are left to sockets and other helper threads",)
