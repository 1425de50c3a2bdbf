"""Which ranks share a host, and the address at which a rank is reached by the others."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import GroupError


@dataclass(frozen=True)
class Seat:
    """What a rank tells the others about itself when it joins."""

    rank: int
    size: int
    host: str
    address: str
    lanes: int


def host_id() -> str:
    """Equal for processes that can share memory and unix sockets: the same kernel, IPC and network namespace.

    Network namespaces tell two containers, or two test hosts, on one machine apart; abstract sockets do not cross them.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return "/".join([boot, str(Path("/proc/self/ns/ipc").readlink()), str(Path("/proc/self/ns/net").readlink())])


def hosts_of(seats: Sequence[Seat]) -> tuple[tuple[int, ...], ...]:
    """Ranks by host; hosts in the order of their lowest rank. Launchers may deal ranks to hosts in any order."""
    hosts: dict[str, list[int]] = {}
    for seat in seats:
        hosts.setdefault(seat.host, []).append(seat.rank)
    return tuple(tuple(ranks) for ranks in hosts.values())


def route_to(host: str, port: int) -> str:
    """The local address from which packets to `host` leave; nothing is sent."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise GroupError(f"there is no route to {host}: {error.strerror or error}") from error


def address_of(rank: int, seats: Sequence[Seat], hosts: Sequence[Sequence[int]]) -> str:
    """The address of this rank that all other hosts can reach: loopback when there are none.

    The store's host (rank 0's, or torchrun's agent beside it) may know itself by a loopback name; seen from there the
    route to another host tells.
    """
    if len(hosts) == 1:
        return "127.0.0.1"
    if rank in hosts[0]:
        return route_to(seats[hosts[1][0]].address, 9)
    return seats[rank].address
