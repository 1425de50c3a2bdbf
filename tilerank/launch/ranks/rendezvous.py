"""Who this process is and how the ranks meet: each launcher's environment as an `Identity` and a `RendezvousMethod`.

Pure functions over an environment mapping; `bootstrap.py` turns a `RendezvousMethod` into an address. Imports no torch.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ..errors import LaunchError

Launcher = Literal["tilerank", "torchrun", "Open MPI", "MPICH", "Slurm", "environment", "none"]

# Default ports for ranks under srun: below the ephemeral range of Linux (32768 and up), and spread by job and step so
# that two steps on one host seldom collide.
SLURM_PORTS = range(20000, 30000)

SHORTEST_SECRET = 16  # characters of TILERANK_SECRET


@dataclass(frozen=True)
class Identity:
    """The place of one process: its rank of `size`, and its place among the `local_size` ranks of its host."""

    launcher: Launcher
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def one_host(self) -> bool:
        return self.local_size == self.size


@dataclass(frozen=True)
class RendezvousMethod:
    """The way in which the ranks find rank 0. On one host they meet at a unix socket, which other users cannot enter.

    given: our supervisor has already bound it (rank 0 inherits the socket); host "@name" is a unix socket
    agent: rank 0 picks a port and sends it through the store of torchrun's agent at host:port
    address: rank 0 binds host:port, all others connect to it
    port: rank 0 binds a unix socket named after the port
    launcher: rank 0 binds a unix socket named after the launcher process, whose children all ranks are
    mpi: rank 0 picks a port and broadcasts its addresses over MPI
    """

    kind: Literal["given", "agent", "address", "port", "launcher", "mpi"]
    host: str = ""
    port: int = 0
    attempt: int = 0  # restarts of the ranks so far, where the agent's store outlives them


@dataclass(frozen=True)
class _Convention:
    """The variables in which one launcher passes its numbers. It is in charge if all of `markers` are set."""

    launcher: Launcher
    markers: tuple[str, ...]
    rank: str
    size: str
    local_rank: str
    local_size: str


_NUMBERS = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")

# In order of detection. Slurm precedes every convention that checks PMI_RANK alone: `srun --mpi=pmi2` sets it as well.
_CONVENTIONS = (
    _Convention(
        "tilerank", ("TILERANK_RANK",), *(f"TILERANK_{n}" for n in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    ),
    _Convention("torchrun", ("TORCHELASTIC_RUN_ID",), "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    _Convention("Open MPI", ("OMPI_COMM_WORLD_RANK",), *(f"OMPI_COMM_WORLD_{name}" for name in _NUMBERS)),
    _Convention("MPICH", ("PMI_RANK", "MPI_LOCALRANKID"), "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _Convention(
        "Slurm",
        ("SLURM_PROCID", "SLURM_STEP_ID", "SLURM_LOCALID"),  # a batch script outside a step is a single process
        "SLURM_PROCID",
        "SLURM_NTASKS",
        "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE",
    ),
    _Convention("environment", ("RANK", "WORLD_SIZE"), "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
)

# Variables that a supervisor removes from the environment of its ranks, because it assigns their numbers itself.
IDENTITY_VARIABLES = re.compile(
    r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|MASTER_ADDR|MASTER_PORT|MPI_LOCALRANKID|MPI_LOCALNRANKS)$"
    r"|TILERANK_(RANK|SIZE|LOCAL_RANK|LOCAL_SIZE|RENDEZVOUS|FD|STATUS|CONTROL|WEIGHTS|HELD|GIVES|TAKES)"
    r"|(TORCHELASTIC_|OMPI_COMM_WORLD_|PMI_|PMIX_)"
)


def identify(env: Mapping[str, str]) -> Identity:
    """Return this process's place according to the launcher that started it, or `Identity("none")` without a launcher.

    Raises LaunchError for impossible numbers and for two launchers that contradict each other.
    """
    found: list[tuple[_Convention, Identity]] = []
    for convention in _CONVENTIONS:
        covered = any(c.rank == convention.rank for c, _ in found)  # torchrun writes RANK and WORLD_SIZE itself
        if not covered and all(name in env for name in convention.markers):
            found.append((convention, _read(convention, env)))
    if not found:
        if "PMI_RANK" in env or "PMIX_RANK" in env:
            name = "PMI_RANK" if "PMI_RANK" in env else "PMIX_RANK"
            raise LaunchError(
                f"{name}={env[name]} shows that an MPI launcher started this process, but not how many ranks share "
                "this host; set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and MASTER_ADDR, MASTER_PORT instead"
            )
        return Identity("none")
    chosen, identity = found[0]
    for other, said in found[1:]:
        # torchrun and mpirun run under Slurm as one step with one task per host: the step numbers hosts, not ranks.
        nested = other.launcher == "Slurm" and said.local_size == 1
        if not nested and (said.rank, said.size) != (identity.rank, identity.size):
            raise LaunchError(
                f"{_spoken(chosen)} says rank {identity.rank} of {identity.size} ({chosen.rank}, {chosen.size}), but "
                f"{_spoken(other)} says rank {said.rank} of {said.size} ({other.rank}, {other.size}); "
                "start the ranks with one launcher or unset the other's variables"
            )
    return identity


def check_tp(identity: Identity, tp: int | None) -> None:
    """Refuse a --tp that differs from the number of processes that a foreign launcher started."""
    if tp is not None and tp != identity.size:
        raise LaunchError(
            f"--tp {tp}, but {identity.launcher} started {identity.size} rank{'s' if identity.size != 1 else ''}; "
            f"start {tp} processes or omit --tp"
        )


def starts_ranks(identity: Identity) -> bool:
    """Return whether this process is a user's command that starts the ranks itself, rather than one of the ranks.

    A Slurm step of one task counts as a command: inside an allocation everything runs in one, even interactive shells.
    """
    return identity.launcher == "none" or (identity.launcher == "Slurm" and identity.size == 1)


def rendezvous_method(
    identity: Identity, env: Mapping[str, str], address: str | None = None, port: int | None = None
) -> RendezvousMethod:
    """Return where the ranks of `identity` meet. `address` and `port` are --master-addr and --master-port if given."""
    if identity.launcher == "tilerank":
        given = _text(env, "TILERANK_RENDEZVOUS")
        if given.startswith("@"):
            return RendezvousMethod("given", given)
        bound, _, number = given.rpartition(":")
        return RendezvousMethod("given", bound, _number(env, "TILERANK_RENDEZVOUS", number))
    if identity.one_host and identity.launcher != "environment":
        return RendezvousMethod("launcher")
    if identity.launcher == "torchrun" and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        attempt = _number(env, "TORCHELASTIC_RESTART_COUNT", env.get("TORCHELASTIC_RESTART_COUNT", "0"))
        return RendezvousMethod("agent", _text(env, "MASTER_ADDR"), _number(env, "MASTER_PORT"), attempt)
    host = address or env.get("MASTER_ADDR")
    if host:
        if port is None and "MASTER_PORT" not in env and identity.launcher == "Slurm":
            port = _slurm_port(env)
        port = _number(env, "MASTER_PORT") if port is None else port
        return RendezvousMethod("port", port=port) if identity.one_host else RendezvousMethod("address", host, port)
    if identity.launcher in ("torchrun", "environment"):
        raise LaunchError(
            f"rank {identity.rank} of {identity.size} has RANK and WORLD_SIZE but no MASTER_ADDR; "
            "set MASTER_ADDR and MASTER_PORT to the address and port of rank 0"
        )
    if identity.launcher == "Slurm":
        return RendezvousMethod("address", first_host(_text(env, "SLURM_STEP_NODELIST")), port or _slurm_port(env))
    return RendezvousMethod("mpi", port=port or 0)


def given_secret(env: Mapping[str, str]) -> str:
    """Return the secret that ranks on several hosts were given. LaunchError without one."""
    secret = env.get("TILERANK_SECRET", "")
    how = (
        "make one with TILERANK_SECRET=$(openssl rand -hex 32) and give the same to the command on every host, "
        "in its environment"
    )
    if not secret:
        raise LaunchError(f"ranks on several hosts need TILERANK_SECRET, so that no other machine can join them; {how}")
    if len(secret) < SHORTEST_SECRET:
        raise LaunchError(f"TILERANK_SECRET has {len(secret)} characters, expected at least {SHORTEST_SECRET}; {how}")
    return secret


def first_host(nodelist: str) -> str:
    """Return the first host of Slurm's compressed list: "n[01-04,07],gpu3" -> "n01"."""
    bracketed = re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", nodelist)
    return bracketed.split(",")[0]


