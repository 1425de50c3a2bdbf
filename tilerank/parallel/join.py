"""Joining: from "I am rank r of n, the store is there" to a control channel and a group for collectives."""

import datetime
import hmac
import json
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistNetworkError, DistStoreError

from tilerank.kernels import core

from .callers import Callers, refuse
from .channel import Channel, Link, open_link
from .credentials import check_user
from .errors import GroupError
from .group import GlooGroup, Group, SingleGroup
from .hosts import HostGroup, Hosts, Seat, address_of, host_id, hosts_of, route_to
from .shm import ShmGroup, create_segment

if TYPE_CHECKING:
    from .mpi import MpiJob

logger = logging.getLogger(__name__)

HELLO = struct.Struct("<II16s")  # rank, which of the link's two sockets, secret
DATA, WATCH = 0, 1
MARGIN_S = 2.0
READY_POLL_S = 0.02
ANSWER_S = 1.0  # added to the deadline for a request sent to the store at the very end
LINGER_S = 2.0  # rank 0 keeps the store open this long so that the others, too, can see which ranks are missing

T = TypeVar("T")


@dataclass(frozen=True)
class Membership:
    """The rank of this process, and where the ranks meet.

    `store_host`, `store_port`: the TCPStore. Rank 0 hosts it on the listening socket `listen_fd`, which the launcher
    has bound to loopback or to the address that other hosts use; the store then owns it. With None on rank 0, another
    process hosts the store, such as torchrun's agent. `timeout_s` is the deadline of every wait in a collective, and of
    joining unless `join_timeout_s` is given. `attempt` counts restarts of the group if the store outlives it.
    """

    rank: int
    size: int
    store_host: str
    store_port: int
    listen_fd: int | None = None
    timeout_s: float = 60.0
    attempt: int = 0
    join_timeout_s: float | None = None

    @property
    def patience_s(self) -> float:
        """Return the deadline of joining."""
        return self.timeout_s if self.join_timeout_s is None else self.join_timeout_s


@dataclass
class Team:
    """What a rank holds once it has joined: the group for collectives and the channel for control messages."""

    group: Group
    channel: Channel
    hosts: Hosts = ((0,),)
    _store: Store | None = field(default=None, repr=False)  # rank 0 serves it as long as the others may ask
    _mpi: "MpiJob | None" = field(default=None, repr=False)

    def ready(self, timeout_s: float) -> None:
        """Report that this rank has finished work of unequal length, such as loading; rank 0 waits for all ranks.

        To be called once. The other ranks wait for rank 0's next message. GroupError if a rank is lost, or is not ready
        `timeout_s` after rank 0.
        """
        if self._store is None:
            return
        if self.group.rank != 0:
            self._store.set(f"ready/{self.group.rank}", "")
            return
        deadline = time.monotonic() + timeout_s
        for rank in range(1, self.group.size):
            while not self._store.check([f"ready/{rank}"]):
                self.channel.check()
                if time.monotonic() > deadline:
                    raise GroupError(f"rank {rank} was not ready {timeout_s:g} s after rank 0")
                time.sleep(READY_POLL_S)

    def close(self) -> None:
        self.group.close()
        if self._mpi is not None and self.channel.watch.failed is None:
            self._mpi.close()
        self.channel.close()
        self._store = None


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
        return Team(SingleGroup(), Channel(0, None, {}, m.timeout_s))
    deadline = time.monotonic() + m.patience_s
    meeting = _Meeting(m, deadline)
    seats = meeting.roll_call()
    hosts = hosts_of(seats)
    channel = _connect(meeting, seats, hosts)
    try:
        mpi = _mpi_job(m) if collectives == "mpi" else None
        group = _Transports(meeting, seats, hosts, channel, mpi, spin).group(collectives)
    except BaseException:
        channel.close()
        raise
    return Team(group, channel, hosts, meeting.store, mpi)


