"""Ranks that compute prompts apart from those that generate: `--prefill-nodes`. Imports no torch."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tilerank.runtime.protocol.areas import Area

from ..errors import LaunchError
from ..host.placement import Placement, divide_placement
from ..host.topology import read_topology
from ..options.arguments import whole_number
from ..planning.replicas import Division
from ..text import count
from . import start
from .rendezvous import Identity
from .start import HostRanks

if TYPE_CHECKING:
    from tilerank.runtime.rank.transfer_memory import Transfer

PREFILL, DECODE = "the prefill group", "the decode group"
_GIVES, _TAKES = "TILERANK_GIVES", "TILERANK_TAKES"
"""In the environment of a prefill rank, and of a decode rank: how the variables begin that have the memory file of each
area through which pages go."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument_group("prefill ranks").add_argument(
        "--prefill-nodes",
        type=whole_number(1),
        metavar="N",
        help="N of the --tp ranks of a replica compute prompts, and the others take the cached keys and values from "
        "them and generate, so that neither waits for the other; each group holds the whole model (default: all ranks "
        "do both)",
    )


def check_arguments(args: argparse.Namespace) -> None:
    """Raise LaunchError for an option that does not go with --prefill-nodes."""
    if args.prefill_nodes is None or args.nnodes == 1:
        return
    option = f"--prefill-nodes {args.prefill_nodes} --nnodes {args.nnodes}"
    if args.nnodes > 2:
        raise LaunchError(f"{option}: expected 2 hosts, that of the prefill ranks and that of the decode ranks")
    if args.dp != 1:
        raise LaunchError(f"{option} is for one replica, found --dp {args.dp or 'auto'}")


def refuse_prefill_ranks(args: argparse.Namespace, identity: Identity) -> None:
    """Raise LaunchError for --prefill-nodes where this command does not start all ranks itself."""
    if args.prefill_nodes is not None and identity.launcher != "tilerank":
        raise LaunchError(f"--prefill-nodes {args.prefill_nodes} is for ranks that this command starts")


def group_sizes(args: argparse.Namespace, ranks: int) -> list[int]:
    """Return how many of the ranks of a replica compute prompts, and how many generate. Raises LaunchError if none
    does, or if the size of the model has decided how many ranks there are: it is not that of two groups."""
    if args.tp is None and args.dp is None:
        raise LaunchError(f"--prefill-nodes {args.prefill_nodes} --dp auto: expected --tp N as well, found --tp auto")
    if args.prefill_nodes >= ranks:
        found = count(ranks, "rank")
        raise LaunchError(
            f"--prefill-nodes {args.prefill_nodes}: expected fewer than the {found} of --tp, so that one generates"
        )
    return [args.prefill_nodes, ranks - args.prefill_nodes]


def pairs_of_groups(args: argparse.Namespace, division: Division, whole: Placement) -> list[HostRanks]:
    """Return the prefill ranks and the decode ranks of one replica after the other, which this command starts. whole:
    the places of the ranks of all replicas. Raises LaunchError."""
    parts = divide_placement(whole, group_sizes(args, division.tp) * division.dp)
    groups: list[HostRanks] = []
    for replica, (first, second) in enumerate(zip(parts[::2], parts[1::2], strict=True)):
        files, end = _memory_files(), f" of replica {replica}" if division.dp > 1 else ""
        groups += [_prefill_ranks(args, first, files, end), _decode_ranks(args, second, files, end)]
    return groups


def group_of_host(args: argparse.Namespace, identity: Identity) -> HostRanks:
    """Return the ranks that this command starts on one of two hosts: the prefill ranks on the first, the decode ranks
    on the second. Raises LaunchError."""
    machine = read_topology()
    start.host_ranks(args, start.own_topology(args, identity, machine))  # raises for options that are missing
    size = group_sizes(args, args.tp)[args.node_rank]
    make = _decode_ranks if args.node_rank else _prefill_ranks
    return make(args, start.own_placement(args, identity, machine, size), _memory_files())


def _memory_files() -> list[int]:
    """Return new memory files, which this process holds while ranks start again."""
    return [os.memfd_create("tilerank-pages") for _ in Area]


def _prefill_ranks(args: argparse.Namespace, placement: Placement, files: Sequence[int], end: str = "") -> HostRanks:
    ranks = len(placement.ranks)
    giving = HostRanks(args, ranks, range(ranks), placement, PREFILL + end, _named(_GIVES, files))
    for file in files:
        giving.own_memory(file)
    return giving


def _decode_ranks(args: argparse.Namespace, placement: Placement, files: Sequence[int], end: str = "") -> HostRanks:
    ranks = len(placement.ranks)
    return HostRanks(args, ranks, range(ranks), placement, DECODE + end, _named(_TAKES, files))


def _named(begin: str, files: Sequence[int]) -> dict[str, int]:
    return dict(zip(_variables(begin), files, strict=True))


def _variables(begin: str) -> list[str]:
    return [f"{begin}_{area.name}" for area in Area]


def transfer_of(env: Mapping[str, str]) -> Transfer | None:
    """Return the part of this rank in a server with prefill ranks; None if all ranks do both."""
    from tilerank.runtime.rank.transfer_memory import Transfer

    for begin, gives in ((_GIVES, True), (_TAKES, False)):
        variables = _variables(begin)
        if variables[0] in env:
            return Transfer(tuple(int(env[variable]) for variable in variables), gives)
    return None


def gives_pages(env: Mapping[str, str]) -> bool:
    """Return whether this rank is a prefill rank."""
    return _variables(_GIVES)[0] in env
