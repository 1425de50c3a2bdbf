"""The CPUs and the memory of a machine that ranks leave out, in sentences for the log, `plan` and `doctor`."""

from collections.abc import Iterator

from .cpulist import format_cpulist
from .topology import Topology


def left_out(topology: Topology) -> Iterator[str]:
    """Yield a sentence for each reason to leave something out, for ranks that use all cores that they may."""
    used = topology.usable_cpus
    cpuset = _cpuset(topology)
    if cpuset:
        yield f"the cpuset allows {' and '.join(cpuset)}"
    divided = {
        cpu
        for core in topology.cores
        if used & set(core.threads)
        for cpu in set(core.threads) - set(topology.allowed_cpus)
    }
    if divided:
        yield (
            f"CPUs {format_cpulist(divided)} are not allowed here, but are hyper-threads of cores that are used: "
            "what others run there slows the ranks"
        )
    if topology.offline:
        yield f"CPUs {format_cpulist(topology.offline)} are offline and left out"
    isolated = set(topology.isolated) & set(topology.allowed_cpus) - used
    if isolated:
        yield f"CPUs {format_cpulist(isolated)} are isolated (isolcpus=) and left out unless --cores names them"
    spare = set(topology.allowed_mems) - {topology.nearest_memory(core.node) for core in topology.usable_cores()}
    if spare:
        yield (
            f"no rank has cores on memory node{'s' * (len(spare) > 1)} {format_cpulist(spare)}: memory there is taken "
            "only when that of the ranks' own nodes is full (with --membind strict: never)"
        )


def _cpuset(topology: Topology) -> list[str]:
    """Return what a control group allows of the CPUs, and of the memory nodes, if that is not everything."""
    parts = []
    online, cpus = set(topology.online), topology.limits.cpus
    if cpus is not None and online - set(cpus):
        parts.append(f"CPUs {format_cpulist(online & set(cpus))} of {format_cpulist(online)}")
    with_memory = {node.id for node in topology.nodes if node.memory_total}
    if with_memory - set(topology.allowed_mems):
        parts.append(f"memory nodes {format_cpulist(topology.allowed_mems)} of {format_cpulist(with_memory)}")
    return parts
