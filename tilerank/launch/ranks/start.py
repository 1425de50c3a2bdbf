"""From options to running ranks: their number, their cores and memory, and their rendezvous. Imports no torch."""

import argparse
import dataclasses
import os
import resource
import secrets
import sys
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from ..errors import LaunchError
from ..host import cgroup
from ..host.binding import bind
from ..host.cpulist import format_cpulist
from ..host.neighbours import neighbour_notes, pinned_by_others
from ..host.placement import Placement, auto_ranks, place
from ..host.topology import Topology, read_topology
from ..options.arguments import seconds, whole_number
from ..planning.plan_types import RANK_OVERHEAD
from ..processes.process import ProcessSpec
from ..processes.supervisor import WatchedConditions, supervise
from ..text import count
from ..text import size as size_text
from . import bootstrap
from .rendezvous import IDENTITY_VARIABLES, Identity, given_secret, starts_ranks

if TYPE_CHECKING:
    from tilerank.loader.packed_weights import WeightFiles

ANSWER_S = 60.0
"""Default of --dist-timeout for a rank that is there."""
RENDEZVOUS_S = 120.0
"""Default of --dist-timeout for all ranks to arrive, which includes importing torch from a cold network disk but not
loading a model."""
MIN_FILES = 512
"""Open files that a process needs beside the connections of a server."""
ISAS = ("amx", "avx512_bf16", "avx512", "avx2", "reference")
"""`kernels.core.ISAS`, repeated here because importing it imports torch."""
# Kernels run on our own pinned threads; threads of torch and OpenMP would only compete for their cores.
RANK_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options about ranks, for every command that starts some."""
    ranks = parser.add_argument_group("ranks")
    ranks.add_argument(
        "--tp",
        "-tp",
        "--tp-size",
        "--tensor-parallel-size",
        type=_auto_or_count,
        default=None,
        metavar="auto|N",
        help="total number of ranks that the model is sharded over (auto: one per NUMA node)",
    )
    ranks.add_argument("--cores", default="auto", help='cores of each rank, "0-39|43-82"; auto or none')
    ranks.add_argument(
        "--bind",
        choices=("auto", "inherit", "none"),
        default="auto",
        help="auto: own cores and memory for every rank; inherit: keep the binding of mpirun, srun or taskset; none",
    )
    ranks.add_argument(
        "--membind",
        choices=("preferred", "strict"),
        default="preferred",
        help="strict: never take memory of another node; the kernel kills a rank whose node is full",
    )
    ranks.add_argument(
        "--dist-timeout",
        type=seconds,
        metavar="S",
        help=f"longest wait for another rank, at the start too (default: {ANSWER_S:g}, at the start {RENDEZVOUS_S:g})",
    )
    ranks.add_argument("--collectives", choices=("auto", "gloo", "mpi"), default="auto", help="transport between ranks")
    ranks.add_argument(
        "--nnodes", type=whole_number(1), default=1, metavar="N", help="number of hosts; run the command once on each"
    )
    ranks.add_argument(
        "--node-rank", type=whole_number(0), default=None, metavar="I", help="number of this host, from 0"
    )
    ranks.add_argument("--master-addr", metavar="HOST", help="address of rank 0's host, reachable from all hosts")
    ranks.add_argument(
        "--master-port", type=whole_number(1, 65535), metavar="PORT", help="port at which ranks of several hosts meet"
    )
    ranks.add_argument(
        "--isa",
        choices=ISAS,
        help="the rung of the instruction set ladder for all kernels (default: TILERANK_ISA, or the fastest for each)",
    )
    ranks.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")


def answer_s(args: argparse.Namespace) -> float:
    """Return how long a rank waits for the answer of another."""
    return ANSWER_S if args.dist_timeout is None else float(args.dist_timeout)


def joining_s(args: argparse.Namespace) -> float:
    """Return how long ranks wait for all others at the start."""
    return RENDEZVOUS_S if args.dist_timeout is None else float(args.dist_timeout)


def host_ranks(args: argparse.Namespace, topology: Topology) -> tuple[int, range]:
    """Return (total number of ranks, the ranks of this host) if we start the ranks ourselves."""
    if args.nnodes == 1:
        size = args.tp or auto_ranks(topology)
        return size, range(size)
    if args.node_rank is None or args.master_addr is None or not args.master_port or args.tp is None:
        raise LaunchError(
            f"--nnodes {args.nnodes} needs --node-rank, --master-addr, --master-port and --tp (ranks in all)"
        )
    if args.node_rank >= args.nnodes:
        raise LaunchError(f"--node-rank {args.node_rank} must be below --nnodes {args.nnodes}")
    if args.tp < args.nnodes:
        raise LaunchError(f"--tp {args.tp} leaves some of the {args.nnodes} hosts without a rank")
    given_secret(os.environ)
    begin, end = (args.tp * node // args.nnodes for node in (args.node_rank, args.node_rank + 1))
    return args.tp, range(begin, end)


def own_topology(args: argparse.Namespace, identity: Identity, machine: Topology) -> Topology:
    """Return the part of the machine that the user's command may use, for ranks that we start ourselves.

    A mask that taskset or numactl set is respected. Slurm's mask, by default one core per task, is ignored unless
    --bind inherit is given. An explicit list of --cores overrides any mask.
    """
    mask = _own_mask(args, machine)
    if not mask or (identity.launcher != "none" and args.bind != "inherit"):
        return machine
    return dataclasses.replace(machine, allowed_cpus=mask)


def own_placement(args: argparse.Namespace, identity: Identity, machine: Topology, ranks: int) -> Placement:
    """Place `ranks` ranks that we start ourselves on this host. Notes say if they get less than all of `machine`, or
    share cores with another server."""
    topology = own_topology(args, identity, machine)
    placement = place(topology, ranks, "none" if args.bind == "none" else args.cores)
    beside = neighbour_notes(topology, placement, pinned_by_others())
    notes = (*_mask_notes(args, identity, machine), *placement.notes, *beside)
    return dataclasses.replace(placement, notes=notes)


def _mask_notes(args: argparse.Namespace, identity: Identity, machine: Topology) -> list[str]:
    """Return a sentence if this command was started on a part of `machine`."""
    mask = _own_mask(args, machine)
    if not mask:
        return []
    found = f"this command was started on CPUs {format_cpulist(mask)} of {format_cpulist(machine.allowed_cpus)}"
    if own_topology(args, identity, machine) is machine:
        return [f"{found} by {identity.launcher}; its ranks use all of them (--bind inherit keeps the binding)"]
    return [f"{found}; its ranks use only these"]


def _own_mask(args: argparse.Namespace, machine: Topology) -> tuple[int, ...]:
    """Return the CPUs that this command is confined to, or none if it is not confined or an option overrides that."""
    usual = machine.usable_cpus
    mask = usual & set(machine.inherited_cpus)
    asked = args.cores != "auto" or args.bind == "none"
    return () if asked or mask == usual else tuple(sorted(mask))


def foreign_placement(args: argparse.Namespace, topology: Topology, identity: Identity) -> Placement:
    """Return the placement of this host's ranks under torchrun, mpirun or srun. Every rank computes the same."""
    unbound = args.bind != "auto" or args.cores == "none"
    narrowed = set(topology.inherited_cpus) < topology.usable_cpus
    return place(topology, identity.local_size, "none" if unbound else args.cores, own_mask=narrowed)