class _Meeting:
    """The store, with one deadline for all requests together."""

    def __init__(self, m: Membership, deadline: float) -> None:
        self.m = m
        self._deadline = deadline
        timeout = datetime.timedelta(seconds=m.patience_s)
        hosted = m.rank == 0 and m.listen_fd is not None
        try:
            server = _within(
                self.remaining(),
                lambda: TCPStore(
                    m.store_host,
                    m.store_port,
                    is_master=hosted,
                    wait_for_workers=False,
                    master_listen_fd=m.listen_fd if hosted else None,
                    timeout=timeout,
                ),
            )
        except (RuntimeError, TimeoutError) as error:
            raise GroupError(
                f"rank {m.rank} found no store at {m.store_host}:{m.store_port} within {m.patience_s:g} s; "
                "rank 0, or the launcher, hosts it"
            ) from error
        self.store: Store = PrefixStore(f"tilerank/{m.attempt}", server)

    def remaining(self) -> float:
        return max(self._deadline - time.monotonic(), 0.001)

    def get(self, key: str, owner: int) -> str:
        """Return the value that rank `owner` stores under `key`."""
        try:
            return self._wait_for(key)
        except DistStoreError as error:
            raise GroupError(f"rank {owner} did not reach the point `{key}` in time") from error

    def set(self, key: str, value: str) -> None:
        self._ask(lambda: self.store.set(key, value))

    def _wait_for(self, key: str) -> str:
        """Return the value of `key`. DistStoreError if it is not stored in time."""
        self._ask(lambda: self.store.wait([key], datetime.timedelta(seconds=self.remaining())))
        return self._ask(lambda: self.store.get(key)).decode()

    def _ask(self, call: Callable[[], T]) -> T:
        m = self.m
        try:
            return _within(self.remaining() + ANSWER_S, call)
        except TimeoutError as error:
            why = f"did not answer rank {m.rank} within {m.patience_s:g} s: stopped, stuck or far too slow"
            raise GroupError(f"the store at {m.store_host}:{m.store_port} (rank 0 or the launcher) {why}") from error
        except DistNetworkError as error:
            raise GroupError(f"rank 0, or the launcher, closed the store before rank {m.rank} had joined") from error

    def roll_call(self) -> list[Seat]:
        """Return the seats of all ranks, in rank order."""
        m = self.m
        lanes = 0 if core.isa() == "reference" else core.num_threads()
        seat = Seat(m.rank, m.size, host_id(), route_to(m.store_host, m.store_port), lanes)
        if self._ask(lambda: self.store.add(f"seats taken/{m.rank}", 1)) > 1:
            raise GroupError(f"two processes say that they are rank {m.rank} of {m.size}")
        self.set(f"seat/{m.rank}", json.dumps(asdict(seat)))
        seats = []
        for rank in range(m.size):
            try:
                seats.append(Seat(**json.loads(self._wait_for(f"seat/{rank}"))))
            except DistStoreError as error:
                raise self._absent(rank) from error
        for other in seats:
            if other.size != m.size:
                raise GroupError(f"rank {m.rank} expects {m.size} ranks, but rank {other.rank} expects {other.size}")
        return seats

    def _absent(self, first: int) -> GroupError:
        m = self.m
        seats = {rank: f"seat/{rank}" for rank in range(first, m.size)}
        missing = [rank for rank, seat in seats.items() if not self._ask(partial(self.store.check, [seat]))]
        if m.rank == 0:
            time.sleep(LINGER_S)
        names = ", ".join(map(str, missing or [first]))
        return GroupError(f"rank{'s' * (len(missing) > 1)} {names} of {m.size} did not join within {m.patience_s:g} s")


def _within(seconds: float, call: Callable[[], T]) -> T:
    """Return what `call` returns. TimeoutError if it takes longer; the call then continues in an abandoned thread.

    torch's store client has no deadline of its own for most answers of a stopped server. If a server accepts the
    connection and exits, the client connects again, with its whole deadline each time.
    """
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:  # noqa: BLE001
            answer.set_exception(error)

    threading.Thread(target=run, name="tilerank-store", daemon=True).start()
    return answer.result(seconds)


def _connect(meeting: _Meeting, seats: Sequence[Seat], hosts: Hosts) -> Channel:
    """Build the tree: members to the leader of their host, leaders to rank 0."""
    rank = meeting.m.rank
    mine = next(ranks for ranks in hosts if rank in ranks)
    leader, members = mine[0], mine[1:]
    up: Link | None = None
    down: dict[int, Link] = {}
    secret = _secret(meeting)
    if rank != leader:
        name = meeting.get(f"unix/{leader}", leader)
        up = _dial(meeting, leader, lambda: _local_socket(name), secret)
    elif members:
        with socket.socket(socket.AF_UNIX) as listener:
            name = f"tilerank-{secrets.token_hex(16)}"
            listener.bind("\0" + name)
            listener.listen(2 * len(members))
            meeting.set(f"unix/{rank}", name)
            down |= _answer(meeting, listener, members, secret)
    others = [ranks[0] for ranks in hosts[1:]]
    if rank in others:
        host, _, port = meeting.get("tcp", 0).rpartition(" ")
        where = (host, int(port))
        up = _dial(meeting, 0, lambda: socket.create_connection(where, meeting.remaining()), secret)
    elif rank == 0 and others:
        address = address_of(0, seats, hosts)
        with socket.create_server((address, 0), family=_family(address), backlog=2 * len(others)) as listener:
            meeting.set("tcp", f"{address} {listener.getsockname()[1]}")
            down |= _answer(meeting, listener, others, secret)
    return Channel(rank, up, down, meeting.m.timeout_s)


