"""`tilerank serve`: the OpenAI API in front of a model, on ranks that this command starts or another launcher started.

Ranks and the HTTP process are children of this command and outlive each other (serving/server_supervisor.py). Under
another launcher rank 0 starts the HTTP process; then both end when the other does.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from tilerank.runtime.server.link.handover import connect, connections

from ..errors import LaunchError
from ..host import cgroup
from ..host.placement import cpus_beside
from ..host.topology import read_topology
from ..logs import say, use_format
from ..options import other_servers
from ..options.arguments import whole_number
from ..processes.process import ProcessSpec
from ..processes.status import StatusPipe
from ..processes.supervisor import END_S, WatchedConditions, supervise
from ..ranks import bootstrap, disaggregation, prefill_ranks, ranks_table, start
from ..ranks.rank import run_rank
from ..ranks.rendezvous import given_secret, identify
from ..ranks.start import HostRanks
from ..serving import http_options
from ..serving.host_links import FRONT_FDS, FirstHost, front_fds
from ..serving.http_options import DRAIN_S, TERMINAL_DRAIN_S
from ..serving.server_supervisor import ServerSupervisor
from . import engine

if TYPE_CHECKING:
    from tilerank.parallel.join import Team
    from tilerank.runtime.rank.transfer_memory import Transfer
    from tilerank.runtime.rank.worker import Worker

    from ..host.placement import Placement, RankPlacement

HTTP_FDS = "TILERANK_HTTP_FDS"
"""In the environment of the HTTP process: its listening socket and the control socket."""
CONTROL = "TILERANK_CONTROL"
"""In the environment of rank 0: the socket over which connections to HTTP processes come, if it does not start one."""
MAX_RESTARTS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    http_options.add_arguments(parser)
    engine.add_arguments(parser)
    prefill_ranks.add_arguments(parser)
    disaggregation.add_arguments(parser)
    other_servers.add_arguments(parser, other_servers.ANSWERS)
    parser.add_argument_group("restarts").add_argument(
        "--max-restarts",
        type=whole_number(0),
        metavar="N",
        help="how often in a row the ranks of a replica, or the HTTP process, may fail to start again once they have "
        f"ended (default: {MAX_RESTARTS}; 0: nothing is started again); not for ranks on several hosts or under "
        "mpirun or torchrun",
    )


def run(args: argparse.Namespace) -> int:
    sys.stdout = sys.stderr  # nothing is to be written to stdout, and stderr never blocks
    use_format(args.log_format)
    if HTTP_FDS in os.environ:
        return _run_http_process(args)
    if args.drain_timeout is None:
        args.drain_timeout = TERMINAL_DRAIN_S if sys.stderr is not None and sys.stderr.isatty() else DRAIN_S
        args.argv = [*args.argv, f"--drain-timeout={args.drain_timeout:g}"]
    start.check_arguments(args)
    prefill_ranks.check_arguments(args)
    job = ServeJob(args)
    identity = identify(os.environ)
    ours = start.ours_to_start(args, identity)
    if args.max_restarts and identity.launcher != "tilerank" and (not ours or args.nnodes > 1):
        raise LaunchError(f"--max-restarts {args.max_restarts} is for ranks of one host that this command starts")
    if not ours:
        engine.refuse_replicas(args, identity)
        prefill_ranks.refuse_prefill_ranks(args, identity)
        disaggregation.refuse_disaggregate(args, identity)
        return run_rank(identity, args, job)
    for note in other_servers.notes(args):
        say(note)
    disaggregation.check_arguments(args)
    if args.disaggregate is not None:
        disaggregation.choose_prefill_ranks(args, identity)
    if args.prefill_nodes is None:
        replicas = engine.own_replicas(args, identity, job.model_bytes)
    elif args.nnodes > 1:
        replicas = [prefill_ranks.group_of_host(args, identity)]
    else:
        replicas = prefill_ranks.pairs_of_groups(args, *engine.divided_host(args, identity, job.model_bytes))
    if args.node_rank:
        return supervise(replicas[0].specs(), _watch(args), end_s=args.drain_timeout + END_S)
    job.prepare()
    return _supervise(args, job, replicas)


def _watch(args: argparse.Namespace) -> WatchedConditions:
    # Clients of a rank that is stopped wait no longer than other ranks do, which need not be waiting for it.
    return WatchedConditions(cgroup.oom_kills, start.answer_s(args))


def _supervise(args: argparse.Namespace, job: ServeJob, replicas: Sequence[HostRanks]) -> int:
    """Run the server as the parent of its processes, and keep the listening socket open for them."""
    one_group = args.nnodes > 1 and args.prefill_nodes is None
    max_restarts = 0 if one_group else MAX_RESTARTS if args.max_restarts is None else args.max_restarts
    if max_restarts:
        for ranks in replicas:
            ranks.keep_weights()
    placed = [rank for ranks in replicas for rank in ranks.placement.ranks]
    with job.address.listening(), job.listener as listener, _front(args, replicas) as front:
        return ServerSupervisor(
            lambda control: [_http_process(args, os.dup(listener.fileno()), control, placed, front())],
            {ranks.name or "the group of ranks": partial(_leading, ranks) for ranks in replicas},
            _watch(args),
            max_restarts=max_restarts,
            drain_s=args.drain_timeout,
            on_ready=job.say_ready,
        ).run()


@contextlib.contextmanager
def _front(args: argparse.Namespace, replicas: Sequence[HostRanks]) -> Iterator[Callable[[], Sequence[int]]]:
    """Listen for the decode ranks of another host, if they are there. Yields a function that returns descriptors for
    the HTTP process (host_links.py)."""
    if args.nnodes == 1 or args.prefill_nodes is None:
        yield lambda: ()
        return
    with bootstrap.listen(args.master_addr, args.master_port, one_host=False) as listener:
        say(f"tilerank: the decode ranks of --node-rank 1 are awaited at {args.master_addr}:{args.master_port}")
        yield partial(front_fds, listener, list(replicas[0].shared.values()))


def _leading(ranks: HostRanks, control: int) -> list[ProcessSpec]:
    return ranks.specs({CONTROL: control})


class ServeJob(engine.EngineJob):
    """The job of the ranks of `serve`."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self._first_host: FirstHost | None = None
        if args.prefill_nodes is not None and args.node_rank:
            secret = given_secret(os.environ)
            self._first_host = FirstHost(args.master_addr, args.master_port, secret, start.joining_s(args))

    def prepare(self) -> None:
        super().prepare()
        http_options.check(self._args)
        if CONTROL not in os.environ and self._first_host is None:
            self.address = http_options.address(self._args)
            self.listener = self.address.listen()
            self._url = f"{self.address.url(self.listener)}{self._args.root_path}/v1"

    def build(self, team: Team, own: RankPlacement) -> Worker:
        worker = super().build(team, own)
        if own.rank == 0:
            say(ranks_table.render(self._ranks, worker.cache_tokens, worker.states))
        # The HTTP process gets these signals as well: it answers what is under way and closes, which ends the ranks.
        host = self._first_host
        signal.signal(signal.SIGTERM, signal.SIG_IGN if host is None else lambda *_: host.end())
        if StatusPipe.inherited().connected:  # under another launcher, the HTTP process would inherit this
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        return worker

    def transfer(self, rank: int) -> Transfer | None:
        transfer, host = super().transfer(rank), self._first_host
        if transfer is None or host is None:
            return transfer
        return replace(transfer, fetches=True, reader=host.reader() if rank == 0 else None)

    def lead(self, worker: Worker, size: int, placement: Placement) -> None:
        from tilerank.runtime.lead.drafting.draft_sources import draft_source
        from tilerank.runtime.lead.engine import Engine
        from tilerank.runtime.server.link.engine_loop import serve_connections

        source = draft_source(self._options.drafts(worker.card), worker)
        engine = Engine(
            worker, self._options.mm_cache_bytes, self._args.max_running_requests, self._args.tokenizer, source
        )
        if CONTROL in os.environ:
            with socket.socket(fileno=int(os.environ[CONTROL])) as control:
                serve_connections(engine, connections(control), self._ranks)
        elif self._first_host is not None:
            serve_connections(engine, self._first_host.connections(), self._ranks)
        else:
            with self.address.listening(), _own_http(self._args, self.listener, placement) as control:
                self.say_ready()
                serve_connections(engine, connections(control), self._ranks)

    def say_ready(self) -> None:
        names = " and ".join(self._args.served_model_name or [str(self._model_dir)])
        say(f"tilerank: {names} is served at {self._url}")


