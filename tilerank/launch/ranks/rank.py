"""A rank process: it binds itself to its cores, meets the other ranks, builds its worker and runs its job.

The order matters: memory that is allocated before the binding stays where it is, so torch is imported late.
"""

import argparse
import contextlib
import gc
import logging
import os
import select
import signal
import sys
import threading
import time
import traceback
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, TypeVar

from tilerank.parallel.errors import GroupError

from .. import logs
from ..errors import USER_ERRORS, LaunchError
from ..host.binding import bind, inherited_notes
from ..host.placement import Placement, RankPlacement
from ..host.topology import read_topology
from ..processes.status import ErrorReport, Phase, Reached, StatusPipe
from .agreed_rungs import agree_on_rungs
from .bootstrap import find_address, launcher_process
from .rendezvous import Identity, check_tp, rendezvous_method
from .start import RANK_ENVIRONMENT, answer_s, foreign_placement, inherited_placement, joining_s

if TYPE_CHECKING:
    from tilerank.parallel.join import Team

log = logging.getLogger(__name__)

NOTICE_S = 3.5  # from the start of a rank until missing ones are named
SHORTEST_NOTICE_S = 0.5  # the same for a rank whose imports took longer
LOAD_S = 1800.0  # after rank 0 has loaded: ranks that share a cold disk may differ by this much
GIVE_UP_S = 15.0  # from the loss of another rank to the end of this process, whatever its main thread is blocked in


class Follower(Protocol):
    """The result of Job.build, usually the worker of a model."""

    def follow(self) -> None:
        """On other ranks: execute the messages of rank 0 until it sends stop."""

    def stop(self) -> None:
        """On rank 0: make the other ranks return from `follow`."""


W = TypeVar("W", bound=Follower)


class Job(Protocol[W]):
    """The work of a command on its ranks."""

    def prepare(self) -> None:
        """On rank 0, before anything expensive: refuse bad input."""

    def memory_refusal(self, size: int, here: range, placement: Placement) -> str | None:
        """On the first rank of a host: return why the ranks `here`, of `size`, do not fit in its memory, or None."""

    def build(self, team: "Team", own: RankPlacement) -> W:
        """On every rank: load the model. `own` is the placement of this rank."""

    def lead(self, worker: W, size: int, placement: Placement) -> None:
        """On rank 0: do the command's work, while the other ranks follow."""


def run_rank(identity: Identity, args: argparse.Namespace, job: Job[W]) -> int:
    """Run one rank and return its exit status. A rank that fails ends at once, since teardown may hang."""
    status = StatusPipe.inherited() if identity.launcher == "tilerank" else StatusPipe(None)
    logs.configure(identity.rank, args.log_level, prefix=not status.connected)
    # Signals end a rank silently; the supervisor, or the foreign launcher, reports them.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    code = 1
    try:
        _run(identity, args, job, status)
        code = 0
    except USER_ERRORS as e:
        _report(identity, status, e)
    finally:
        if code != 0:
            if sys.exception() is not None:
                traceback.print_exc()
            with contextlib.suppress(OSError, AttributeError):  # AttributeError: closed from the start
                sys.stdout.flush()
            logs.drain()
            os._exit(code)
    return code


def _report(identity: Identity, status: StatusPipe, error: Exception) -> None:
    if status.connected:
        status.send(ErrorReport(str(error), consequence=isinstance(error, GroupError)))
    else:
        logs.say(f"tilerank: error: rank {identity.rank}: {error}")