def check_arguments(args: argparse.Namespace) -> None:
    """Raise LaunchError for options that contradict each other, or if this user may open too few files."""
    if args.nnodes == 1 and args.node_rank not in (None, 0):
        raise LaunchError(f"--node-rank {args.node_rank} needs --nnodes above {args.node_rank}, found 1")
    if args.bind != "auto" and args.cores != "auto":
        raise LaunchError(f"--cores {args.cores} and --bind {args.bind} contradict each other")
    _allow_files()


def _allow_files() -> None:
    """Let this process and those that it starts open MIN_FILES files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < MIN_FILES:
        raise LaunchError(f"this user may open {hard} files (ulimit -Hn), expected at least {MIN_FILES}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, MIN_FILES), hard))


def ours_to_start(args: argparse.Namespace, identity: Identity) -> bool:
    """Return whether this process is the command that starts the ranks, rather than one of the ranks.

    With --nnodes it is the one command of its host, even where srun runs it. LaunchError if mpirun or torchrun did.
    """
    if identity.launcher == "tilerank":
        return False
    if args.nnodes > 1 and identity.launcher not in ("none", "Slurm"):
        raise LaunchError(
            f"--nnodes {args.nnodes} makes tilerank start the ranks, but {identity.launcher} has already started them"
        )
    return starts_ranks(identity) or args.nnodes > 1


def start_ranks(args: argparse.Namespace, identity: Identity) -> int:
    """Start this host's ranks with the command line `args.argv` and return the exit status of the whole group.

    Raises LaunchError for what cannot be placed, bound or started.
    """
    return supervise(own_ranks(args, identity).specs(), watched_conditions(args))


def own_ranks(args: argparse.Namespace, identity: Identity) -> "HostRanks":
    """Return the ranks of this host, which the command line `args.argv` starts. Raises LaunchError for what cannot be
    placed."""
    machine = read_topology()
    size, here = host_ranks(args, own_topology(args, identity, machine))
    return HostRanks(args, size, here, own_placement(args, identity, machine, len(here)))


def watched_conditions(args: argparse.Namespace) -> WatchedConditions:
    """Return what a supervisor watches beside the ends of ranks. A rank that is stopped counts as failed once the
    others have waited for it."""
    return WatchedConditions(cgroup.oom_kills, max(joining_s(args), answer_s(args)))


def _check_memory(ranks: int) -> None:
    """Raise LaunchError if the bare processes, without weights and cache, need more memory than this host has."""
    topology = read_topology()
    free = sum(topology.node(node).memory_free for node in topology.allowed_mems)
    available = topology.limits.memory_available
    available = free if available is None else min(free, available)
    if ranks * RANK_OVERHEAD > available:
        raise LaunchError(
            f"{count(ranks, 'rank')} on this host: their processes need {size_text(ranks * RANK_OVERHEAD)} of memory, "
            f"but {size_text(available)} is available"
        )


class HostRanks:
    """The ranks `here`, of `size`, that we start on this host ourselves. They can be started several times.

    name: of this group, if several groups of ranks run on this host. shared: descriptors of memory that every rank gets
    whenever it starts, by the variable with their number.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        size: int,
        here: range,
        placement: Placement,
        name: str | None = None,
        shared: Mapping[str, int] | None = None,
    ) -> None:
        if args.collectives == "mpi":
            raise LaunchError("--collectives mpi needs ranks that mpirun or srun started")
        _check_memory(len(here))
        self.here = here
        self.placement = placement
        self.name = name
        self.shared = shared or {}
        self._args = args
        self._size = size
        self._weights: list[int] = []  # a memory file for each rank
        self._owned: list[int] = []  # further ones, of all ranks together

    def keep_weights(self) -> None:
        """Give each rank a memory file, in which the next process of the rank finds its packed weights."""
        self._weights = [os.memfd_create("tilerank-weights") for _ in self.here]

    def own_memory(self, file: int) -> None:
        """Count a memory file, which they fill, as theirs when they start again."""
        self._owned.append(file)

    def specs(self, hand_over: Mapping[str, int] | None = None) -> list[ProcessSpec]:
        """Return what starts the ranks once. `hand_over`: descriptors for rank 0, by the variable with their number."""
        for_rank_0 = dict(hand_over or {})
        if len(self.here) < self._size:
            host, port = self._args.master_addr, self._args.master_port
            where, bind_it = f"{host}:{port}", partial(bootstrap.listen, host, port, one_host=False)
        else:
            where = f"@tilerank-{secrets.token_hex(16)}"
            bind_it = partial(bootstrap.listen_locally, where, f"the unix socket {where} is taken")
        if 0 in self.here:
            for_rank_0["TILERANK_FD"] = bind_it().detach()
        environment = _environment(os.environ, self.placement) | {
            "TILERANK_SIZE": str(self._size),
            "TILERANK_LOCAL_SIZE": str(len(self.here)),
            "TILERANK_RENDEZVOUS": where,
            "TILERANK_HELD": ",".join(map(str, self._held())),
        }
        return [
            self._spec(local, rank, environment, {} if rank else for_rank_0) for local, rank in enumerate(self.here)
        ]

    def _held(self) -> list[int]:
        """Return the bytes in the memory files of each rank."""
        owned = sum(map(_bytes_in, self._owned)) // len(self.here)
        return [nbytes + owned for nbytes in map(_bytes_in, self._weights)] or [owned] * len(self.here)

    def _spec(self, local: int, rank: int, environment: Mapping[str, str], fds: Mapping[str, int]) -> ProcessSpec:
        if self._weights:
            fds = {**fds, "TILERANK_WEIGHTS": os.dup(self._weights[local])}
        fds = {**fds, **{variable: os.dup(fd) for variable, fd in self.shared.items()}}
        own = {"TILERANK_RANK": rank, "TILERANK_LOCAL_RANK": local, **fds}
        name = f"rank {rank}" if self.name is None else f"rank {rank} of {self.name}"
        return ProcessSpec(
            name,
            # -P: the working directory may hold a model, whose files must not be importable.
            [sys.executable, "-P", "-m", "tilerank", *self._args.argv],
            {**environment, **{variable: str(value) for variable, value in own.items()}},
            leads=rank == 0,
            label=None if rank == 0 and self.name is None else name,
            pass_fds=tuple(fds.values()),
            prepare=partial(bind, self.placement.ranks[local], strict=self._args.membind == "strict"),
        )