@contextlib.contextmanager
def _own_http(args: argparse.Namespace, listener: socket.socket, placement: Placement) -> Iterator[socket.socket]:
    """Start an HTTP process and yield the socket over which its connection comes. The process ends with the context."""
    to_http, http_control = socket.socketpair()
    to_engine, control = socket.socketpair()
    spec = _http_process(args, listener.detach(), http_control.detach(), placement.ranks)
    http = subprocess.Popen(
        spec.command, env=spec.env, stdin=subprocess.DEVNULL, pass_fds=spec.pass_fds, preexec_fn=spec.prepare
    )
    for fd in spec.pass_fds:
        os.close(fd)
    connect(to_http, to_engine, 0)
    to_engine.close()
    try:
        with control:
            yield control
    finally:
        to_http.close()
        try:
            http.wait(END_S)
        except subprocess.TimeoutExpired:
            http.kill()
            http.wait()


def _http_process(
    args: argparse.Namespace,
    listener: int,
    control: int,
    ranks: Sequence[RankPlacement],
    front: Sequence[int] = (),
) -> ProcessSpec:
    """Return the HTTP process beside these ranks. front: descriptors for decode ranks of another host."""
    cpus = cpus_beside(start.own_topology(args, identify(os.environ), read_topology()), ranks)

    def settle() -> None:
        os.sched_setaffinity(0, cpus)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    return ProcessSpec(
        "the HTTP process",
        [sys.executable, "-P", "-m", "tilerank", *args.argv],
        os.environ | {HTTP_FDS: f"{listener},{control}"} | ({FRONT_FDS: ",".join(map(str, front))} if front else {}),
        pass_fds=(listener, control, *front),
        prepare=settle,
    )


def _run_http_process(args: argparse.Namespace) -> int:
    from ..serving.http_command import run_http_process

    listener, control = (socket.socket(fileno=int(fd)) for fd in os.environ[HTTP_FDS].split(","))
    return run_http_process(args, listener, control)
