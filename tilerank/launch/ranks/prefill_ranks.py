"""Ranks that compute prompts apart from those that generate: `--prefill-nodes`. Imports no torch."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tilerank.runtime.protocol.areas import Area

from ..errors import LaunchError
from ..host.placement import Placement, divide_placement
from ..options.arguments import whole_number
from ..planning.replicas import Division
from ..text import count
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
    if args.prefill_nodes is not None and args.nnodes > 1:
        found = f"--nnodes {args.nnodes}"
        raise LaunchError(f"--prefill-nodes {args.prefill_nodes} is for ranks of one host, found {found}")


def refuse_prefill_ranks(args: argparse.Namespace, identity: Identity) -> None:
    """Raise LaunchError for --prefill-nodes where this command does not start all ranks itself."""
    if args.prefill_nodes is not None and identity.launcher != "tilerank":
        raise LaunchError(f"--prefill-nodes {args.prefill_nodes} is for ranks of one host that this command starts")


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
        groups += _two_groups(args, first, second, f" of replica {replica}" if division.dp > 1 else "")
    return groups


def _two_groups(args: argparse.Namespace, first: Placement, second: Placement, replica: str) -> list[HostRanks]:
    files = [os.memfd_create("tilerank-pages") for _ in Area]  # this process holds them while ranks start again
    gives, takes = (dict(zip(_variables(begin), files, strict=True)) for begin in (_GIVES, _TAKES))
    prefill, decode = len(first.ranks), len(second.ranks)
    giving = HostRanks(args, prefill, range(prefill), first, PREFILL + replica, gives)
    for file in files:
        giving.own_memory(file)
    return [giving, HostRanks(args, decode, range(decode), second, DECODE + replica, takes)]


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