def _bytes_in(file: int) -> int:
    return os.fstat(file).st_blocks * 512


def inherited_placement(env: Mapping[str, str]) -> Placement:
    """Return the placement that our supervisor chose."""
    return msgspec.json.decode(env["TILERANK_PLACEMENT"], type=Placement)


def weight_files(args: argparse.Namespace) -> "WeightFiles":
    """Return the files that may have this rank's packed weights, and otherwise get them."""
    from tilerank.loader.packed_weights import WeightFiles

    memory = os.environ.get("TILERANK_WEIGHTS")
    return WeightFiles(None if memory is None else int(memory), args.weight_cache)


def held_weights(env: Mapping[str, str]) -> list[int]:
    """Return the bytes in the memory files of each rank of this host."""
    return [int(nbytes) for nbytes in env.get("TILERANK_HELD", "").split(",") if nbytes]


def _environment(env: Mapping[str, str], placement: Placement) -> dict[str, str]:
    kept = {name: value for name, value in env.items() if not IDENTITY_VARIABLES.match(name)}
    return kept | RANK_ENVIRONMENT | {"TILERANK_PLACEMENT": msgspec.json.encode(placement).decode()}


def _auto_or_count(text: str) -> int | None:
    return None if text == "auto" else whole_number(1)(text)