def _run(identity: Identity, args: argparse.Namespace, job: Job[W], status: StatusPipe) -> None:
    begun = time.monotonic()
    if args.isa is not None:
        os.environ["TILERANK_ISA"] = args.isa
    if identity.launcher != "tilerank":
        check_tp(identity, args.tp)
    if identity.launcher in ("torchrun", "Open MPI", "MPICH"):
        _die_with_launcher()
    placement, own = _bind_process(identity, args)
    if identity.rank == 0:
        job.prepare()
    method = rendezvous_method(identity, os.environ, args.master_addr, args.master_port)
    fd = os.environ.get("TILERANK_FD") if method.kind == "given" else None
    address = find_address(identity, method, fd=None if fd is None else int(fd), finalize=args.collectives != "mpi")
    os.environ.pop("TILERANK_SECRET", None)  # the processes that this one starts do not need it
    _reach(status, "joining")

    gc.disable()  # it would go through the objects of torch's modules, more with every module that is imported
    import torch

    from tilerank.kernels import core
    from tilerank.parallel.join import join
    from tilerank.parallel.rendezvous import Membership

    gc.freeze()  # they stay, so that it need not visit them later either
    gc.enable()
    torch.set_num_threads(1)
    if identity.local_rank == 0:
        # Checked before any rank loads: all ranks wait in join() for this one. `here` assumes that a launcher fills one
        # host after the other; under round-robin assignment the estimate changes only slightly.
        here = range(min(identity.rank, identity.size - identity.local_size), identity.size)[: identity.local_size]
        refusal = job.memory_refusal(identity.size, here, placement)
        if refusal is not None:
            raise LaunchError(refusal)
    notice_s = max(NOTICE_S - (time.monotonic() - begun), SHORTEST_NOTICE_S)
    core.start_pool(own.pool_cores, own.threads, spin=not placement.oversubscribed)
    member = Membership(
        identity.rank,
        identity.size,
        address.host,
        address.port,
        address.fd,
        answer_s(args),
        attempt=address.attempt,
        join_timeout_s=joining_s(args),
        # The supervisor reports its own ranks at once, and those of one host are all its own.
        notice_s=None if identity.launcher == "tilerank" and address.host.startswith("@") else notice_s,
        secret=address.secret,
        agent=address.agent,
    )
    team = join(member, args.collectives, spin=not placement.oversubscribed)
    _end_after_failure(team, identity, status)
    try:
        agree_on_rungs(team, own, spin=not placement.oversubscribed)
        _reach(status, "loading")
        worker = job.build(team, own)
        team.ready(LOAD_S)
        _reach(status, "generating")
        if identity.rank == 0:
            job.lead(worker, identity.size, placement)
            worker.stop()
        else:
            worker.follow()
    except GroupError:
        _kill_stuck(team, identity)
        raise
    team.close()


def _end_after_failure(team: "Team", identity: Identity, status: StatusPipe) -> None:
    """End this process GIVE_UP_S after another rank is lost, unless the main thread ends it earlier.

    The main thread sees a lost rank in collectives and control messages, but not while it loads or waits for requests.
    """
    from tilerank.parallel.watch import Reason

    def end() -> None:
        _report(identity, status, team.channel.watch.error())
        _kill_stuck(team, identity)
        logs.drain()
        os._exit(1)

    def on_failure(_: int, reason: Reason) -> None:
        if reason is not Reason.LEFT:
            timer = threading.Timer(GIVE_UP_S, end)
            timer.daemon = True
            timer.start()

    team.channel.watch.on_failure(on_failure)


def _kill_stuck(team: "Team", identity: Identity) -> None:
    if identity.launcher == "tilerank":  # the supervisor kills all ranks
        return
    process = team.channel.watch.stuck_process()
    if process is not None:
        with contextlib.suppress(ProcessLookupError):  # another neighbour has already killed it
            os.kill(process, signal.SIGKILL)


def _reach(status: StatusPipe, phase: Phase) -> None:
    status.send(Reached(phase))  # before the log line, so that the supervisor has the phase once the line is visible
    log.debug("%s", phase)


def _bind_process(identity: Identity, args: argparse.Namespace) -> tuple[Placement, RankPlacement]:
    """Bind this process to its cores and memory, and log which settings of a foreign launcher are kept or replaced."""
    topology = read_topology()
    if identity.launcher == "tilerank":
        placement = inherited_placement(os.environ)
    else:
        placement = foreign_placement(args, topology, identity)
    own = replace(placement.ranks[identity.local_rank], rank=identity.rank)
    notes = [] if identity.launcher == "tilerank" else inherited_notes(topology, own, os.environ)
    os.environ.update(RANK_ENVIRONMENT)
    for note in (*(placement.notes if identity.local_rank == 0 else ()), *notes):
        log.info(note)
    binding = bind(own, strict=args.membind == "strict")
    for note in binding.notes:
        log.warning(note)
    log.debug("rank %d: %s; memory policy %s", own.rank, own.reason, binding.policy)
    return placement, own


def _die_with_launcher() -> None:
    """End this process when the launcher is killed: all launchers but MPICH's would leave orphans.

    The parent-death signal would not do: it watches the direct parent only, which may be a wrapper script.
    """
    launcher = launcher_process()
    try:
        pidfd = os.pidfd_open(launcher.pid)
    except OSError as e:
        raise LaunchError(f"the launcher (process {launcher.pid}) is gone") from e

    def watch() -> None:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        while not poll.poll():
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="launcher watch", daemon=True).start()