def _secret(meeting: _Meeting) -> bytes:
    """Return the secret of this group, which only processes with access to the store can read."""
    if meeting.m.rank == 0:
        meeting.set("secret", secrets.token_hex(16))
    return bytes.fromhex(meeting.get("secret", 0))


def _local_socket(name: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect("\0" + name)
    return connection


def _dial(meeting: _Meeting, peer: int, connect: Callable[[], socket.socket], secret: bytes) -> Link:
    ends = []
    try:
        for kind in (DATA, WATCH):
            connection = connect()
            ends.append(connection)
            check_user(connection)
            connection.sendall(HELLO.pack(meeting.m.rank, kind, secret))
    except OSError as error:
        for end in ends:
            end.close()
        raise GroupError(
            f"rank {meeting.m.rank} could not connect to rank {peer}: {error.strerror or error}"
        ) from error
    return open_link(peer, *ends)


def _answer(meeting: _Meeting, listener: socket.socket, peers: Iterable[int], secret: bytes) -> dict[int, Link]:
    """Accept both sockets of each of `peers`."""
    until = time.monotonic() + meeting.remaining()
    waiting = {(peer, kind) for peer in peers for kind in (DATA, WATCH)}
    ends: dict[tuple[int, int], socket.socket] = {}
    with Callers(listener, HELLO.size) as callers:
        while waiting:
            for connection, hello in callers.hellos(until - time.monotonic()):
                rank, kind, word = HELLO.unpack(hello)
                if hmac.compare_digest(word, secret) and (rank, kind) in waiting:
                    waiting.remove((rank, kind))
                    ends[rank, kind] = connection
                else:
                    refuse(connection, "not one of the ranks")
            if waiting and time.monotonic() >= until:
                raise GroupError(f"rank {min(waiting)[0]} did not connect to rank {meeting.m.rank} in time")
    return {peer: open_link(peer, ends[peer, DATA], ends[peer, WATCH]) for peer, kind in ends if kind == DATA}


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


@dataclass
class _Transports:
    """Chooses the transport of the collectives and builds it. Every rank makes the same choice."""

    meeting: _Meeting
    seats: Sequence[Seat]
    hosts: Hosts
    channel: Channel
    mpi: "MpiJob | None"
    spin: bool

    def group(self, collectives: str) -> Group:
        m, hosts = self.meeting.m, self.hosts
        everyone = tuple(range(m.size))
        without = [seat.rank for seat in self.seats if not seat.lanes]
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
        if self.meeting.m.rank == 0:
            logger.info("collectives of %d ranks: %s", len(self.seats), text)

    def _inside(self, mine: tuple[int, ...]) -> ShmGroup:
        """Return the group over shared memory among the ranks of this host."""
        m = self.meeting.m
        lanes = min(self.seats[rank].lanes for rank in mine)
        fd = self.channel.share_fd(create_segment(len(mine), lanes) if m.rank == mine[0] else None)
        return ShmGroup(fd, mine.index(m.rank), mine, self.channel.watch, m.timeout_s, spin=self.spin)

    def _between(self, ranks: tuple[int, ...]) -> Group:
        """Return the group over gloo or MPI among `ranks`, which include this one."""
        m, watch = self.meeting.m, self.channel.watch
        # Among leaders alone, a leader may be late because it still waits for a rank of its own host.
        timeout_s = m.timeout_s if len(ranks) == m.size else m.timeout_s + MARGIN_S
        if self.mpi is not None:
            from .mpi import MpiGroup

            return MpiGroup(self.mpi, ranks.index(m.rank), timeout_s, watch, ranks)
        store = PrefixStore("gloo", self.meeting.store)
        return GlooGroup(
            store, ranks.index(m.rank), address_of(m.rank, self.seats, self.hosts), timeout_s, watch, ranks
        )


def _mpi_job(m: Membership) -> "MpiJob":
    """Enter the MPI job. mpi4py is optional, so it is imported here and not at the top."""
    try:
        from .mpi import MpiJob
    except ImportError as error:
        raise GroupError(f"collectives over MPI need mpi4py, which cannot be imported: {error}") from error
    return MpiJob(m.rank, m.size)
