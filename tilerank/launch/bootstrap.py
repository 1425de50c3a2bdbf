"""From a `Meeting` to an address: rank 0 binds a listening socket, the other ranks receive its address. No torch."""

import contextlib
import fcntl
import os
import socket
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilerank.parallel.credentials import peer_credentials

from .errors import LaunchError
from .rendezvous import Identity, Meeting

RENDEZVOUS_S = (
    120.0  # for all ranks to arrive, which includes importing torch from a cold network disk but not loading a model
)
PROBE_S = 3.0  # per address of a host with several networks, some of which may be unreachable

_MARKERS = ("TILERANK_RANK", "TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "RANK")


@dataclass(frozen=True)
class Store:
    """Where the store is. Rank 0 serves it on the bound socket `fd`; with None, another process serves it."""

    host: str
    port: int
    fd: int | None
    attempt: int = 0


@dataclass(frozen=True)
class Process:
    """A process, identified beyond reuse of its pid by `started`, its start in clock ticks since boot."""

    pid: int
    started: int


def find_store(identity: Identity, meeting: Meeting, *, fd: int | None = None, finalize: bool = True) -> Store:
    """Return the store's address on every rank, once rank 0 has bound it.

    `fd` is the listening socket that our supervisor passed to rank 0. `finalize=False` keeps MPI running after it has
    carried the address; only collectives over MPI need that, and ranks that wait in MPI keep a core busy.
    Raises LaunchError if the address cannot be bound or reached, or if ranks do not arrive within RENDEZVOUS_S.
    """
    if meeting.kind in ("given", "agent"):
        return Store(meeting.host, meeting.port, fd, meeting.attempt)
    if meeting.kind == "address":
        if identity.rank != 0:
            return Store(meeting.host, meeting.port, None)
        listener = listen(meeting.host, meeting.port, one_host=identity.one_host)
        return Store(meeting.host, listener.getsockname()[1], listener.detach())
    if meeting.kind == "launcher":
        return _meet_under_launcher(identity, meeting.port)
    return _meet_over_mpi(identity, meeting.port, finalize=finalize)


def listen(host: str, port: int, *, one_host: bool = True) -> socket.socket:
    """Return a socket listening on `host`, an address of this machine; port 0 picks a free port."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as e:
        raise LaunchError(f"{host} has no address: {e.strerror} (--master-addr, MASTER_ADDR)") from e
    family, kind, proto, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    ip = str(address[0])
    if not one_host and (ip.startswith("127.") or ip == "::1"):
        raise LaunchError(
            f"{host} is {ip} on the machine of rank 0, which ranks on other hosts cannot reach; "
            "set --master-addr or MASTER_ADDR to an address that they can reach"
        )
    listener = socket.socket(family, kind, proto)
    # A port whose last connections are still in TIME_WAIT counts as free.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(1024)
    except OSError as e:
        listener.close()
        raise LaunchError(
            f"rank 0 cannot listen on {host} port {port}: {e.strerror} (--master-addr, --master-port)"
        ) from e
    return listener


def launcher_process(proc: Path = Path("/proc")) -> Process:
    """Return the process that all ranks of this host descend from: the nearest ancestor that is not part of a rank.

    A wrapper script or a pyenv shim between mpirun and us carries the rank variables, too; the launcher has none.
    """
    marker = next((name for name in _MARKERS if name in os.environ), None)
    pid = os.getppid()
    while pid > 1 and marker is not None:
        try:
            environment = (proc / str(pid) / "environ").read_bytes().split(b"\0")
        except OSError:
            break  # another user's process: Slurm's step daemon
        if not any(entry.startswith(f"{marker}=".encode()) for entry in environment):
            break
        pid = int(_stat_fields(proc, pid)[1])
    return Process(pid, int(_stat_fields(proc, pid)[19]))


def _stat_fields(proc: Path, pid: int) -> list[str]:
    """Fields 3, 4, ... of /proc/PID/stat, which follow the parenthesised name."""
    return (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()


def _meet_under_launcher(identity: Identity, port: int) -> Store:
    """Send rank 0's port to every rank of the same launcher over an abstract unix socket.

    The name vanishes with the socket, so nothing is left behind when a process dies. Both ends check the peer's user.
    """
    launcher = launcher_process()
    name = f"\0tilerank-{os.getuid()}-{launcher.pid}-{launcher.started}"
    deadline = time.monotonic() + RENDEZVOUS_S
    if identity.rank != 0:
        return Store("127.0.0.1", _ask_port(identity, name, deadline), None)
    listener = listen("127.0.0.1", port)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        try:
            door.bind(name)
        except OSError as e:
            raise LaunchError(f"another rank 0 was started by {identity.launcher} (process {launcher.pid})") from e
        door.listen(identity.size)
        missing = set(range(1, identity.size))
        while missing:
            door.settimeout(max(deadline - time.monotonic(), 0.01))
            try:
                visitor, _ = door.accept()
            except TimeoutError as e:
                raise LaunchError(
                    f"{_ranks(missing)} of {identity.size} did not arrive within {RENDEZVOUS_S:.0f} s"
                ) from e
            with visitor, contextlib.suppress(OSError):
                visitor.settimeout(PROBE_S)
                if peer_credentials(visitor)[1] == os.getuid():
                    (rank,) = struct.unpack("<I", visitor.recv(4, socket.MSG_WAITALL).ljust(4, b"\0"))
                    visitor.sendall(struct.pack("<I", listener.getsockname()[1]))
                    missing.discard(rank)
    return Store("127.0.0.1", listener.getsockname()[1], listener.detach())


def _ask_port(identity: Identity, name: str, deadline: float) -> int:
    while time.monotonic() < deadline:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door, contextlib.suppress(OSError):
            door.settimeout(max(deadline - time.monotonic(), 0.01))
            door.connect(name)
            if (user := peer_credentials(door)[1]) != os.getuid():
                raise LaunchError(f"user {user} occupies the socket at which the ranks of this job meet")
            door.sendall(struct.pack("<I", identity.rank))
            answer = door.recv(4, socket.MSG_WAITALL)
            if len(answer) == 4:
                return int(struct.unpack("<I", answer)[0])
        time.sleep(0.02)
    raise LaunchError(
        f"rank {identity.rank} waited for rank 0 of {identity.size}, which did not arrive within {RENDEZVOUS_S:.0f} s"
    )


def _meet_over_mpi(identity: Identity, port: int, *, finalize: bool) -> Store:
    """Broadcast all addresses of rank 0 over MPI, and take the first one that every rank can reach."""
    mpi = _import_mpi(identity)
    mpi.Init()
    world = mpi.COMM_WORLD
    if (world.rank, world.size) != (identity.rank, identity.size):
        raise LaunchError(
            f"{identity.launcher} started this as rank {identity.rank} of {identity.size}, but the MPI library that "
            f"mpi4py loaded reports rank {world.rank} of {world.size}: it does not belong to this mpirun"
        )
    listeners = [listen(address, port) for address in interface_addresses()] if identity.rank == 0 else []
    offers = world.bcast([listener.getsockname() for listener in listeners], root=0)
    reached = [int(_reachable(host, number)) for host, number in offers]
    everybody = [world.allreduce(own, op=mpi.MIN) for own in reached]
    if finalize:
        # Finalised right after the exchange: some launchers kill all ranks if one dies before MPI_Finalize.
        mpi.Finalize()
    if 1 not in everybody:
        hosts = ", ".join(host for host, _ in offers) or "none"
        raise LaunchError(
            f"no address of rank 0's host ({hosts}) is reachable from all ranks; set MASTER_ADDR and MASTER_PORT"
        )
    chosen = everybody.index(1)
    for number, listener in enumerate(listeners):
        if number != chosen:
            listener.close()
    host, number = offers[chosen]
    return Store(host, number, listeners[chosen].detach() if listeners else None)


def _import_mpi(identity: Identity) -> Any:
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False  # the code above decides whether and when to finalise
        from mpi4py import MPI
    except (ImportError, RuntimeError) as e:
        reason = "mpi4py is not installed" if isinstance(e, ImportError) else f"mpi4py found no MPI library ({e})"
        raise LaunchError(
            f"{identity.launcher} started ranks on several hosts without MASTER_ADDR, so they can only meet through "
            f"mpi4py, but {reason}: pip install 'tilerank[mpi]', or set MASTER_ADDR and MASTER_PORT"
        ) from e
    return MPI


def interface_addresses() -> list[str]:
    """Return the IPv4 addresses of this host's interfaces, without loopback."""
    addresses = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without IPv4
                siocgifaddr = 0x8915
                reply = fcntl.ioctl(probe, siocgifaddr, struct.pack("256s", name.encode()[:15]))
                addresses.append(socket.inet_ntoa(reply[20:24]))
    return [address for address in addresses if not address.startswith("127.")]


def _reachable(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=PROBE_S):
            return True
    except OSError:
        return False


def _ranks(ranks: Iterable[int]) -> str:
    names = ", ".join(map(str, sorted(ranks)))
    return f"rank{'s' if ',' in names else ''} {names}"
