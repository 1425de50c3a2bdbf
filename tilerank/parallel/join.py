"""Joining: from "I am rank r of n, the store is there" to a control channel and a group for collectives."""

import logging
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tilerank.kernels import core

from .channel import Channel, Link, open_link
from .credentials import TAKEN, authenticate
from .errors import GroupError
from .gloo import GlooGroup
from .group import Group, SingleGroup
from .handshakes import PendingHandshakes, refuse
from .host_group import HostGroup
from .hosts import Hosts, PeerInfo, address_of, common_isa, hosts_of
from .rendezvous import DATA, WATCH, Membership, Rendezvous, RendezvousStore
from .shm import ShmGroup, create_segment

if TYPE_CHECKING:
    from .mpi import MpiJob

logger = logging.getLogger(__name__)

MARGIN_S = 2.0
READY_POLL_S = 0.02


@dataclass
class Team:
    """What a rank holds once it has joined: the group for collectives and the channel for control messages.

    isa: the newest rung of kernels that all ranks can run.
    """

    group: Group
    channel: Channel
    isa: str
    hosts: Hosts = ((0,),)
    _rendezvous: Rendezvous | None = field(default=None, repr=False)  # until all are ready
    _mpi: "MpiJob | None" = field(default=None, repr=False)

    def ready(self, timeout_s: float) -> None:
        """Report that this rank has finished work of unequal length, such as loading; rank 0 waits for all ranks.

        To be called once. The other ranks wait for rank 0's next message. GroupError if a rank is lost, or is not ready
        `timeout_s` after rank 0.
        """
        if self._rendezvous is None:
            return
        if self.group.rank != 0:
            self._rendezvous.set(f"ready/{self.group.rank}", b"")
        deadline = time.monotonic() + timeout_s
        for rank in range(1, self.group.size) if self.group.rank == 0 else ():
            while not self._rendezvous.has(f"ready/{rank}"):
                self.channel.check()
                if time.monotonic() > deadline:
                    raise GroupError(f"rank {rank} was not ready {timeout_s:g} s after rank 0")
                time.sleep(READY_POLL_S)
        self._end_rendezvous()

    def close(self) -> None:
        self._end_rendezvous()
        self.group.close()
        if self._mpi is not None and self.channel.watch.failed is None:
            self._mpi.close()
        self.channel.close()

    def _end_rendezvous(self) -> None:
        if self._rendezvous is not None:
            self._rendezvous.close()
            self._rendezvous = None


def join(m: Membership, collectives: str = "auto", *, spin: bool = False) -> Team:
    """Meet the other ranks and connect to them. GroupError names the ranks that are missing or that contradict.

    `collectives`: "auto" takes shared memory inside a host and gloo between hosts. "mpi" takes MPI on one host, and MPI
    instead of gloo between hosts. "gloo" takes gloo everywhere. `spin`: waits in shared memory spin about 100 us before
    they sleep; use it only where each thread of each rank has a core of its own. Start the thread pool first: the
    shared memory is laid out for as many threads as the smallest rank has.
    """
    if collectives not in ("auto", "gloo", "mpi"):
        raise GroupError(f"collectives {collectives!r} are unknown; expected auto, gloo or mpi")
    if not 0 <= m.rank < m.size:
        raise GroupError(f"rank {m.rank} of {m.size} is impossible: ranks are 0 to {m.size - 1}")
    if m.size == 1:
        return Team(SingleGroup(), Channel(0, None, {}, m.timeout_s), core.isa())
    rendezvous = Rendezvous(m)
    peers = rendezvous.peers
    hosts = hosts_of(peers)
    try:
        channel = _connect(rendezvous, hosts)
        try:
            mpi = _mpi_job(m) if collectives == "mpi" else None
            group = _Transports(rendezvous, peers, hosts, channel, mpi, spin).group(collectives)
        except BaseException:
            channel.close()
            raise
    except BaseException:
        rendezvous.close()
        raise
    return Team(group, channel, common_isa(peers), hosts, rendezvous, mpi)


def _connect(rendezvous: Rendezvous, hosts: Hosts) -> Channel:
    """Build the tree: members to the leader of their host, leaders to rank 0."""
    rank = rendezvous.membership.rank
    mine = next(ranks for ranks in hosts if rank in ranks)
    leader, members = mine[0], mine[1:]
    up: Link | None = None
    down: dict[int, Link] = {}
    if rank != leader:
        name = rendezvous.get(f"unix/{leader}").decode()
        up = _dial(rendezvous, leader, lambda: _local_socket(name))
    elif members:
        with socket.socket(socket.AF_UNIX) as listener:
            name = f"tilerank-{secrets.token_hex(16)}"
            listener.bind("\0" + name)
            listener.listen(2 * len(members))
            rendezvous.set(f"unix/{rank}", name.encode())
            down |= _answer(rendezvous, listener, members)
    others = [ranks[0] for ranks in hosts[1:]]
    if rank in others:
        host, _, port = rendezvous.get("tcp").decode().rpartition(" ")
        up = _dial(rendezvous, 0, lambda: socket.create_connection((host, int(port)), rendezvous.remaining()))
    elif rank == 0 and others:
        address = address_of(0, rendezvous.peers, hosts)
        with socket.create_server((address, 0), family=_family(address), backlog=2 * len(others)) as listener:
            rendezvous.set("tcp", f"{address} {listener.getsockname()[1]}".encode())
            down |= _answer(rendezvous, listener, others)
    return Channel(rank, up, down, rendezvous.membership.timeout_s)


