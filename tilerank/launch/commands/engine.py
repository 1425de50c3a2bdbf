"""The ranks of a process that sends them requests itself: of `LLM` in Python, and of `tilerank batch`.

That process starts this module's command, which is not for users, with one end of a socket (offline/engine.py).
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from tilerank.loader.generation_config import read_sampling_defaults
from tilerank.runtime.protocol.sizes import HTTP_PROCESS_BYTES

from ..errors import USER_ERRORS, LaunchError
from ..host.placement import divide_placement
from ..host.topology import read_topology
from ..logs import say
from ..offline.link import CONTROL, LINK, PARENT, connect_replicas
from ..options import kv_dir, model, other_servers, requests
from ..options.draft_model import check_draft_model
from ..options.replicas import add_arguments as add_replica_arguments
from ..planning.replicas import Division, ModelBytes, divide
from ..processes.process import die_with
from ..processes.status import ErrorReport, StatusPipe
from ..processes.supervisor import Outcome, run_group
from ..ranks import ranks_table, start
from ..ranks.rank import run_rank
from ..ranks.rendezvous import Identity, identify
from ..ranks.start import HostRanks
from ..serving import media_options
from .generate import GenerateJob

if TYPE_CHECKING:
    from tilerank.parallel.join import Team
    from tilerank.runtime.rank.worker import Worker

    from ..host.placement import Placement, RankPlacement


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a model, of its ranks, and of what becomes a prompt."""
    requests.add_arguments(parser)
    media_options.add_arguments(parser)
    model.add_arguments(parser)
    kv_dir.add_arguments(parser)
    start.add_arguments(parser)
    add_replica_arguments(parser)
    other_servers.add_arguments(parser, other_servers.MODEL)


def is_rank(args: argparse.Namespace) -> bool:
    """Return whether this process, or the ranks that it starts, only serves another one, which sends the requests.

    That is a process which this other one has started, every process but that of rank 0 under another launcher, and
    every host but the first with --nnodes.
    """
    return CONTROL in os.environ or identify(os.environ).rank > 0 or bool(args.node_rank)


def run(args: argparse.Namespace) -> int:
    """Run the ranks until the process that sends requests closes its end of the socket."""
    start.check_arguments(args)
    identity = identify(os.environ)
    if identity.launcher != "tilerank" and PARENT in os.environ:
        die_with(int(os.environ[PARENT]))
    if not start.ours_to_start(args, identity):
        refuse_replicas(args, identity)
        if identity.rank == 0 and identity.launcher != "tilerank":
            os.environ[LINK] = str(connect_replicas(1)[0])
        return run_rank(identity, args, EngineJob(args))
    status = StatusPipe.inherited()
    outcome = _outcome(args, identity)
    if status.connected and outcome.sentence is not None:
        status.send(ErrorReport(outcome.sentence, consequence=False))
    elif outcome.sentence is not None:
        say(f"tilerank: error: {outcome.sentence}")
    return outcome.status


def _outcome(args: argparse.Namespace, identity: Identity) -> Outcome:
    try:
        replicas = own_replicas(args, identity, EngineJob(args).model_bytes)
        links = [{LINK: end} for end in connect_replicas(len(replicas))] if 0 in replicas[0].here else [{}]
        specs = [spec for ranks, link in zip(replicas, links, strict=True) for spec in ranks.specs(link)]
        return run_group(specs, start.watched_conditions(args))
    except USER_ERRORS as e:
        return Outcome(1, str(e))


def refuse_replicas(args: argparse.Namespace, identity: Identity) -> None:
    """Raise LaunchError for several replicas where this command does not start all ranks itself."""
    if args.dp != 1 and identity.launcher != "tilerank":
        raise LaunchError(f"--dp {args.dp or 'auto'} is for ranks of one host that this command starts")


def own_replicas(
    args: argparse.Namespace, identity: Identity, model_bytes: Callable[[], ModelBytes]
) -> list[HostRanks]:
    """Return the groups of ranks that this command starts, one for each replica. model_bytes: called if the numbers of
    ranks and replicas depend on it. Raises LaunchError."""
    if args.dp == 1:
        return [start.own_ranks(args, identity)]
    division, whole = divided_host(args, identity, model_bytes)
    return [
        HostRanks(args, division.tp, range(division.tp), placement, f"replica {replica}" if division.dp > 1 else None)
        for replica, placement in enumerate(divide_placement(whole, [division.tp] * division.dp))
    ]


def divided_host(
    args: argparse.Namespace, identity: Identity, model_bytes: Callable[[], ModelBytes]
) -> tuple[Division, Placement]:
    """Return the replicas on this host, and the places of all their ranks. model_bytes: as in own_replicas. Raises
    LaunchError."""
    if args.nnodes > 1:
        refuse_replicas(args, identity)
    machine = read_topology()
    division = divide(start.own_topology(args, identity, machine), args.tp, args.dp, model_bytes)
    if division.reason is not None and args.log_level in ("debug", "info"):
        say(f"tilerank: --tp {division.tp} --dp {division.dp}: {division.reason}")
    if division.dp > 1 and args.kv_dir is not None:
        raise LaunchError(f"--kv-dir {args.kv_dir} is for one replica, found --dp {division.dp}")
    return division, start.own_placement(args, identity, machine, division.tp * division.dp)


class EngineJob(GenerateJob):
    """The job of ranks whose requests come over a socket."""

    BESIDE_BYTES = HTTP_PROCESS_BYTES

    def prepare(self) -> None:
        check_model(self._args)

    def model_bytes(self) -> ModelBytes:
        """Return what the model takes on one rank."""
        from tilerank.runtime.rank.registry import read_supported_card

        from ..planning.plan import model_bytes

        return model_bytes(read_supported_card(self._model_dir, self._options.family), self._options)

    def build(self, team: Team, own: RankPlacement) -> Worker:
        worker = super().build(team, own)
        self._ranks = ranks_table.gather(team.group, own, worker)
        return worker

    def lead(self, worker: Worker, size: int, placement: Placement) -> None:
        from tilerank.runtime.lead.drafting.draft_sources import draft_source
        from tilerank.runtime.lead.engine import Engine
        from tilerank.runtime.server.link.engine_loop import serve_connections

        source = draft_source(self._options.drafts(worker.card), worker)
        engine = Engine(
            worker, self._options.mm_cache_bytes, self._args.max_running_requests, self._args.tokenizer, source
        )
        serve_connections(engine, [socket.socket(fileno=int(os.environ[LINK]))], self._ranks)


def check_model(args: argparse.Namespace) -> None:
    """Refuse a model that the options do not fit, before anything expensive."""
    from tilerank.loader.tokenizer import Tokenizer
    from tilerank.runtime.media.registry import check_pairs, load_processor

    model_dir = model.model_directory(args)
    check_pairs(model.checked_card(args, model_dir))
    tokenizer = Tokenizer(model.tokenizer_directory(args), args.chat_template)
    check_draft_model(model.model_options(args).draft_model, tokenizer)
    media_options.check(args, load_processor(model_dir, tokenizer))
    if args.chat_template is not None:
        tokenizer.chat_template.variables(None)  # which finds errors of its syntax
    read_sampling_defaults(model_dir, args.override_generation_config)