def tasks_on_host(tasks_per_node: str, node: int) -> int:
    """Return the count of host number `node` from Slurm's compressed counts: "2(x3),1" is 2, 2, 2, 1."""
    counts: list[int] = []
    for group in tasks_per_node.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", group.strip())
        if match is None:
            raise LaunchError(f'SLURM_STEP_TASKS_PER_NODE={tasks_per_node} is not of the form "2(x3),1"')
        counts += [int(match[1])] * int(match[2] or 1)
    if node >= len(counts):
        raise LaunchError(
            f"SLURM_NODEID={node}, but SLURM_STEP_TASKS_PER_NODE={tasks_per_node} lists {len(counts)} hosts"
        )
    return counts[node]


def _read(convention: _Convention, env: Mapping[str, str]) -> Identity:
    rank, size = _number(env, convention.rank), _number(env, convention.size)
    if convention.launcher == "Slurm":
        local_rank = _number(env, convention.local_rank)
        node = _number(env, "SLURM_NODEID", env.get("SLURM_NODEID", "0"))
        local_size = tasks_on_host(_text(env, convention.local_size), node)
    elif convention.launcher == "environment" and convention.local_rank not in env:
        # RANK and WORLD_SIZE alone mean either that all ranks share one machine, or one process per host (Kubernetes).
        here = env.get("MASTER_ADDR", "localhost") in ("localhost", "127.0.0.1")
        local_rank, local_size = (rank, size) if here else (0, 1)
    else:
        local_rank, local_size = _number(env, convention.local_rank), _number(env, convention.local_size)
    for name, value, bound_name, bound in (
        (convention.rank, rank, convention.size, size),
        (convention.local_rank, local_rank, convention.local_size, local_size),
    ):
        if value >= bound:
            raise LaunchError(f"{name}={value} is not below {bound_name}={bound}")
    if local_size > size:
        raise LaunchError(
            f"{convention.local_size} says {local_size} ranks on this host, but {convention.size} says {size} in all"
        )
    return Identity(convention.launcher, rank, size, local_rank, local_size)


def _text(env: Mapping[str, str], name: str) -> str:
    if not env.get(name):
        raise LaunchError(f"{name} is not set, although the launcher has set others that belong to it")
    return env[name]


def _number(env: Mapping[str, str], name: str, text: str | None = None) -> int:
    text = _text(env, name) if text is None else text
    if not re.fullmatch(r"\d{1,9}", text):
        raise LaunchError(f"{name}={env.get(name, '')} is not a whole number")
    return int(text)


def _slurm_port(env: Mapping[str, str]) -> int:
    # Step ids restart in every job; job and step together are unique on a host while both run.
    key = _number(env, "SLURM_JOB_ID") * 31 + _number(env, "SLURM_STEP_ID")
    return SLURM_PORTS[key % len(SLURM_PORTS)]


def _spoken(convention: _Convention) -> str:
    return "the environment" if convention.launcher == "environment" else convention.launcher