def _local_socket(name: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect("\0" + name)
    return connection


def _dial(rendezvous: Rendezvous, peer: int, connect: Callable[[], socket.socket]) -> Link:
    ends = []
    try:
        for kind in (DATA, WATCH):
            connection = connect()
            ends.append(connection)
            connection.settimeout(rendezvous.remaining())
            authenticate(connection, rendezvous.membership.rank, kind, rendezvous.secret, peer)
    except (OSError, GroupError) as error:
        for end in ends:
            end.close()
        if isinstance(error, GroupError):
            raise
        raise GroupError(
            f"rank {rendezvous.membership.rank} could not connect to rank {peer}: {error.strerror or error}"
        ) from error
    return open_link(peer, *ends)


def _answer(rendezvous: Rendezvous, listener: socket.socket, peers: Iterable[int]) -> dict[int, Link]:
    """Accept both sockets of each of `peers`."""
    until = time.monotonic() + rendezvous.remaining()
    waiting = {(peer, kind) for peer in peers for kind in (DATA, WATCH)}
    ends: dict[tuple[int, int], socket.socket] = {}
    with PendingHandshakes(listener, rendezvous.secret) as handshakes:
        while waiting:
            for arrived in handshakes.completed(until - time.monotonic()):
                if (arrived.rank, arrived.kind) not in waiting:
                    refuse(arrived.connection, f"rank {arrived.rank} is not expected here", TAKEN)
                elif arrived.admit():
                    waiting.remove((arrived.rank, arrived.kind))
                    ends[arrived.rank, arrived.kind] = arrived.connection
            if waiting and time.monotonic() >= until:
                raise GroupError(f"rank {min(waiting)[0]} did not connect to rank {rendezvous.membership.rank} in time")
    return {peer: open_link(peer, ends[peer, DATA], ends[peer, WATCH]) for peer, kind in ends if kind == DATA}


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


@dataclass
class _Transports:
    """Chooses the transport of the collectives and builds it. Every rank makes the same choice."""

    rendezvous: Rendezvous
    peers: Sequence[PeerInfo]
    hosts: Hosts
    channel: Channel
    mpi: "MpiJob | None"
    spin: bool

    def group(self, collectives: str) -> Group:
        m, hosts = self.rendezvous.membership, self.hosts
        everyone = tuple(range(m.size))
        without = [info.rank for info in self.peers if not info.lanes]
        if collectives == "gloo" or without or (collectives == "mpi" and len(hosts) == 1):
            why = f", since shared memory needs the compiled core, which rank {without[0]} lacks" if without else ""
            self._say(f"{'MPI' if self.mpi else 'gloo'} between all ranks{why}")
            return self._between(everyone)
        self._say("shared memory" + (f" inside {len(hosts)} hosts" if len(hosts) > 1 else ""))
        mine = next(ranks for ranks in hosts if m.rank in ranks)
        inside = self._inside(mine) if len(mine) > 1 else SingleGroup()
        if len(hosts) == 1:
            return inside
        self._say(f"{'MPI' if self.mpi else 'gloo'} between the first ranks of the hosts")
        leaders = tuple(ranks[0] for ranks in hosts)
        between = self._between(leaders) if m.rank in leaders else None
        return HostGroup(m.rank, hosts, inside, between, self.channel.watch, m.timeout_s + 2 * MARGIN_S)

    def _say(self, text: str) -> None:
        if self.rendezvous.membership.rank == 0:
            logger.info("collectives of %d ranks: %s", len(self.peers), text)

    def _inside(self, mine: tuple[int, ...]) -> ShmGroup:
        """Return the group over shared memory among the ranks of this host."""
        m = self.rendezvous.membership
        lanes = min(self.peers[rank].lanes for rank in mine)
        fd = self.channel.share_fd(create_segment(len(mine), lanes) if m.rank == mine[0] else None)
        return ShmGroup(fd, mine.index(m.rank), mine, self.channel.watch, m.timeout_s, spin=self.spin)

    def _between(self, ranks: tuple[int, ...]) -> Group:
        """Return the group over gloo or MPI among `ranks`, which include this one."""
        m, watch = self.rendezvous.membership, self.channel.watch
        # Among leaders alone, a leader may be late because it still waits for a rank of its own host.
        timeout_s = m.timeout_s if len(ranks) == m.size else m.timeout_s + MARGIN_S
        if self.mpi is not None:
            from .mpi import MpiGroup

            return MpiGroup(self.mpi, ranks.index(m.rank), timeout_s, watch, ranks)
        return GlooGroup(
            RendezvousStore(self.rendezvous),
            ranks.index(m.rank),
            address_of(m.rank, self.peers, self.hosts),
            timeout_s,
            watch,
            ranks,
        )


def _mpi_job(m: Membership) -> "MpiJob":
    """Enter the MPI job. mpi4py is optional, so it is imported here and not at the top."""
    try:
        from .mpi import MpiJob
    except ImportError as error:
        raise GroupError(f"collectives over MPI need mpi4py, which cannot be imported: {error}") from error
    return MpiJob(m.rank, m.size)
