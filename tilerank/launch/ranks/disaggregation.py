"""The number of prefill ranks that `serve --disaggregate auto` chooses before it starts any. Imports no torch."""

from __future__ import annotations

import argparse
import dataclasses

from tilerank.runtime.protocol.sizes import HTTP_PROCESS_BYTES

from ..errors import LaunchError
from ..host.topology import read_topology
from ..logs import say
from ..options import model
from ..planning.prediction import arguments
from ..planning.prediction.machine import machine_names, read_machine
from . import start
from .rendezvous import Identity


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_arguments(
        parser.add_argument_group("choice of prefill ranks"),
        "--disaggregate: the file of this machine, which `doctor --machine` writes, or one of "
        f"{', '.join(machine_names())}",
    )


def check_arguments(args: argparse.Namespace) -> None:
    """Raise LaunchError for an option that does not go with --disaggregate, and for one that only it uses."""
    arguments.check_disaggregate(args)
    if args.disaggregate is None:
        arguments.refuse_without(args, "--disaggregate auto", "machine", "slo", "mix")
    elif args.nnodes > 1:
        raise LaunchError(f"--disaggregate auto is for ranks of one host, found --nnodes {args.nnodes}")


def refuse_disaggregate(args: argparse.Namespace, identity: Identity) -> None:
    """Raise LaunchError for --disaggregate where this command does not start all ranks itself."""
    if args.disaggregate is not None and identity.launcher != "tilerank":
        raise LaunchError("--disaggregate auto is for ranks of one host that this command starts")


def choose_prefill_ranks(args: argparse.Namespace, identity: Identity) -> None:
    """Set --prefill-nodes, also for the processes that this command starts, and log why. Raises LaunchError."""
    from tilerank.runtime.rank.registry import read_supported_card

    from ..planning.prediction.rank_splits import compare_splits

    mix, limits = arguments.mix_and_limits(args)
    described, machine = read_machine(args.machine), read_topology()
    topology = start.own_topology(args, identity, machine)
    size, _ = start.host_ranks(args, topology)
    options, path = model.model_options(args), model.model_directory(args)
    card = read_supported_card(path, options.family)
    choice = compare_splits(
        dataclasses.replace(card, context_length=model.context_length(args, card)),
        options,
        described,
        dataclasses.replace(topology, limits=topology.limits.beside(HTTP_PROCESS_BYTES)),
        start.own_placement(args, identity, machine, size),
        path,
        mix,
        limits,
    )
    say(f"tilerank: {choice.text()}")
    if prefill := choice.chosen.prefill:
        args.prefill_nodes = prefill
        args.argv = [*args.argv, f"--prefill-nodes={prefill}"]
