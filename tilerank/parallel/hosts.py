"""Which ranks share a host, the address of a rank for the others, and the rung that all can run."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tilerank.kernels.core import ISAS

from .errors import GroupError

Hosts = tuple[tuple[int, ...], ...]  # the ranks of each host, both in ascending order


@dataclass(frozen=True)
class PeerInfo:
    """What a rank publishes about itself when it joins."""

    rank: int
    size: int
    host: str
    address: str
    lanes: int  # threads of its kernels, 0 without the compiled core
    isa: str  # the newest rung of its kernels


def host_id() -> str:
    """Return a string that is equal for processes that can share memory and unix sockets.

    It names the kernel, the IPC namespace and the network namespace. The network namespace separates two containers, or
    two test hosts, on one machine: abstract sockets do not cross it.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return "/".join([boot, str(Path("/proc/self/ns/ipc").readlink()), str(Path("/proc/self/ns/net").readlink())])


def hosts_of(peers: Sequence[PeerInfo]) -> Hosts:
    """Group ranks by host, hosts in the order of their lowest rank. Launchers may assign ranks to hosts in any
    order."""
    hosts: dict[str, list[int]] = {}
    for info in peers:
        hosts.setdefault(info.host, []).append(info.rank)
    return tuple(tuple(ranks) for ranks in hosts.values())


def common_isa(peers: Sequence[PeerInfo]) -> str:
    """Return the newest rung that all ranks can run."""
    return max((info.isa for info in peers), key=ISAS.index)


def route_to(host: str, port: int) -> str:
    """Return the local address from which packets to `host` leave. Sends nothing."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise GroupError(f"there is no route to {host}: {error.strerror or error}") from error


def address_of(rank: int, peers: Sequence[PeerInfo], hosts: Hosts) -> str:
    """Return the address of this rank that all other hosts can reach: loopback if there are no other hosts.

    The host of the store (rank 0's, or torchrun's agent beside it) may resolve its own name to a loopback address, so
    ranks on that host take the route to another host instead.
    """
    if len(hosts) == 1:
        return "127.0.0.1"
    if rank in hosts[0]:
        return route_to(peers[hosts[1][0]].address, 9)
    return peers[rank].address
