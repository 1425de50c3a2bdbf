"""From a `RendezvousMethod` to an address: rank 0 binds a listening socket, the others learn its address. No torch."""

import contextlib
import fcntl
import logging
import os
import secrets
import socket
import struct
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import LaunchError
from .rendezvous import Identity, RendezvousMethod, given_secret

log = logging.getLogger(__name__)

RESOLVE_S = 3.0  # for an answer about a name; after that, users are told that there is none yet
PROBE_S = 3.0  # per address of a host with several networks, some of which may be unreachable

_MARKERS = ("TILERANK_RANK", "TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "RANK")


@dataclass(frozen=True)
class RendezvousAddress:
    """The address at which the ranks meet (parallel.rendezvous.Membership). Rank 0 listens on the bound socket `fd`."""

    host: str
    port: int
    fd: int | None
    secret: str = ""
    agent: bool = False
    attempt: int = 0


@dataclass(frozen=True)
class LauncherProcess:
    """A process, identified beyond reuse of its pid by `started`, its start in clock ticks since boot."""

    pid: int
    started: int


def find_address(
    identity: Identity, method: RendezvousMethod, *, fd: int | None = None, finalize: bool = True
) -> RendezvousAddress:
    """Return where the ranks meet, on every rank. Rank 0 has bound it.

    `fd` is the listening socket that our supervisor passed to rank 0. `finalize=False` keeps MPI running after it has
    carried the address; only collectives over MPI need that, and ranks that wait in MPI keep a core busy.
    Raises LaunchError if the address cannot be bound or reached, and without a secret for ranks on several hosts.
    """
    if method.kind == "mpi":
        return _address_over_mpi(identity, method.port, finalize=finalize)
    if method.kind in ("launcher", "port"):
        return _local_address(identity, method)
    if method.host.startswith("@"):
        return RendezvousAddress(method.host, 0, fd)
    secret = given_secret(os.environ)
    if identity.rank != 0 and identity.local_rank == 0:
        _warn_of_unknown_name(method.host)
    if identity.rank == 0 and method.kind == "agent":
        # The agent's host may resolve its own name to a loopback address, which other hosts do not reach.
        fd = listen("::" if socket.has_dualstack_ipv6() else "0.0.0.0", 0).detach()
    elif identity.rank == 0 and method.kind == "address":
        fd = listen(method.host, method.port, one_host=False).detach()
    return RendezvousAddress(method.host, method.port, fd, secret, method.kind == "agent", method.attempt)


def _warn_of_unknown_name(host: str) -> None:
    """Warn if the name of rank 0's host does not resolve. It may do so later, while the ranks try to reach it."""
    found = Future[object]()

    def resolve() -> None:
        try:
            found.set_result(socket.getaddrinfo(host, None))
        except OSError as e:
            found.set_exception(e)

    threading.Thread(target=resolve, name="tilerank-resolve", daemon=True).start()
    try:
        found.result(RESOLVE_S)
    except TimeoutError:
        log.warning("%s: no answer yet from the name service (--master-addr, MASTER_ADDR)", host)
    except OSError as e:
        log.warning("%s does not resolve: %s (--master-addr, MASTER_ADDR); trying again", host, e.strerror)


def listen_locally(name: str, taken: str) -> socket.socket:
    """Return a unix socket listening at the abstract `name`, "@...". It vanishes with the process. `taken`: the error
    if another process has it."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind("\0" + name[1:])
        listener.listen(1024)
    except OSError as e:
        listener.close()
        raise LaunchError(taken) from e
    return listener


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


def launcher_process(proc: Path = Path("/proc")) -> LauncherProcess:
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
    return LauncherProcess(pid, int(_stat_fields(proc, pid)[19]))


def _stat_fields(proc: Path, pid: int) -> list[str]:
    """Fields 3, 4, ... of /proc/PID/stat, which follow the parenthesised name."""
    return (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()


def _local_address(identity: Identity, method: RendezvousMethod) -> RendezvousAddress:
    """Return a unix socket whose name all ranks of this host can derive. Both ends of a connection check the user."""
    if method.kind == "port":
        name, by = f"port-{method.port}", f"for port {method.port} (MASTER_PORT)"
    else:
        launcher = launcher_process()
        name, by = f"{launcher.pid}-{launcher.started}", f"by {identity.launcher} (process {launcher.pid})"
    name = f"@tilerank-{os.getuid()}-{name}"
    fd = listen_locally(name, f"another rank 0 was started {by}").detach() if identity.rank == 0 else None
    return RendezvousAddress(name, 0, fd)


def _address_over_mpi(identity: Identity, port: int, *, finalize: bool) -> RendezvousAddress:
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
    # MPI carries the secret as it carries the addresses. One that was given is in every environment, so it stays there.
    made = "" if "TILERANK_SECRET" in os.environ else secrets.token_hex(32)
    offers, made = world.bcast(([listener.getsockname() for listener in listeners], made), root=0)
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
    return RendezvousAddress(
        host, number, listeners[chosen].detach() if listeners else None, made or given_secret(os.environ)
    )


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
